"""Real-valued metrics. Knows tensors only, propagates NaN; must not know taps or limits.

Sums are accumulated in float64. Squares are made, and added up within a row or a column of a block, in float32 where
nothing can be lost that matters: the difference of two values, rounded to float32, is right to 6e-8 of itself.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 16
"""Elements worked on at a time: those of all sides stay in a core's cache from one step to the next."""
_KEPT_ELEMENTS = 1 << 22
"""Squares that are kept until columns are added up, of all sides; those of longer matrices are made again."""
_NARROW_WIDTH = 1 << 14
"""Longest row that is added up in float32: at worst about 1e-6 of its sum is lost."""
_NARROW_RANGE = (1e-18, 1e30)
"""Sums of squares of a row whose terms, and those of its rounding errors, are ordinary float32 numbers."""
_EXPONENT = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}
_SCRATCH = threading.local()
"""Memory that is written over from one matrix to the next: fresh pages cost more than the sums in them."""

Weigh = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(error [S, T], power [T], rounding [T]) -> the weight [T] of rows in sums over a column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Sums of the errors of S sides on one matrix [T, E], by row, by group of columns and by column; all float64.

    `error` [S, T] holds the squares of `actual - expected` by row, `product` [S, T, G] the errors times the signal by
    row and group, `signal` [T, G] the squares of the signal, `rounding` [T] the mean squares of rounding it once.
    `column` [S + 1, E] holds the squares by column, rows weighted: each side's, and last those of rounding.
    `narrow` says whether errors and signal are ordinary numbers in float32.
    """

    error: Tensor
    product: Tensor
    signal: Tensor
    rounding: Tensor
    column: Tensor
    narrow: bool


def errors_of(
    *,
    actual: Sequence[Tensor],
    expected: Tensor,
    dtype: torch.dtype | None = None,
    groups: int = 1,
    weigh: Weigh | None = None,
) -> Errors:
    """Return the sums of the errors of several sides, each element read once.

    Shapes: actual S x [T, E], expected [T, E]. Rounding is to `dtype` (nothing without one), `groups` of consecutive
    columns divide E, `weigh` gives the weights of rows (one without it).
    """
    wide = any(a.dtype is torch.float64 for a in actual)  # a float64 port may differ by less than float32 resolves
    if expected.is_floating_point() and not wide and 0 < expected.shape[1] <= _NARROW_WIDTH:
        found = _summed(actual, expected, dtype, groups, weigh, torch.float32)
        if _is_ordinary(found, expected):
            return found  # else squares beyond float32, or really nothing or not finite: told apart wide
    return _summed(actual, expected, dtype, groups, weigh, torch.float64)


def _summed(
    actual: Sequence[Tensor], expected: Tensor, dtype: torch.dtype | None, groups: int, weigh: Weigh | None,
    work: torch.dtype,
) -> Errors:  # fmt: skip
    sides, (rows, width) = len(actual), expected.shape
    step = min(rows, max(1, _BLOCK_ELEMENTS // max(1, width)))
    kept = (sides + 1) * expected.numel() <= _KEPT_ELEMENTS
    squares = _scratch("squares", (sides + 1, rows if kept else step, width), work)
    products = _scratch("products", (sides + 1, step, width), work)
    token = torch.zeros(sides + 1, rows, dtype=torch.float64)
    grouped = torch.zeros(sides + 1, rows, groups, dtype=torch.float64)
    parts = [slice(start, min(start + step, rows)) for start in range(0, rows, step)] if width else []
    for part in parts:
        block = squares[:, part] if kept else squares[:, : part.stop - part.start]
        product = products[:, : part.stop - part.start]
        signal = _fill(block, actual, expected, part, dtype)
        torch.mul(block[:sides], signal, out=product[:sides])
        torch.mul(signal, signal, out=product[sides])
        grouped[:, part] = product.view(*product.shape[:2], groups, -1).sum(dim=-1)
        token[:, part] = block.square_().sum(dim=-1)
    ulp = torch.finfo(dtype).eps ** 2 / 12 if dtype is not None else 0.0
    error, rounding, signal = token[:sides], token[sides] * ulp, grouped[sides]
    weight = weigh(error, signal.sum(dim=1), rounding) if weigh else torch.ones(rows, dtype=torch.float64)
    scale = weight.max() if rows else weight.sum()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    shares = (weight / scale).to(work)
    column = torch.zeros(sides + 1, width, dtype=torch.float64)
    for part in [slice(0, rows)] if kept else parts:
        block = squares if kept else squares[:, : part.stop - part.start]
        if not kept:
            _fill(block, actual, expected, part, dtype)
            block.square_()
        for side in range(sides + 1):
            column[side] += shares[part] @ block[side]
    column *= scale
    column[sides] *= ulp
    return Errors(
        error=error, product=grouped[:sides], signal=signal, rounding=rounding, column=column,
        narrow=work is torch.float32,
    )  # fmt: skip


def _scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory of this thread that the next call for the same name writes over."""
    held, size = getattr(_SCRATCH, f"{name}{dtype}", None), math.prod(shape)
    if held is None or held.numel() < size:
        with torch.inference_mode(False):  # or it could be written into under inference mode alone
            held = torch.empty(size, dtype=dtype)
        setattr(_SCRATCH, f"{name}{dtype}", held)
    found: Tensor = held[:size].view(shape)
    return found


