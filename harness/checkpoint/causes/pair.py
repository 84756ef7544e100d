"""What memory holds beside what is due, row by row. Knows two tensors; must not know names, files or mistakes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_STRIP = 1 << 20
SAMPLED = 1 << 16
"""Elements on which causes are tried before the whole is looked at."""
MOST_ROWS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Rows in memory and the decoded ones that belong there. Shapes: held [n, C], expected [n, C], rows [n].

    `rows` are the numbers of the rows in their tensor, of `whole` rows. Nothing here is a copy.
    """

    held: Tensor
    expected: Tensor
    rows: Tensor
    whole: int

    def take(self, at: Tensor) -> Pair:
        """Return some of the rows."""
        return Pair(held=self.held[at], expected=self.expected[at], rows=self.rows[at], whole=self.whole)


def pair_of(held: Tensor, expected: Tensor) -> Pair:
    """Return two tensors of equal shape as rows of their last axis."""
    width = held.shape[-1] if held.dim() > 1 else held.numel()
    rows = held.numel() // max(1, width)
    return Pair(
        held=held.reshape(rows, width), expected=expected.reshape(rows, width), rows=torch.arange(rows), whole=rows
    )


def same(held: Tensor, value: Tensor, *, slack: float = 0.0) -> Tensor:
    """Say element by element whether memory holds a value, rounded to memory's dtype; NaN is NaN here.

    `slack`: relative distance that is free, for values that another order of multiplications rounds otherwise.
    """
    if not held.is_floating_point():
        return held == value.to(held.dtype)
    wide = held.to(torch.float32) if held.element_size() == 1 else held
    rounded = value.to(held.dtype).to(wide.dtype)
    equal = (wide == rounded) | (wide.isnan() & rounded.isnan())
    if slack:
        margin = value.abs() * slack
        low, high = ((value + m).to(held.dtype).to(wide.dtype) for m in (-margin, margin))
        equal |= (wide >= low) & (wide <= high)
    return equal


def wrong_by_row(pair: Pair) -> Tensor:
    """Count the wrong elements of each row, strip by strip. Returns [n] int64."""
    width = max(1, pair.held.shape[1])
    step = max(1, _STRIP // width)
    counts = [
        (~same(pair.held[i : i + step], pair.expected[i : i + step])).sum(dim=1) for i in range(0, len(pair.held), step)
    ]
    return torch.cat(counts) if counts else torch.zeros(0, dtype=torch.int64)


def sample(pair: Pair, wrong: Tensor) -> Pair:
    """Return a few rows with wrong elements, the first and others spread evenly, and some that are right."""
    most = max(2, min(MOST_ROWS, SAMPLED // max(1, pair.held.shape[1])))
    bad, good = _spread(wrong.nonzero()[:, 0], most), _spread((wrong == 0).nonzero()[:, 0], most // 2)
    return pair.take(torch.cat((bad, good)))


def _spread(at: Tensor, most: int) -> Tensor:
    return at[torch.linspace(0, len(at) - 1, most).long()] if len(at) > most else at
