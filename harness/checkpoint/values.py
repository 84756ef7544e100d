"""Compare one held tensor with its decoded checkpoint value. Knows tensors; must not know names, files or models."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

NARROW = (torch.float32, torch.bfloat16, torch.float16)
_INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_PROBE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How a held tensor differs from the expected one. `how`: same, reshape, permute(...), padded or shape.

    `max_ulp` and `worst` (index in the held tensor) describe the element that is furthest off, in units of the last
    place of the held dtype; `relative_error` is ||held - expected|| / ||expected||.
    """

    how: str
    mismatches: int
    max_ulp: float = 0.0
    worst: tuple[int, ...] = ()
    expected: float = 0.0
    found: float = 0.0
    relative_error: float = 0.0
    padding_rows: int = 0


def difference(*, actual: Tensor, expected: Tensor, slack_roundings: int = 0) -> Difference:
    """Compare a held tensor with the decoded one, rounded to the held dtype. NaN never equals.

    A tensor whose shape or axis order differs is accepted as such only where it is exactly equal after reshaping or
    after one permutation of the axes. `slack_roundings`: how many float32 roundings the order of multiplications leaves
    free (two for a format with two scales).
    """
    if actual.numel() != expected.numel():
        return _padded(actual, expected)
    same_shape = actual.shape == expected.shape
    first = _elementwise(
        actual, expected.reshape(actual.shape), slack_roundings, how="same" if same_shape else "reshape"
    )
    if first.mismatches * 2 <= actual.numel():
        return first
    for axes in itertools.permutations(range(expected.dim())) if 2 <= expected.dim() <= 4 else ():
        if axes == tuple(range(expected.dim())):
            continue
        turned = expected.permute(axes)
        plausible = turned.shape == actual.shape or not same_shape
        if plausible and _probe_equal(actual, turned, slack_roundings):
            found = _elementwise(actual, turned.reshape(actual.shape), slack_roundings, how=f"permute{axes}")
            if found.mismatches == 0:
                return found
    return first


def _probe_equal(actual: Tensor, expected: Tensor, slack: int) -> bool:
    """Compare a few leading elements before the whole is permuted."""
    probe = expected.reshape(-1)[:_PROBE] if expected.is_contiguous() else expected.flatten()[:_PROBE]
    return _elementwise(actual.flatten()[:_PROBE], probe, slack, how="same").mismatches == 0


def _padded(actual: Tensor, expected: Tensor) -> Difference:
    """Accept rows added after the last one (a padded vocabulary); anything else has another shape."""
    rows = expected.shape[0] if expected.dim() else 0
    fits = actual.dim() == expected.dim() and actual.dim() >= 1 and actual.shape[1:] == expected.shape[1:]
    if fits and 0 < rows < actual.shape[0]:
        found = _elementwise(actual[:rows], expected, 0, how="padded")
        if found.mismatches == 0:
            return Difference(how="padded", mismatches=0, padding_rows=actual.shape[0] - rows)
    return Difference(how="shape", mismatches=actual.numel())


def _elementwise(actual: Tensor, expected: Tensor, slack: int, *, how: str) -> Difference:
    if not actual.is_floating_point() or not expected.is_floating_point():
        wrong = (
            actual != expected.to(actual.dtype)
            if not expected.is_floating_point()
            else actual.to(expected.dtype) != expected
        )
        return Difference(how=how, mismatches=int(wrong.sum()))
    small = actual.element_size() == 1  # these have no comparison of their own
    held = actual.to(torch.float32) if small else actual
    rounded = expected.to(actual.dtype).to(held.dtype)
    if torch.equal(held, rounded):  # NaN is unequal here too
        return Difference(how=how, mismatches=0)
    wrong = held != rounded
    count = int(wrong.sum())
    if count and slack:
        margin = expected.abs() * (slack * torch.finfo(torch.float32).eps)
        low, high = (expected - margin).to(held.dtype), (expected + margin).to(held.dtype)
        wrong &= ~((held >= low) & (held <= high))
        count = int(wrong.sum())
    if not count:
        return Difference(how=how, mismatches=0)
    apart = _ulps(held, rounded) if not small else (held - rounded).abs().to(torch.float64)
    apart = torch.where(wrong, apart.nan_to_num(nan=float("inf"), posinf=float("inf")), torch.full_like(apart, -1.0))
    at = int(apart.argmax())
    wide = (held.to(torch.float64) - expected.to(torch.float64)).norm() / expected.to(torch.float64).norm()
    return Difference(
        how=how,
        mismatches=count,
        max_ulp=float(apart.flatten()[at]),
        worst=tuple(int(i) for i in torch.unravel_index(torch.tensor(at), held.shape)),
        expected=float(rounded.flatten()[at]),
        found=float(held.flatten()[at]),
        relative_error=float(wide),
    )


def _ulps(a: Tensor, b: Tensor) -> Tensor:
    """Distance in representable values, float64; NaN is infinitely far from everything."""

    def ordered(value: Tensor) -> Tensor:
        bits = value.contiguous().view(_INTS[value.element_size()]).to(torch.int64)
        lowest = -(1 << (8 * value.element_size() - 1))
        return torch.where(bits < 0, lowest - bits, bits)

    apart = (ordered(a).to(torch.float64) - ordered(b).to(torch.float64)).abs()
    return torch.where(a.isnan() | b.isnan(), torch.full_like(apart, float("inf")), apart)


def nonfinite(value: Tensor) -> int:
    """Count elements that are NaN or infinite."""
    if not value.is_floating_point():
        return 0
    wide = value.to(torch.float32) if value.element_size() == 1 else value
    low, high = torch.aminmax(wide) if wide.numel() else (torch.zeros(()), torch.zeros(()))
    if bool(low.isfinite() & high.isfinite()):  # NaN propagates through both
        return 0
    return int((~wide.isfinite()).sum())


def rounded_digests(value: Tensor) -> dict[str, str]:
    """Digest the value rounded to each dtype that is no wider: sides of different precision can then be compared.

    A constant tensor has none: equal constants say nothing.
    """
    if not value.is_floating_point() or value.element_size() == 1 or value.numel() < 2:
        return {}
    if bool((value == value.flatten()[0]).all()):
        return {}
    result = {}
    for dtype in NARROW:
        if dtype == value.dtype or (
            dtype.itemsize <= value.element_size() and value.dtype not in (torch.bfloat16, torch.float16)
        ):
            rounded = (value.to(dtype) + 0.0).contiguous()
            content = rounded.flatten().view(torch.uint8).numpy().tobytes()
            result[str(dtype).removeprefix("torch.")] = hashlib.blake2b(content, digest_size=16).hexdigest()
    return result