def _fill(block: Tensor, actual: Sequence[Tensor], expected: Tensor, part: slice, dtype: torch.dtype | None) -> Tensor:
    """Write the errors of some rows into `block` [S + 1, T', E], powers of two last; return the signal there."""
    signal = expected[part]
    if signal.dtype is torch.float64 and block.dtype is not torch.float64:  # both sides wide until they are subtracted
        for side, values in enumerate(actual):
            block[side].copy_(values[part].to(torch.float64) - signal)
    else:
        signal = signal.to(block.dtype)
        for side, values in enumerate(actual):
            block[side].copy_(values[part])
        block[: len(actual)].sub_(signal)
    if dtype is None:
        block[-1].zero_()
    else:
        _powers_of_two(signal, dtype, out=block[-1])
    return signal.to(block.dtype)


def _powers_of_two(values: Tensor, dtype: torch.dtype, *, out: Tensor) -> None:
    """Write the power of two not above each magnitude that `dtype` can tell apart: rounding to it is uniform within
    half an ulp, which is eps / 2 times that, and has the mean square half_ulp^2 / 3.
    """
    integer, mask = _EXPONENT[values.dtype]
    if values.dtype is out.dtype:
        torch.bitwise_and(values.view(integer), mask, out=out.view(integer))
    else:
        out.copy_(values.view(integer).bitwise_and(mask).view(values.dtype))
    tiny = torch.finfo(dtype).tiny
    if tiny > torch.finfo(values.dtype).tiny:
        out.clamp_(min=tiny).masked_fill_(values == 0, 0.0)


def _is_ordinary(found: Errors, expected: Tensor) -> bool:
    """Say whether nothing was too large or too small for the float32 squares that were made of it."""
    power = found.signal.sum(dim=1)
    least, greatest = (float(x) for x in torch.aminmax(torch.where(power == 0, 1.0, power))) if len(power) else (1, 1)
    silent = float(power.sum()) == 0 and bool(expected.any())
    inside = _NARROW_RANGE[0] < least and greatest < _NARROW_RANGE[1]
    return inside and not silent and math.isfinite(float(found.error.sum()))


def all_finite(values: Tensor) -> bool:
    """Say whether every value is finite: one sum says so nearly always, faster than looking at each."""
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


def has_signal(values: Tensor) -> bool:
    """Say whether any value is not zero."""
    return bool(values.sum() != 0) or bool(values.any())


def rel_rms_error(*, actual: Tensor, expected: Tensor) -> float:
    """Return ||actual - expected|| / ||expected||. NaN where both are zero has no meaning: 0/0 is NaN."""
    sums = errors_of(actual=[actual.reshape(1, -1)], expected=expected.reshape(1, -1))
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
