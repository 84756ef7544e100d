"""Values changed as a whole: rounded, scaled, signed, shifted, read as another type. Knows numbers; no codes, no names.

Each change takes the values that are due and returns what memory would hold; words go on after "memory holds".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

Change = tuple[str, Callable[[Tensor], Tensor]]
_POWERS = tuple(k for k in range(-12, 13) if k)


def roundings(dtype: torch.dtype) -> Iterator[Change]:
    """Yield the ways in which values lose digits on their way into memory of a dtype."""
    for via, name in (
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float16"),
        (torch.float8_e4m3fn, "e4m3 without a scale"),
        (torch.float8_e5m2, "e5m2 without a scale"),
    ):
        if via != dtype:
            yield f"the checkpoint's values rounded through a narrower format, {name}", partial(_through, via)
    yield "the checkpoint's values rounded through a narrower format, tf32", lambda e: _bits(e, 13, half=1 << 12)
    yield "the checkpoint's values cut off to bfloat16 (truncated, not rounded)", lambda e: _bits(e, 16)
    yield "the checkpoint's values cut off to 10 digits (truncated, not rounded)", lambda e: _bits(e, 13)
    yield "the checkpoint's values with the smallest taken as 0 (subnormal numbers flushed)", _flushed
    if dtype == torch.bfloat16:
        yield "the checkpoint's values rounded half away from zero", lambda e: _bits(e, 16, half=1 << 15)


def _through(dtype: torch.dtype, value: Tensor) -> Tensor:
    return value.to(dtype).to(torch.float32)


def _bits(value: Tensor, drop: int, *, half: int = 0) -> Tensor:
    """Drop the last digits of float32 numbers, after adding half of the last one kept."""
    words = value.float().contiguous().view(torch.int32)
    return ((words + half) & -(1 << drop)).view(torch.float32)


def _flushed(value: Tensor) -> Tensor:
    return torch.where(value.abs() < torch.finfo(torch.float16).tiny, torch.zeros_like(value), value)


def functions() -> Iterator[Change]:
    """Yield changes of value that are no rounding: signs, offsets, and functions that a loader may apply or forget."""
    yield "the checkpoint's values with their sign turned", torch.neg
    yield "the checkpoint's values with their sign ignored", torch.abs
    yield (
        "1 more than the checkpoint's values: a norm that adds 1 applied to weights that have it, or twice",
        lambda e: e + 1,
    )
    yield "1 less than the checkpoint's values: the 1 that a norm adds was taken off", lambda e: e - 1
    yield "minus the exponential of the checkpoint's values (A from A_log)", lambda e: -torch.exp(e.float())
    yield "the exponential of the checkpoint's values", lambda e: torch.exp(e.float())
    yield "the reciprocal of the checkpoint's values", lambda e: 1 / e
    yield "the square of the checkpoint's values", lambda e: e * e


def factors(shape: tuple[int, int]) -> Iterator[tuple[float, str]]:
    """Yield factors with their names: powers of two, and those that layers use."""
    for k in _POWERS:
        yield 2.0**k, f"{2.0**k:.4g}"
    for size in dict.fromkeys(shape):
        for factor, name in (
            (math.sqrt(size), f"the square root of {size}"),
            (1 / math.sqrt(size), f"1 over the square root of {size}"),
            (float(size), f"{size}"),
            (1 / max(1, size), f"1/{size}"),
        ):
            yield factor, f"{factor:.4g} ({name})"


def reinterpreted(expected: Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored numbers of 16 bits and more read as another type or in another byte order."""
    if not expected.is_floating_point() or expected.element_size() < 2:
        return
    content = expected.contiguous()
    size = content.element_size()
    swapped = content.view(torch.uint8).reshape(*content.shape, size).flip(-1).contiguous().view(content.dtype)
    yield "the checkpoint's values with their bytes swapped (another byte order)", swapped.squeeze(-1)
    if size == 2:
        other = torch.float16 if content.dtype == torch.bfloat16 else torch.bfloat16
        name = str(other).removeprefix("torch.")
        yield f"the checkpoint's bits read as {name}", content.view(other).to(torch.float32)
