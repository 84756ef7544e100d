"""Decisions as sets: routes and selections with ties by margin. Knows tensors of ids and scores; must not know taps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PADDING = -1
"""An entry of a selection that stands for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sets:
    """Selections as membership. Shapes: member [R, N] bool; `strays` [R] counts ids outside 0..N-1 but padding."""

    member: Tensor
    strays: Tensor

    @property
    def size(self) -> Tensor:
        """Number of distinct members by row, [R]."""
        return self.member.sum(dim=1)


def as_sets(ids: Tensor, *, candidates: int) -> Sets:
    """Return the sets that rows of ids stand for. Shapes: ids [R, K] integer. Repeated ids count once."""
    ids = ids.to(torch.int64)
    inside = (ids >= 0) & (ids < candidates)
    member = torch.zeros(ids.shape[0], candidates + 1, dtype=torch.bool)
    member.scatter_(1, torch.where(inside, ids, candidates), True)
    return Sets(member=member[:, :candidates], strays=(~inside & (ids != PADDING)).sum(dim=1))


def valid_candidates(scores: Tensor) -> Tensor:
    """Say which candidates may be chosen: scores neither NaN nor masked (-inf, or near the dtype's least value)."""
    return torch.isfinite(scores) & (scores > torch.finfo(scores.dtype).min / 2)


def score_error(*, actual: Tensor, expected: Tensor, valid: Tensor) -> Tensor:
    """Return by row what a decision's scores are uncertain by: the greater of the pooled rms error of all rows and half
    of the row's largest error. Shapes: all [R, N]; the result [R], float64.
    """
    error = torch.where(valid, actual.to(torch.float64) - expected.to(torch.float64), 0.0).abs()
    pooled = (error.square().sum() / valid.sum().clamp(min=1)).sqrt()
    largest = error.amax(dim=1) if error.shape[1] else torch.zeros(error.shape[0], dtype=torch.float64)
    return torch.maximum(pooled.expand_as(largest), largest / 2)


def margin_z(*, actual: Tensor, expected: Tensor, scores: Tensor, uncertainty: Tensor) -> Tensor:
    """Return by row how far a changed set is outside what the score's uncertainty explains.

    z = (highest oracle score dropped - lowest oracle score gained) / uncertainty; 0 where the sets are equal or only
    differ in size, infinite where scores differ but nothing is uncertain.
    Shapes: actual, expected [R, N] bool; scores [R, N] of the oracle; uncertainty [R]; the result [R], float64.
    """
    wide = scores.to(torch.float64)
    dropped = torch.where(expected & ~actual, wide, -torch.inf).amax(dim=1)
    gained = torch.where(actual & ~expected, wide, torch.inf).amin(dim=1)
    gap = dropped - gained
    judged = torch.isfinite(dropped) & torch.isfinite(gained) & (gap > 0)
    return torch.where(judged, gap / uncertainty, torch.zeros_like(gap))
