"""Weights that a port holds in a declared format: near the checkpoint's, not equal. Knows schemes and rows; no port.

A weight of the checkpoint's own name is held against it element by element: none may lie further off than one step of
the format. What was fused or renamed is looked for row by row: a few random projections of a row hardly move when it is
rounded, and rows that are not of one another are far apart. What is found is put back to the checkpoint's own row, so
that everything after it (order, rows never used) is told as for a port that rounds nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.formats import Logical, decode
from harness.errors import CheckpointError
from harness.precision.rounding import steps
from harness.precision.scheme import Precision, Scheme

PROJECTIONS = 12
NEAR = 0.3
"""Distance of projections, over the row's own length, within which a row may be the rounded form of another. Source:
four-bit formats move a row by 0.14 of its length, FP8 by 0.03; rows that have nothing in common are 1.4 apart."""
_CHUNK = 1 << 12
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")


def beyond_a_step(held: Tensor, expected: Tensor, scheme: Scheme) -> Tensor:
    """Return which elements lie further from the checkpoint's than one step of the format, boolean.

    A port may take its scales by another rule, so the nearer of two neighbours is not asked for; a scale that is a
    power of two may cut the largest by two steps. One rounding to the dtype of memory is free. Along which axis rows
    run is the port's business: the better of both is taken. Shapes: both alike, at least one axis.
    """
    far = _far(held, expected, scheme)
    if expected.dim() >= 2 and bool(far.any()):
        turned = _far(held.transpose(-1, -2), expected.transpose(-1, -2), scheme).transpose(-1, -2)
        far = turned if int(turned.sum()) < int(far.sum()) else far
    return far


def _far(held: Tensor, expected: Tensor, scheme: Scheme) -> Tensor:
    wide = expected.to(torch.float32)
    step = steps(wide, scheme) * (2.0 if scheme.power_of_two else 1.0)
    free = torch.finfo(held.dtype).eps if held.is_floating_point() and held.element_size() > 1 else 0.0
    return ~((held.to(torch.float32) - wide).abs() <= step + wide.abs() * free)


@dataclass(slots=True)
class _Rows:
    """Rows of one length in one layer: projections [N, P], and the source and its row of each."""

    projections: list[Tensor] = field(default_factory=list)
    sources: list[Logical] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])

    def add(self, source: Logical, rows: Tensor) -> None:
        """Take the rows of a source."""
        self.projections.append(_projected(rows))
        self.sources.append(source)
        self.starts.append(self.starts[-1] + len(rows))


class Near:
    """The checkpoint's rows, to find what a port's rounded ones were. Projections are made when first asked for."""

    def __init__(self, checkpoint: Checkpoint, logicals: Iterable[Logical], declared: Precision) -> None:
        self.checkpoint, self.declared = checkpoint, declared
        self._logicals = [x for x in logicals if not x.problem and len(x.shape) >= 2]
        self._rows: dict[tuple[str, int], _Rows] | None = None

    def restored(self, name: str, held: Tensor) -> Tensor:
        """Return a weight with every row that is a checkpoint's row, rounded as declared, put back to that row."""
        scheme = self.declared.weights
        if scheme is None or held.dim() < 2 or not held.is_floating_point() or self.declared.keeps(name):
            return held
        by_rows, count = self._put_back(name, held, scheme)
        if count * 2 > held.numel() // held.shape[-1]:
            return by_rows
        by_columns, other = self._put_back(name, held.transpose(-1, -2), scheme)
        return by_columns.transpose(-1, -2).contiguous() if other > count else by_rows

    def _put_back(self, name: str, held: Tensor, scheme: Scheme) -> tuple[Tensor, int]:
        rows = held.reshape(-1, held.shape[-1])
        table = self._table().get((_layer(name), rows.shape[1]))
        if table is None:
            return held, 0
        wanted, result, count = _nearest(rows, torch.cat(table.projections)), rows.clone(), 0
        for number, source in enumerate(table.sources):
            start, stop = table.starts[number], table.starts[number + 1]
            mine = ((wanted >= start) & (wanted < stop)).nonzero()[:, 0]
            if not len(mine):
                continue
            value = decode(self.checkpoint, source, widen=False)
            expected = value.reshape(-1, value.shape[-1])[wanted[mine] - start]
            step = steps(value.float(), scheme).reshape(-1, value.shape[-1])[wanted[mine] - start]
            off = (rows[mine].float() - expected.float()).abs()
            free = torch.finfo(rows.dtype).eps if rows.element_size() > 1 else 0.0
            factor = 2.0 if scheme.power_of_two else 1.0
            fits = (off <= factor * step + expected.float().abs() * free).all(dim=1)
            result[mine[fits]] = expected[fits].to(rows.dtype)
            count += int(fits.sum())
        return result.reshape(held.shape), count

    def _table(self) -> dict[tuple[str, int], _Rows]:
        if self._rows is None:
            self._rows = {}
            for source, value in self._decoded():
                rows = value.reshape(-1, value.shape[-1])
                self._rows.setdefault((_layer(source.name), rows.shape[1]), _Rows()).add(source, rows)
        return self._rows

    def _decoded(self) -> Iterator[tuple[Logical, Tensor]]:
        for source in self._logicals:
            try:
                yield source, decode(self.checkpoint, source, widen=False)
            except CheckpointError:
                continue  # told where the weight is looked for by name


def _layer(name: str) -> str:
    found = _LAYER.search(name)
    return found[1] if found else ""


def _projected(rows: Tensor) -> Tensor:
    """Return a few random projections of each row, the same ones for rows of one length. [N, K] -> [N, P]."""
    generator = torch.Generator().manual_seed(rows.shape[1])
    directions = torch.randn(rows.shape[1], PROJECTIONS, generator=generator) / PROJECTIONS**0.5
    projected: Tensor = rows.float() @ directions
    return projected


def _nearest(rows: Tensor, known: Tensor) -> Tensor:
    """Return for each row the number of the known one nearest to it, -1 where none is near. Shapes: [N, K], [M, P]."""
    found = []
    for start in range(0, len(rows), _CHUNK):
        part = rows[start : start + _CHUNK]
        apart = torch.cdist(_projected(part), known)
        least, at = apart.min(dim=1)
        found.append(torch.where(least <= NEAR * part.float().norm(dim=1), at, -1))
    return torch.cat(found)
