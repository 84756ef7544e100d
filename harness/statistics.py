"""What a tensor looks like in a few numbers, computed where it lies. Knows tensors only; must not know taps or files.

For a first pass over everything: where to look closer. A verdict rests on the tensors themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SKETCH = 16
"""Elements of the sketch, evenly spaced over the tensor at an odd distance so that they lie in different channels."""
_COMPARABLE = frozenset({
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int16, torch.int32, torch.int64, torch.uint8,
})  # fmt: skip
_AS_STORED = frozenset({torch.float32, torch.float64})


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Numbers of one tensor that still lie on its device. `numbers` holds sum, sum of squares, least, greatest.

    Shapes: numbers four of []; nonfinite [] or None where nothing is; sketch [at most SKETCH].
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    numbers: tuple[Tensor, ...]
    nonfinite: Tensor | None
    sketch: Tensor


def statistics_of(tensor: Tensor) -> Statistics:
    """Compute the statistics of a tensor on its device, without waiting for an accelerator."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
    wide = flat if flat.dtype in _AS_STORED else flat.to(torch.float32 if flat.is_floating_point() else torch.float64)
    numbers: tuple[Tensor, ...] = ()
    nonfinite = None
    if flat.numel():
        numbers = (wide.sum(), torch.dot(wide, wide), *torch.aminmax(flat if flat.dtype in _COMPARABLE else wide))
        # asking whether a sum is finite waits for an accelerator, where counting is cheap; it is not on a CPU
        if flat.is_floating_point() and (flat.device.type != "cpu" or not math.isfinite(float(numbers[1]))):
            nonfinite = (~torch.isfinite(wide)).sum()
    return Statistics(
        shape=tuple(tensor.shape), stride=tensor.stride(), offset=int(tensor.storage_offset()), dtype=tensor.dtype,
        numbers=numbers, nonfinite=nonfinite, sketch=flat[:: max(1, flat.numel() // SKETCH) | 1][:SKETCH].clone(),
    )  # fmt: skip


def as_facts(calls: Sequence[Statistics]) -> list[dict[str, Any]]:
    """Return the statistics of one tap, one entry per call, as plain JSON values.

    Keys: shape, stride, offset, dtype, n, mean, rms, min, max, nonfinite, sketch; the numbers are None of no elements.
    """
    return [_facts(call) for call in calls]


def _facts(found: Statistics) -> dict[str, Any]:
    count = math.prod(found.shape) * (2 if found.dtype.is_complex else 1)
    total, squares, least, greatest = (float(x) for x in found.numbers) if found.numbers else (math.nan,) * 4
    return {
        "shape": found.shape,
        "stride": found.stride,
        "offset": found.offset,
        "dtype": str(found.dtype).removeprefix("torch."),
        "n": count,
        "mean": total / count if count else None,
        "rms": math.sqrt(squares / count) if count else None,
        "min": least if count else None,
        "max": greatest if count else None,
        "nonfinite": int(found.nonfinite) if found.nonfinite is not None else 0,
        "sketch": found.sketch.tolist(),
    }
