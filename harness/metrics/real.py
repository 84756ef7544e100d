"""Real-valued metrics. Knows tensors only, propagates NaN; must not know taps or limits.

Sums are accumulated in float64. Squares of float32 and narrower values are made, and added up within a row, in float32
where nothing can be lost that matters: a difference of two such values is then right to 6e-8 of itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 22
"""Elements widened at a time, so that logits of a long prompt do not double the memory of a run."""
_NARROW_WIDTH = 1 << 14
"""Longest row that is added up in float32: at worst about 1e-6 of its sum is lost."""
_NARROW_RANGE = (1e-9, 1e15)
"""Norms of a row whose squares, and those of its rounding errors, are ordinary float32 numbers."""
_EXPONENT = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}


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


class Squares:
    """Squares of a matrix [T, E]: of a difference, of a value, or of its rounding error. Made once where it is small.

    `actual` None takes the values themselves; `dtype` takes the mean square of rounding them to it instead.
    """

    def __init__(
        self, *, expected: Tensor, actual: Tensor | None = None, dtype: torch.dtype | None = None,
        narrow: bool | None = None,
    ) -> None:  # fmt: skip
        self.expected, self.actual, self.dtype = expected, actual, dtype
        narrow = is_narrow(expected) if narrow is None else narrow
        self._wide = not narrow or (actual is not None and actual.dtype is torch.float64)
        self._kept: Tensor | None = None

    def token(self) -> Tensor:
        """Return the sums by row, [T] float64."""
        found = torch.cat([block.sum(dim=1).double() for _, block in self._blocks()])
        if not self._wide and not math.isfinite(float(found.sum())):
            self._wide, self._kept = True, None  # too large a square, or really not finite: told apart wide
            return self.token()
        return found

    def channel(self, weight: Tensor | None = None) -> Tensor:
        """Return the sums by column, [E] float64; `weight` [T] weighs the rows."""
        weight = torch.ones(len(self.expected), dtype=torch.float64) if weight is None else weight
        scale = weight.max() if len(weight) else weight.sum()
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        total = torch.zeros(self.expected.shape[1], dtype=torch.float64)
        for start, block in self._blocks():
            shares = (weight[start : start + len(block)] / scale).to(block.dtype)
            total += (shares @ block).double()
        return total * scale

    def _blocks(self) -> Iterator[tuple[int, Tensor]]:
        rows, width = self.expected.shape
        step = max(1, _BLOCK_ELEMENTS // max(1, width))
        if step < rows:
            yield from ((start, self._block(start, start + step)) for start in range(0, rows, step))
            return
        if self._kept is None:
            self._kept = self._block(0, rows)
        yield 0, self._kept

    def _block(self, start: int, stop: int) -> Tensor:
        work = torch.float64 if self._wide else torch.float32
        block = self.expected[start:stop].to(work)
        if self.actual is not None:
            block = self.actual[start:stop].to(work) - block
        return block.square() if self.dtype is None else _half_ulp_squares(block, self.dtype)


def is_narrow(values: Tensor) -> bool:
    """Say whether squares of a matrix [T, E], and of errors on it, can be made and added up by row in float32."""
    if values.dtype is torch.float64 or not values.is_floating_point() or not 0 < values.shape[1] <= _NARROW_WIDTH:
        return False
    size = torch.linalg.vector_norm(values.float(), dim=1)
    ordinary = bool(((size == 0) | ((size > _NARROW_RANGE[0]) & (size < _NARROW_RANGE[1]))).all())
    return ordinary and (bool(size.any()) or not bool(values.any()))


def widened(values: Tensor) -> Tensor:
    """Return 16-bit values as float32, once for all that follows; longer matrices than a block as they are."""
    short = values.dtype in (torch.bfloat16, torch.float16) and values.numel() <= _BLOCK_ELEMENTS
    return values.float() if short else values


def all_finite(values: Tensor) -> bool:
    """Say whether every value is finite: one sum says so nearly always, faster than looking at each."""
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


def has_signal(values: Tensor) -> bool:
    """Say whether any value is not zero."""
    return bool(values.sum() != 0) or bool(values.any())


def error_sums(*, actual: Tensor, expected: Tensor, weight: Tensor | None = None) -> SquaredSums:
    """Return the sums of squares of `actual - expected`. Shapes: both [T, E]; `weight` [T] weighs rows by column."""
    return _sums(Squares(actual=actual, expected=expected), weight)


def signal_sums(*, expected: Tensor) -> SquaredSums:
    """Return the sums of squares of `expected` [T, E]."""
    return _sums(Squares(expected=expected), None)


def rounding_sums(*, expected: Tensor, dtype: torch.dtype, weight: Tensor | None = None) -> SquaredSums:
    """Return the sums of squares of one rounding error of `expected` [T, E] in `dtype`; `weight` as in `error_sums`."""
    return _sums(Squares(expected=expected, dtype=dtype), weight)


def _sums(squares: Squares, weight: Tensor | None) -> SquaredSums:
    token = squares.token()  # first: it finds out how wide they must be
    return SquaredSums(token=token, channel=squares.channel(weight))


def _half_ulp_squares(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean square error of rounding to nearest: uniform within half an ulp, so half_ulp^2 / 3."""
    info, (integer, mask) = torch.finfo(dtype), _EXPONENT[values.dtype]
    power = values.view(integer).bitwise_and(mask).view(values.dtype)  # the power of two not above the magnitude
    if info.tiny > torch.finfo(values.dtype).tiny:
        power = torch.where(values == 0, 0.0, power.clamp(min=info.tiny))
    return power.square().mul_(info.eps**2 / 12)


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
