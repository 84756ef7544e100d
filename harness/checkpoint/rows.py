"""Find where the rows of one tensor come from. Knows numbers only; must not know names, files or models.

A row is hashed to 64 bits, so what was assembled from many tensors (stacked experts, fused projections, transposed or
interleaved) is recognised without ever holding both sides. The order is then told as runs of consecutive source rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Hashes = NDArray[np.uint64]
Ints = NDArray[np.int64]

MAX_RUNS = 4096
STRIDES = (1, 2, 3, 4)
_CHUNK_WORDS = 1 << 16
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def row_hashes(value: Tensor) -> Hashes:
    """Hash every row of the last axis. Signed zeros are equal. value [..., L] -> [rows] uint64.

    Each 8-byte word of a row is mixed with its position (the finaliser of splitmix64), and the words are added up.
    """
    rows = value.reshape(-1, value.shape[-1])
    if value.is_floating_point() and value.element_size() > 1:
        rows = rows + 0.0  # -0.0 + 0.0 is +0.0
    content = rows.flatten().view(torch.uint8).numpy().reshape(len(rows), -1)
    width = -(-content.shape[1] // 8)
    result = np.empty(len(content), dtype=np.uint64)
    positions = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    step = max(1, _CHUNK_WORDS // max(1, width))
    for start in range(0, len(content), step):
        chunk = content[start : start + step]
        if content.shape[1] % 8:
            chunk = np.pad(chunk, ((0, 0), (0, width * 8 - content.shape[1])))
        words = np.ascontiguousarray(chunk).view(np.uint64) + positions
        for shift, factor in _MIX:
            words ^= words >> np.uint64(shift)
            words *= np.uint64(factor)
        words ^= words >> np.uint64(31)
        result[start : start + step] = words.sum(axis=1, dtype=np.uint64)
    return result


def constant_rows(value: Tensor) -> int:
    """Count the rows whose elements are all the same: their content says nothing about where they come from."""
    if value.shape[-1] < 2:
        return 0
    rows = value.reshape(-1, value.shape[-1])
    rows = rows.float() if value.element_size() == 1 and value.is_floating_point() else rows
    likely = rows[rows[:, 0] == rows[:, 1]]
    return int((likely == likely[:, :1]).all(dim=1).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable:
    """All candidate rows of one length: hashes in source order, and where each source begins."""

    hashes: Hashes
    starts: Ints
    sources: tuple[str, ...]
    order: Ints
    ordered: Hashes

    @staticmethod
    def build(sources: Sequence[tuple[str, Hashes]]) -> RowTable:
        """Join the rows of named sources."""
        hashes = np.concatenate([h for _, h in sources]) if sources else np.empty(0, dtype=np.uint64)
        starts = np.cumsum([0, *(len(h) for _, h in sources)]).astype(np.int64)
        order = np.argsort(hashes, kind="stable").astype(np.int64)
        return RowTable(
            hashes=hashes, starts=starts, sources=tuple(n for n, _ in sources), order=order, ordered=hashes[order]
        )

    def rows_of(self, source: str) -> int:
        """Return how many rows a source has."""
        at = self.sources.index(source)
        return int(self.starts[at + 1] - self.starts[at])

    def found(self, wanted: Hashes) -> NDArray[np.bool_]:
        """Say for each hash whether any source has such a row."""
        if not len(self.hashes):
            return np.zeros(len(wanted), dtype=bool)
        at = np.searchsorted(self.ordered, wanted).clip(max=len(self.ordered) - 1)
        return np.asarray(self.ordered[at] == wanted)

    def positions(self, wanted: Hashes) -> Ints:
        """Return the positions in `hashes` of every row that is wanted, equal rows included."""
        unique = np.unique(wanted)
        low = np.searchsorted(self.ordered, unique, side="left")
        high = np.searchsorted(self.ordered, unique, side="right")
        several = [self.order[a:b] for a, b in zip(low, high, strict=True) if b - a > 1]
        single = self.order[low[high - low == 1]]
        return np.concatenate([single, *several]) if several else single


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`count` consecutive rows of `source` from `start`; source "" where no source has such rows."""

    source: str
    start: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How rows were assembled: row r belongs to stream r % stride, and each stream is a list of runs."""

    stride: int
    streams: tuple[tuple[Run, ...], ...]

    @property
    def runs(self) -> int:
        """Number of runs; the description that needs fewest is the one to believe."""
        return sum(len(s) for s in self.streams)


def find_order(wanted: Hashes, table: RowTable) -> Order | None:
    """Describe rows as runs of source rows, interleaved by the stride that needs fewest runs; None beyond MAX_RUNS."""
    best: Order | None = None
    limit = MAX_RUNS
    for stride in STRIDES:
        if stride > 1 and len(wanted) % stride:
            continue
        streams: list[tuple[Run, ...]] = []
        left = limit
        for offset in range(stride):
            runs = _runs(wanted[offset::stride], table, left)
            if runs is None:
                break
            left -= len(runs)
            streams.append(runs)
        if len(streams) == stride and (best is None or sum(len(s) for s in streams) < best.runs):
            best = Order(stride=stride, streams=tuple(streams))
            limit = best.runs
        if best is not None and best.runs <= stride:
            break
    return best


def _runs(wanted: Hashes, table: RowTable, limit: int) -> tuple[Run, ...] | None:
    found = table.found(wanted)
    runs: list[Run] = []
    at, last = 0, -1
    while at < len(wanted):
        if len(runs) >= limit:
            return None
        if not found[at]:
            gap = found[at:]
            count = int(gap.argmax()) if gap.any() else len(gap)
            runs.append(Run(source="", start=0, count=count))
            at += count
            continue
        row, count = _longest(wanted[at:], table, last)
        source = int(np.searchsorted(table.starts, row, side="right")) - 1
        runs.append(Run(source=table.sources[source], start=row - int(table.starts[source]), count=count))
        at, last = at + count, source
    return tuple(runs)


def _longest(wanted: Hashes, table: RowTable, last: int) -> tuple[int, int]:
    """Return the source row whose run explains most of what follows; ties go to the first rows of the next source."""
    low = int(np.searchsorted(table.ordered, wanted[0], side="left"))
    high = int(np.searchsorted(table.ordered, wanted[0], side="right"))
    best, best_count = int(table.order[low]), 0
    # Rows that repeat often (zeros) have many candidates; a handful is enough to find the run that goes on.
    for row in table.order[low : min(high, low + 64)].tolist():
        source = int(np.searchsorted(table.starts, row, side="right")) - 1
        stop = min(int(table.starts[source + 1]), row + len(wanted))
        same = table.hashes[row:stop] == wanted[: stop - row]
        count = len(same) if same.all() else int((~same).argmax())
        if count > best_count or (count == best_count and source == last + 1 and row == table.starts[source]):
            best, best_count = row, count
    return best, best_count
