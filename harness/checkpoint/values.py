"""Compare one held tensor with its decoded checkpoint value. Knows tensors; must not know names, files or models."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.checkpoint.rows import Hashes, row_hashes

NARROW = (torch.float32, torch.bfloat16, torch.float16)
_INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_PROBE = 256
_STRIP = 1 << 20
"""Elements that are compared at a time: what that takes beside the two tensors stays small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How a held tensor differs from the expected one. `how`: same, reshape, permute(...), padded or shape.

    `max_ulp` and `worst` (index in the held tensor) describe the element that is furthest off, in units of the last
    place of the held dtype; `first` is the index in the held tensor of the first wrong one in the file's order, and
    `first_flat` its number among the expected ones. `relative_error` is ||held - expected|| / ||expected||.
    """

    how: str
    mismatches: int
    max_ulp: float = 0.0
    worst: tuple[int, ...] = ()
    first: tuple[int, ...] = ()
    first_flat: int = 0
    expected: float = 0.0
    found: float = 0.0
    relative_error: float = 0.0
    padding_rows: int = 0


def difference(*, actual: Tensor, expected: Tensor, slack_roundings: int = 0) -> Difference:
    """Compare a held tensor with the decoded one, rounded to the held dtype. NaN never equals.

    A tensor whose shape or axis order differs is taken in the order of axes in which it is equal, else in the one that
    its shape asks for. `slack_roundings`: how many float32 roundings the order of multiplications leaves free (two for
    a format with two scales).
    """
    if actual.numel() != expected.numel():
        return _padded(actual, expected)
    same_shape = actual.shape == expected.shape
    plain = "same" if same_shape else "reshape"
    first = _elementwise(actual, expected, slack_roundings, how=plain)
    if first.mismatches * 2 <= actual.numel():
        return first
    fitting = []
    for axes in itertools.permutations(range(expected.dim())) if 2 <= expected.dim() <= 4 else ():
        if axes == tuple(range(expected.dim())):
            continue
        turned, how = expected.permute(axes), f"permute{axes}"
        if turned.shape != actual.shape and same_shape:
            continue
        if turned.shape == actual.shape:
            fitting.append(how)
        if _probe_equal(actual, turned, slack_roundings):
            found = _elementwise(actual, expected, slack_roundings, how=how)
            if found.mismatches * 2 <= actual.numel():
                return found
    if not same_shape and len(fitting) == 1:
        return _elementwise(actual, expected, slack_roundings, how=fitting[0])
    return first


def in_source_shape(actual: Tensor, shape: Sequence[int], how: str) -> Tensor:
    """Return a held tensor in the shape and order of axes of its source, as `difference` found it to lie."""
    axes = _axes(how)
    if not axes:
        return actual.reshape(tuple(shape))
    turned = actual.reshape([shape[a] for a in axes])
    return turned.permute([axes.index(i) for i in range(len(axes))])


def _axes(how: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", how)) if how.startswith("permute") else ()


def _held_index(flat: int, actual: Tensor, expected: Tensor, how: str) -> tuple[int, ...]:
    """Return where the element that is number `flat` of the expected ones stands in the held tensor."""
    axes = _axes(how)
    if axes:
        at = torch.unravel_index(torch.tensor(flat), expected.shape)
        strides, flat = 1, 0
        for axis in reversed(axes):
            flat += int(at[axis]) * strides
            strides *= expected.shape[axis]
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), actual.shape)) if actual.dim() else ()


def _probe_equal(actual: Tensor, expected: Tensor, slack: int) -> bool:
    """Compare some elements spread over the whole before all of it is permuted: more than half are equal."""
    at = torch.linspace(0, actual.numel() - 1, min(_PROBE, actual.numel())).long()
    places = torch.unravel_index(at, expected.shape)
    held = actual[torch.unravel_index(at, actual.shape)] if actual.dim() else actual.reshape(1)
    return _elementwise(held, expected[places], slack, how="same").mismatches * 2 < len(at)


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
    """Compare in the source's shape, a strip at a time; indices are those of the held tensor."""
    value = actual if how == "padded" else in_source_shape(actual, expected.shape, how)
    if value.is_floating_point() and value.element_size() > 1 and torch.equal(value, expected.to(value.dtype)):
        return Difference(how=how, mismatches=0)  # NaN is unequal here
    flat, due = value.reshape(-1), expected.reshape(-1)
    count, first, worst, most = 0, -1, -1, -1.0
    off = size = 0.0
    floats = value.is_floating_point() and expected.is_floating_point()
    for start in range(0, len(flat), _STRIP):
        held, wanted = flat[start : start + _STRIP], due[start : start + _STRIP]
        wrong, rounded = _wrong(held, wanted, slack)
        if floats:
            off += float((held.to(torch.float64) - wanted.to(torch.float64)).square().sum())
            size += float(wanted.to(torch.float64).square().sum())
        if not bool(wrong.any()):
            continue
        count += int(wrong.sum())
        first = start + int(wrong.int().argmax()) if first < 0 else first
        apart = torch.where(wrong, _apart(held, rounded), -1.0) if floats else wrong.to(torch.float64)
        at = int(apart.argmax())
        if float(apart[at]) > most:
            worst, most = start + at, float(apart[at])
    if not count:
        return Difference(how=how, mismatches=0)
    there = _held_index(first, actual, expected, how)
    if not floats:
        return Difference(how=how, mismatches=count, worst=there, first=there, first_flat=first)
    return Difference(
        how=how,
        mismatches=count,
        max_ulp=most,
        worst=_held_index(worst, actual, expected, how),
        first=there,
        first_flat=first,
        expected=float(due[worst].to(value.dtype)),
        found=float(flat[worst]),
        relative_error=(off / size) ** 0.5 if size else float("inf"),
    )


