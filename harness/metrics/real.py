"""Real-valued metrics. Knows tensors only, accumulates in float64, propagates NaN; must not know taps or limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 22
"""Elements widened to float64 at a time, so that logits of a long prompt do not double the memory of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SquaredSums:
    """Sums of squares of one matrix [T, E] by row and by column.

    Shapes: token [T], channel [E]; float64.
    """

    token: Tensor
    channel: Tensor

    @property
    def whole(self) -> float:
        """Sum of squares of all elements."""
        return float(self.token.sum())

    def by_head(self, heads: int) -> Tensor:
        """Return the sums by head, [heads]; channels are head-major."""
        return self.channel.reshape(heads, -1).sum(dim=1)


def error_sums(*, actual: Tensor, expected: Tensor, weight: Tensor | None = None) -> SquaredSums:
    """Return the sums of squares of `actual - expected`. Shapes: both [T, E]; `weight` [T] weighs rows by column."""
    return _sums(actual, expected, None, weight)


def signal_sums(*, expected: Tensor) -> SquaredSums:
    """Return the sums of squares of `expected` [T, E]."""
    return _sums(expected, None, None, None)


def rounding_sums(*, expected: Tensor, dtype: torch.dtype, weight: Tensor | None = None) -> SquaredSums:
    """Return the sums of squares of one rounding error of `expected` [T, E] in `dtype`; `weight` as in `error_sums`."""
    return _sums(expected, None, dtype, weight)


def _sums(first: Tensor, second: Tensor | None, dtype: torch.dtype | None, weight: Tensor | None) -> SquaredSums:
    rows, width = first.shape
    token, channel = torch.zeros(rows, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    step = max(1, _BLOCK_ELEMENTS // max(1, width))
    for start in range(0, rows, step):
        block = first[start : start + step].to(torch.float64)
        if second is not None:
            block = block - second[start : start + step].to(torch.float64)
        squares = _half_ulp_squares(block, dtype) if dtype is not None else block.square()
        token[start : start + step] = squares.sum(dim=1)
        channel += squares.sum(dim=0) if weight is None else weight[start : start + step] @ squares
    return SquaredSums(token=token, channel=channel)


def _half_ulp_squares(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean square error of rounding to nearest: uniform within half an ulp, so half_ulp^2 / 3."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(values.abs().clamp(min=info.tiny)).exponent
    half_ulp = torch.ldexp(torch.full_like(values, info.eps / 4), exponent)
    return torch.where(values == 0, 0.0, half_ulp.square() / 3)


def half_ulp_norm(*, expected: Tensor, dtype: torch.dtype) -> float:
    """Return the expected L2 norm of the error of rounding `expected` once to `dtype` (round to nearest).

    An error uniform within half an ulp has the root mean square half_ulp / sqrt(3); zeros are exact.
    """
    return math.sqrt(rounding_sums(expected=expected.reshape(1, -1), dtype=dtype).whole)


def rel_rms_error(*, actual: Tensor, expected: Tensor) -> float:
    """Return ||actual - expected|| / ||expected||. NaN where both are zero has no meaning: 0/0 is NaN."""
    error = error_sums(actual=actual.reshape(1, -1), expected=expected.reshape(1, -1)).whole
    signal = signal_sums(expected=expected.reshape(1, -1)).whole
    return math.sqrt(error / signal) if signal else (math.nan if error == 0 or error != error else math.inf)


def max_abs_error(*, actual: Tensor, expected: Tensor) -> float:
    """Return the greatest absolute difference; NaN if any element is NaN."""
    if not expected.numel():
        return math.nan
    return float((actual.to(torch.float64) - expected.to(torch.float64)).abs().max())


def cosine(*, actual: Tensor, expected: Tensor) -> float:
    """Return the cosine similarity. Shown because people ask for it; it is blind to scale."""
    a, e = actual.to(torch.float64).reshape(-1), expected.to(torch.float64).reshape(-1)
    norm = float(a.norm() * e.norm())
    return float(a @ e) / norm if norm else math.nan


def pcc(*, actual: Tensor, expected: Tensor) -> float:
    """Return Pearson's correlation. Shown because people ask for it; it is blind to scale and offset."""
    a, e = actual.to(torch.float64).reshape(-1), expected.to(torch.float64).reshape(-1)
    return cosine(actual=a - a.mean(), expected=e - e.mean())


def mismatches(*, actual: Tensor, expected: Tensor) -> int:
    """Count elements that are not equal in value (-0.0 equals 0.0; NaN equals nothing). Shapes must be equal."""
    if actual.shape != expected.shape:
        raise ValueError(f"expected equal shapes, found {tuple(actual.shape)} and {tuple(expected.shape)}")
    return int((actual != expected).sum())
