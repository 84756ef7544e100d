"""What a tensor looks like in a few numbers, computed where it lies. Knows tensors only; must not know taps or files.

For a first pass over everything: where to look closer. A verdict rests on the tensors themselves.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

SKETCH = 16
"""Elements of the sketch, evenly spaced over the tensor at an odd distance so that they lie in different channels."""
_COMPARABLE = frozenset({
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int16, torch.int32, torch.int64, torch.uint8,
})  # fmt: skip
_NARROW = frozenset({torch.bfloat16, torch.float16})
_SCRATCH_ELEMENTS = 1 << 20
_SCRATCH = threading.local()
"""Memory that 16-bit values on a CPU are widened in, again and again: fresh pages cost more than widening."""


class Statistics(NamedTuple):
    """Numbers of one tensor that still lie on its device.

    `numbers` holds sum, sum of squares, least, greatest and, where something may not be finite, how many are not; all
    of shape []. Nothing of an empty tensor. Shapes: sketch [about SKETCH].
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    numbers: tuple[Tensor, ...]
    sketch: Tensor


def statistics_of(tensor: Tensor) -> Statistics:
    """Compute the statistics of a tensor on its device, without waiting for an accelerator."""
    flat, wide = _flat(tensor.detach())
    numbers: tuple[Tensor, ...] = ()
    count = flat.numel()
    if count:
        squares = torch.dot(wide, wide)
        numbers = (wide.sum(), squares, *torch.aminmax(flat if flat.dtype in _COMPARABLE else wide))
        # whether a sum is finite can be asked on a CPU; elsewhere that would wait, and counting is cheap
        if flat.is_floating_point() and (not flat.is_cpu or not math.isfinite(squares.item())):
            numbers = (*numbers, (~torch.isfinite(wide)).sum())
    sketch = flat[:: (count // SKETCH) | 1].clone()
    return Statistics(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype, numbers, sketch)


def _flat(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements in a row, as they are told and as they are added up (the same, if those are wide enough)."""
    count = tensor.numel()
    if tensor.dtype in _NARROW and tensor.is_cpu and count <= _SCRATCH_ELEMENTS:
        held = getattr(_SCRATCH, "held", None)
        if held is None:
            with torch.inference_mode(False):  # or it could be written into under inference mode alone
                held = _SCRATCH.held = torch.empty(_SCRATCH_ELEMENTS, dtype=torch.float32, device="cpu")
        wide = held[:count]
        wide.view(tensor.shape).copy_(tensor)
        return wide, wide
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    if flat.dtype in (torch.float32, torch.float64):
        return flat, flat
    return flat, flat.to(torch.float32 if flat.is_floating_point() else torch.float64)


def as_facts(calls: Mapping[str, Sequence[Statistics]]) -> dict[str, list[Any]]:
    """Return the statistics by tap as columns of plain JSON values, one row for each call.

    Columns: tap, call (0, 1, ... of the tap), shape, stride, offset, dtype, n, mean, rms, min, max (None of no
    elements), nonfinite (elements), sketch (numbers with a space between: a column of lists would be most of a file).
    """
    rows = [(tap, number, each) for tap, found in calls.items() for number, each in enumerate(found)]
    numbers = _fetched([x for _, _, each in rows for x in each.numbers])
    sketches = _fetched([each.sketch for _, _, each in rows])
    columns: dict[str, list[Any]] = defaultdict(list)
    for tap, call, each in rows:
        count = math.prod(each.shape) * (2 if each.dtype.is_complex else 1)
        total, squares, least, greatest, *strays = [next(numbers)[0] for _ in each.numbers] or [None] * 4
        row = {
            "tap": tap, "call": call, "shape": tuple(each.shape), "stride": each.stride, "offset": each.offset,
            "dtype": str(each.dtype).removeprefix("torch."), "n": count,
            "mean": total / count if count else None, "rms": math.sqrt(squares / count) if count else None,
            "min": least, "max": greatest, "nonfinite": int(strays[0]) if strays else 0,
            "sketch": " ".join(map(repr, next(sketches))),
        }  # fmt: skip
        for name, value in row.items():
            columns[name].append(value)
    return dict(columns)


def _fetched(tensors: Sequence[Tensor]) -> Iterator[list[Any]]:
    """Return an iterator over the values of small tensors, each kind of them brought from its device at once."""
    places: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        places[tensor.dtype, tensor.device].append(i)
    values: list[list[Any]] = [[]] * len(tensors)
    for inside in places.values():
        whole = torch.cat([tensors[i].reshape(-1) for i in inside]).tolist()
        at = 0
        for i in inside:
            values[i] = whole[at : at + tensors[i].numel()]
            at += len(values[i])
    return iter(values)