def _apart(held: Tensor, rounded: Tensor) -> Tensor:
    """Return how far values are from the right ones, in units of the last place; in values for 8-bit floats."""
    if held.element_size() == 1:
        apart = (held.to(torch.float32) - rounded).abs().to(torch.float64)
    else:
        apart = _ulps(held, rounded)
    return apart.nan_to_num(nan=float("inf"), posinf=float("inf"))


def _wrong(value: Tensor, expected: Tensor, slack: int) -> tuple[Tensor, Tensor]:
    """Return which elements differ, and the expected ones rounded as memory holds them."""
    if not value.is_floating_point() or not expected.is_floating_point():
        narrow = not expected.is_floating_point()
        return value != expected.to(value.dtype) if narrow else value.to(expected.dtype) != expected, expected
    small = value.element_size() == 1  # these have no comparison of their own
    held = value.to(torch.float32) if small else value
    rounded = expected.to(value.dtype).to(held.dtype)
    wrong = held != rounded  # NaN is unequal here too
    if slack and bool(wrong.any()):
        margin = expected.abs() * (slack * torch.finfo(torch.float32).eps)
        low, high = (expected - margin).to(held.dtype), (expected + margin).to(held.dtype)
        wrong &= ~((held >= low) & (held <= high))
    return wrong, rounded


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


def rounded_digests(value: Tensor, rows: Hashes | None = None) -> dict[str, str]:
    """Digest the value rounded to each dtype that is no wider: sides of different precision can then be compared.

    A constant tensor has none: equal constants say nothing. `rows`: the hashes of its rows as it is, if known.
    """
    if not value.is_floating_point() or value.element_size() == 1 or value.numel() < 2:
        return {}
    if bool((value == value.reshape(-1)[0]).all()):
        return {}
    result = {}
    for dtype in NARROW:
        own = dtype == value.dtype
        if own or (dtype.itemsize <= value.element_size() and value.dtype not in (torch.bfloat16, torch.float16)):
            hashes = rows if own and rows is not None else row_hashes(value.to(dtype))
            digest = hashlib.blake2b(hashes.tobytes(), digest_size=16)
            result[str(dtype).removeprefix("torch.")] = digest.hexdigest()
    return result
