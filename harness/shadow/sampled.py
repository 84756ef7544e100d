"""Some rows and columns of a product that is too large to repeat. Knows tensors and layouts; must not know ports.

A row of the left and a column of the right factor give one element each, so a product of few of them is a part of the
large one. What is read from the device are lines of memory without gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.shadow.calls import Held, held

ROWS, COLUMNS = 4, 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Arguments of a part of a product as `Held`, and the rows and columns that it is."""

    args: tuple[Any, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def of(self, result: Tensor) -> Held:
        """Read this part of what the device gave."""
        chosen = torch.tensor(self.columns)
        lines = [held(result[row]) for row in self.rows]
        return _stacked([line.tensor()[chosen] for line in lines], str(result.device), across=False)

    def words(self) -> str:
        """Return which part it is."""
        return f"rows {_few(self.rows)} and columns {_few(self.columns)} of a larger product"


def part_of(name: str, args: Sequence[Any]) -> Part | None:
    """Return a part of a large product to repeat; None where its rows and columns have gaps in memory."""
    if name not in ("mm", "addmm") or len(args) < 2 or not all(isinstance(x, Tensor) for x in args):
        return None
    *added, a, b = args
    if a.stride(1) != 1 or b.stride(0) != 1 or any(x.dim() != 1 or x.shape[0] != b.shape[1] for x in added):
        return None
    rows, columns = _spread(a.shape[0], ROWS), _spread(b.shape[1], COLUMNS)
    left = _stacked([held(a[row]).tensor() for row in rows], str(a.device), across=False)
    right = _stacked([held(b[:, column]).tensor() for column in columns], str(b.device), across=True)
    more = [_stacked([held(x).tensor()[torch.tensor(columns)]], str(x.device), across=False, flat=True) for x in added]
    return Part(args=(*more, left, right), rows=rows, columns=columns)


def _spread(count: int, most: int) -> tuple[int, ...]:
    """Return at most so many places, the first and the last among them."""
    return tuple(dict.fromkeys(torch.linspace(0, count - 1, min(count, most)).round().long().tolist()))


def _stacked(lines: Sequence[Tensor], device: str, *, across: bool, flat: bool = False) -> Held:
    """Return lines as the rows of a matrix, or `across` as its columns, each without gaps in memory."""
    whole, wide = torch.cat([line.contiguous() for line in lines]), lines[0].numel()
    sizes: tuple[int, ...] = (wide, len(lines)) if across else (wide,) if flat else (len(lines), wide)
    strides: tuple[int, ...] = (1, wide) if across else (1,) if flat else (wide, 1)
    return Held(flat=whole, sizes=sizes, strides=strides, offset=0, device=device)


def _few(places: Sequence[int]) -> str:
    return f"{', '.join(map(str, places[:3]))}{' ... ' + str(places[-1]) if len(places) > 3 else ''}"
