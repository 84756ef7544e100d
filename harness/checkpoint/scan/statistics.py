"""What the decoded values of one matrix look like in a few numbers. Knows values and blocks; must not know files.

`seam` tells a matrix whose scales are not its own. Values change smoothly across the edges of blocks unless a wrong
scale makes them jump there: the energy of blocks, rows and columns allowed for, then varies more on the grid of scales
than on the same grid moved by half a block, which sees two or four neighbours at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SEAM_ROWS = 1024
"""Rows looked at for seams where each row has scales of its own: enough to tell, and little to compute."""
FEWEST_CELLS = 24
LEAST_COLUMN = 1e-3
"""Share of the mean column's energy that a column counts as having at least."""
STRETCHES, FEWEST_ROWS = 16, 8
"""Stretches of rows whose columns are compared, and the fewest rows of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Of one matrix: where it lies, and its values. Non-finite ones are counted and left out of the rest.

    `seam` is the log of the ratio of variances on the grid of scales and between, `seam_cells` how many blocks told it
    (0: none did) and `seam_rows` how many rows share a scale. `likeness` is how alike the columns' sizes of a stretch
    of rows and of all others are (correlation of logs, the median stretch), `least_likeness` that of the strangest one,
    `strange_rows` [start, stop).
    """

    name: str
    format: str
    file: str
    offset: int
    elements: int
    rows: int
    mean: float
    rms: float
    largest: float
    nonfinite: int
    seam: float
    seam_cells: int
    seam_rows: int
    likeness: float
    least_likeness: float
    strange_rows: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What some rows showed: to be added to the profile of their matrix. `columns` by stretch of rows."""

    start: int
    rows: int
    elements: int
    nonfinite: int
    total: float
    squares: float
    largest: float
    columns: tuple[tuple[int, Tensor], ...]
    cells: Tensor | None


class Profile:
    """The statistics of one matrix of `rows` rows, fed in pieces of rows: looked at anywhere, added one by one.

    `block`: rows and columns that share a scale, or (0, 0).
    """

    def __init__(self, block: tuple[int, int], rows: int) -> None:
        self._block = block
        self._tall, self._wide = max(1, block[0] // 2), max(1, block[1] // 2)
        self._stretch = max(FEWEST_ROWS, -(-rows // STRETCHES))
        self._energy: dict[int, Tensor] = {}
        self._elements = self._rows = self._nonfinite = 0
        self._sum = self._squares = self._largest = 0.0
        self._cells: Tensor | None = None

    def look(self, values: Tensor, start: int, scratch: Tensor | None = None) -> Look | None:
        """Look at rows from `start` on; changes nothing here. `scratch`: memory to be written over, float32.

        Shape: [rows, columns] or [n]; integers are looked at as numbers.
        """
        v = values.to(torch.float32) if values.dtype is not torch.float64 else values
        if not v.numel():
            return None
        v = v.reshape(len(v), -1) if v.dim() else v.reshape(1, 1)
        low, high = (float(x) for x in torch.aminmax(v))
        nonfinite = 0
        if not (math.isfinite(low) and math.isfinite(high)):
            finite = v.isfinite()
            nonfinite = int((~finite).sum())
            v = torch.where(finite, v, 0.0)
            low, high = (float(x) for x in torch.aminmax(v))
        usable = scratch is not None and scratch.dtype is v.dtype and scratch.numel() >= v.numel()
        memory = scratch[: v.numel()].view(v.shape) if scratch is not None and usable else torch.empty_like(v)
        squares = torch.mul(v, v, out=memory)
        by_row = squares.sum(dim=1)
        weight = by_row.clamp(min=torch.finfo(squares.dtype).tiny).reciprocal_()  # no row outweighs the others
        return Look(
            start=start, rows=v.shape[0], elements=v.numel(), nonfinite=nonfinite, total=float(v.sum()),
            squares=float(by_row.sum(dtype=torch.float64)), largest=max(-low, high, 0.0),
            columns=tuple(self._columns(squares, weight, start)), cells=self._cells_of(squares, weight, start),
        )  # fmt: skip

    def _columns(self, squares: Tensor, weight: Tensor, start: int) -> Iterator[tuple[int, Tensor]]:
        """Add up each column's share of its rows, by stretches of rows."""
        at, rows = 0, squares.shape[0]
        while squares.shape[1] >= FEWEST_CELLS and at < rows:
            place, inside = divmod(start + at, self._stretch)
            stop = min(rows, at + self._stretch - inside)
            yield place, torch.mv(squares[at:stop].T, weight[at:stop]).double()
            at = stop

    def _cells_of(self, squares: Tensor, weight: Tensor, start: int) -> Tensor | None:
        """Return each row's energy over halves of blocks, without a partial cell at the edge; None where not wanted."""
        if not self._block[1] or (self._block[0] == 1 and start >= SEAM_ROWS):
            return None
        whole = squares.shape[1] // self._wide
        cells = squares[:, : whole * self._wide].view(len(squares), whole, self._wide).sum(dim=2)
        return cells.mul_(weight[:, None]).double()

    def add(self, look: Look | None) -> None:
        """Add what some rows showed."""
        if look is None:
            return
        self._rows = max(self._rows, look.start + look.rows)
        self._elements += look.elements
        self._nonfinite += look.nonfinite
        self._sum += look.total
        self._squares += look.squares
        self._largest = max(self._largest, look.largest)
        for place, energy in look.columns:
            self._energy[place] = self._energy[place] + energy if place in self._energy else energy
        if look.cells is not None:
            self._add_cells(look.start, look.cells)

    def _add_cells(self, start: int, rows: Tensor) -> None:
        index = torch.arange(start, start + len(rows)) // self._tall
        need = int(index[-1]) + 1
        if self._cells is None or len(self._cells) < need:
            wider = rows.new_zeros(max(need, 2 * len(self._cells) if self._cells is not None else 0), rows.shape[1])
            if self._cells is not None:
                wider[: len(self._cells)] = self._cells
            self._cells = wider
        self._cells.index_add_(0, index, rows)

    def _whole_cells(self) -> Tensor:
        """Return the cells of whole height."""
        assert self._cells is not None
        rows = min(self._rows, SEAM_ROWS) if self._block[0] == 1 else self._rows
        return self._cells[: rows // self._tall]

    def result(self, *, name: str, format: str, file: str, offset: int) -> Statistics:
        """Return the statistics of everything that was fed."""
        seam, cells = _seam(self._whole_cells(), self._block) if self._cells is not None else (0.0, 0)
        usual, least, at = _likeness([self._energy[place] for place in sorted(self._energy)])
        strange = (at * self._stretch, min(self._rows, (at + 1) * self._stretch))
        count = max(1, self._elements)
        return Statistics(
            name=name, format=format, file=file, offset=offset, elements=self._elements, rows=self._rows,
            mean=self._sum / count, rms=math.sqrt(self._squares / count), largest=self._largest,
            nonfinite=self._nonfinite, seam=seam, seam_cells=cells,
            seam_rows=self._block[0],
            likeness=usual, least_likeness=least, strange_rows=strange,
        )  # fmt: skip


def _likeness(stretches: list[Tensor]) -> tuple[float, float, int]:
    """Return the median and the least correlation of a stretch's columns with all others', and where that is."""
    if len(stretches) < 4:
        return 0.0, 0.0, 0
    energy = torch.stack(stretches)
    others = energy.sum(dim=0, keepdim=True) - energy
    if not bool((others > 0).all()):
        return 0.0, 0.0, 0
    # A column may round to zero in all rows of a stretch: its log must not outweigh all others.
    least = [(x.mean(dim=1, keepdim=True) * LEAST_COLUMN).clamp(min=1e-300) for x in (energy, others)]
    mine, theirs = (x.maximum(low).log() for x, low in zip((energy, others), least, strict=True))
    mine, theirs = (x - x.mean(dim=1, keepdim=True) for x in (mine, theirs))
    alike = (mine * theirs).sum(dim=1) / (mine.norm(dim=1) * theirs.norm(dim=1)).clamp(min=1e-300)
    return float(alike.median()), float(alike.min()), int(alike.argmin())


def _seam(cells: Tensor, block: tuple[int, int]) -> tuple[float, int]:
    down = 1 if block[0] == 1 else 2
    aligned, between = _grid(cells, down, 0), _grid(cells, down, 1)
    if min(aligned.shape) < 2 or min(between.shape) < 2 or between.numel() < FEWEST_CELLS:
        return 0.0, 0
    on, off = _unevenness(aligned), _unevenness(between)
    if on is None or off is None or not (bool(on.any()) and bool(off.any())):
        return 0.0, 0
    ratio = float(on.abs().mean() / off.abs().mean())
    return 2 * math.log(ratio), min(_independent(on), _independent(off))


def _independent(rest: Tensor) -> int:
    """Return how many cells are of independent size: where rows of blocks go together, only their number counts.

    Source: the participation ratio of the singular values, tr(C)^2 / tr(C^2), as an effective rank.
    """
    covariance = rest.T @ rest if rest.shape[0] >= rest.shape[1] else rest @ rest.T
    rank = float(covariance.trace() ** 2 / covariance.square().sum())
    return min(rest.numel(), int(rank * max(rest.shape)))


def _grid(cells: Tensor, down: int, shift: int) -> Tensor:
    """Join cells into blocks, `shift` cells off the grid of scales."""
    cells = cells[(shift if down == 2 else 0) :, shift:]
    rows, columns = cells.shape[0] // down * down, cells.shape[1] // 2 * 2
    return cells[:rows, :columns].reshape(rows // down, down, columns // 2, 2).sum(dim=(1, 3))


def _unevenness(energy: Tensor) -> Tensor | None:
    """Return log energy, each row and column allowed a level of its own; None where a cell is empty."""
    if not bool((energy > 0).all()):
        return None
    logs = energy.log()
    rest = logs - logs.mean(dim=0) - logs.mean(dim=1, keepdim=True) + logs.mean()
    return rest / math.sqrt((1 - 1 / energy.shape[0]) * (1 - 1 / energy.shape[1]))
