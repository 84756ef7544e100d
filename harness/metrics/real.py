"""Real-valued metrics. Knows tensors only, propagates NaN; must not know taps or limits.

Sums are accumulated in float64. Squares are made, and added up within a row or a column of a block, in float32 where
nothing can be lost that matters: the difference of two values, rounded to float32, is right to 6e-8 of itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 18
"""Elements worked on at a time: a megabyte of float32, which stays in a core's cache from one step to the next."""
_KEPT_ELEMENTS = 1 << 22
"""Largest matrix whose squares are kept until columns are added up; those of longer ones are made again."""
_NARROW_WIDTH = 1 << 14
"""Longest row that is added up in float32: at worst about 1e-6 of its sum is lost."""
_NARROW_RANGE = (1e-18, 1e30)
"""Sums of squares of a row whose terms, and those of its rounding errors, are ordinary float32 numbers."""
_EXPONENT = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}


class Errors:
    """Sums of the errors of several sides on one matrix, by row, group of columns and column.

    `error` [S, T] holds the squares of `actual - expected` by row, `product` [S, T, G] the errors times the signal by
    row and group, `signal` [T, G] the squares of the signal, `rounding` [T] the mean squares of rounding it once to
    `dtype` (zeros without one); all float64.
    Shapes: actual S x [T, E], expected [T, E]; `groups` of consecutive columns divide E.
    """

    def __init__(
        self, *, actual: Sequence[Tensor], expected: Tensor, dtype: torch.dtype | None = None, groups: int = 1
    ) -> None:
        self.actual, self.expected, self.dtype, self.groups = tuple(actual), expected, dtype, groups
        self._work = torch.float32 if _can_be_narrow(self.actual, expected) else torch.float64
        self._measure()
        if self._work is torch.float32 and not self._is_ordinary():
            self._work = torch.float64  # squares beyond float32, or really nothing or not finite: told apart wide
            self._measure()

    @property
    def narrow(self) -> bool:
        """Whether errors and signal are ordinary numbers in float32."""
        return self._work is torch.float32

    @property
    def power(self) -> Tensor:
        """Sums of squares of the signal by row, [T]."""
        return self.signal.sum(dim=1)

    def columns(self, weight: Tensor) -> Tensor:
        """Return the sums by column, rows weighted with `weight` [T]: the sides' errors, then rounding, [S + 1, E]."""
        scale = weight.max() if len(weight) else weight.sum()
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        shares = (weight / scale).to(self._work)
        total = torch.zeros(len(self.actual) + 1, self.expected.shape[1], dtype=torch.float64)
        for part in self._parts():
            squares = self._kept.get(part.start) or [*(e.square() for e in self._errors(part)), self._rounding(part)]
            for i, each in enumerate(squares):
                total[i] += shares[part] @ each
        return total * scale

    def _measure(self) -> None:
        count, rows, groups = len(self.actual), len(self.expected), self.groups
        self.error = torch.empty(count, rows, dtype=torch.float64)
        self.product = torch.empty(count, rows, groups, dtype=torch.float64)
        self.signal = torch.empty(rows, groups, dtype=torch.float64)
        self.rounding = torch.zeros(rows, dtype=torch.float64)
        self._kept: dict[int, list[Tensor]] = {}
        for part in self._parts():
            signal, squares = self.expected[part].to(self._work), []
            shape = (len(signal), groups, -1) if signal.numel() else (len(signal), groups, 0)
            for side, error in enumerate(self._errors(part)):
                squares.append(error.square())
                self.error[side, part] = squares[-1].sum(dim=1)
                self.product[side, part] = error.mul_(signal).view(shape).sum(dim=-1)
            self.signal[part] = signal.square().view(shape).sum(dim=-1)
            squares.append(self._rounding(part))
            self.rounding[part] = squares[-1].sum(dim=1)
            if self.expected.numel() <= _KEPT_ELEMENTS:
                self._kept[part.start] = squares

    def _parts(self) -> Iterator[slice]:
        rows, width = self.expected.shape
        step = max(1, _BLOCK_ELEMENTS // max(1, width))
        yield from (slice(start, start + step) for start in range(0, rows, step))

    def _errors(self, part: slice) -> Iterator[Tensor]:
        """Yield the error of each side, in memory of its own."""
        expected = self.expected[part]
        wide = self._work is torch.float64 or expected.dtype is torch.float64
        expected = expected.to(torch.float64 if wide else torch.float32)
        for actual in self.actual:
            same = actual.dtype is expected.dtype
            error = actual[part] - expected if same else actual[part].to(expected.dtype).sub_(expected)
            yield error.to(self._work)

    def _rounding(self, part: slice) -> Tensor:
        expected = self.expected[part]
        if self.dtype is None:
            return torch.zeros_like(expected, dtype=self._work)
        wide = self._work is torch.float64 or expected.dtype is torch.float64
        return _half_ulp_squares(expected.to(torch.float64 if wide else torch.float32), self.dtype, self._work)

    def _is_ordinary(self) -> bool:
        """Say whether nothing was too large or too small for the squares that were made of it."""
        power = self.power
        ordinary = ((power == 0) | ((power > _NARROW_RANGE[0]) & (power < _NARROW_RANGE[1]))).all()
        silent = float(power.sum()) == 0 and bool(self.expected.any())
        return bool(ordinary) and not silent and math.isfinite(float(self.error.sum()))


def _can_be_narrow(actual: Sequence[Tensor], expected: Tensor) -> bool:
    """Say whether squares of errors may be made in float32; a float64 port may differ by less than that resolves."""
    real = expected.is_floating_point() and not any(a.dtype is torch.float64 for a in actual)
    return real and 0 < expected.shape[1] <= _NARROW_WIDTH


def all_finite(values: Tensor) -> bool:
    """Say whether every value is finite: one sum says so nearly always, faster than looking at each."""
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


def has_signal(values: Tensor) -> bool:
    """Say whether any value is not zero."""
    return bool(values.sum() != 0) or bool(values.any())


def _half_ulp_squares(values: Tensor, dtype: torch.dtype, work: torch.dtype) -> Tensor:
    """Mean square error of rounding to nearest, in `work`: uniform within half an ulp, so half_ulp^2 / 3."""
    info, (integer, mask) = torch.finfo(dtype), _EXPONENT[values.dtype]
    power = values.view(integer).bitwise_and(mask).view(values.dtype)  # the power of two not above the magnitude
    if info.tiny > torch.finfo(values.dtype).tiny:
        power = torch.where(values == 0, 0.0, power.clamp(min=info.tiny))
    return power.to(work).square_().mul_(info.eps**2 / 12)


def rel_rms_error(*, actual: Tensor, expected: Tensor) -> float:
    """Return ||actual - expected|| / ||expected||. NaN where both are zero has no meaning: 0/0 is NaN."""
    sums = Errors(actual=[actual.reshape(1, -1)], expected=expected.reshape(1, -1))
    error, signal = float(sums.error.sum()), float(sums.signal.sum())
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
