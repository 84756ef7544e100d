"""Plan the memory of a load. Knows sizes from headers; must not know what a port really does.

planned = what stays (every weight in the wanted precision) + the stored bytes once (a mapped file counts while it is
mapped) + the largest weight while it is decoded (float32 values and the rounded copy) + what a process takes besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.formats import FLOATS, Logical, logical_tensors

RUNTIME_BYTES = 1 << 28
"""Allowance for libraries imported late, arenas and thread stacks: 110 to 140 MB were measured for transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes that a load in one precision is expected to need."""

    stored_bytes: int
    resident_bytes: int
    transient_bytes: int
    runtime_bytes: int = RUNTIME_BYTES

    @property
    def peak_bytes(self) -> int:
        """Everything at once."""
        return self.stored_bytes + self.resident_bytes + self.transient_bytes + self.runtime_bytes


def memory_plan(checkpoint: Checkpoint, dtype: torch.dtype | str) -> MemoryPlan:
    """Plan a load of every weight in `dtype` (a torch dtype or its name); integers keep their own width.

    A weight that is stored in float32 is planned in float32 where that is wider: ports keep such exceptions.
    """
    width = _width(dtype)
    resident = transient = 0
    for logical in logical_tensors(checkpoint):
        held = _held_bytes(checkpoint, logical, width)
        resident += held
        decoded = 4 * logical.numel if logical.quantised else 0
        transient = max(transient, decoded + held)
    return MemoryPlan(stored_bytes=checkpoint.nbytes, resident_bytes=resident, transient_bytes=transient)


def window_plan(checkpoint: Checkpoint, dtype: torch.dtype | str, units: Sequence[Sequence[str]]) -> MemoryPlan:
    """Plan a model that streams: of units of weights (names) that run in turn, one computes and the next is made.

    While a unit is put together, all of its weights may be there twice: alone and merged.
    """
    width, logicals = _width(dtype), {logical.name: logical for logical in logical_tensors(checkpoint)}
    held = [sum(_held_bytes(checkpoint, logicals[name], width) for name in unit) for unit in units]
    stored = [
        sum(checkpoint.tensors[part].nbytes for name in unit for part in logicals[name].parts.values())
        for unit in units
    ]
    decoded = [max((4 * logicals[n].numel for n in unit if logicals[n].quantised), default=0) for unit in units]
    return MemoryPlan(
        stored_bytes=_widest_pair(stored),
        resident_bytes=_widest_pair(held),
        transient_bytes=max(held, default=0) + max(decoded, default=0),
    )


def _widest_pair(sizes: Sequence[int]) -> int:
    return max((a + b for a, b in pairwise([*sizes, *sizes[:1]])), default=0)


def _width(dtype: torch.dtype | str) -> int:
    return (getattr(torch, dtype) if isinstance(dtype, str) else dtype).itemsize


def _held_bytes(checkpoint: Checkpoint, logical: Logical, width: int) -> int:
    if logical.quantised:
        return logical.numel * width
    nbytes = checkpoint.tensors[logical.parts["weight"]].nbytes
    if logical.dtype == "F32":
        return max(nbytes, logical.numel * width)
    return logical.numel * width if logical.dtype in FLOATS else nbytes


def planned_bytes(checkpoint: Checkpoint, dtype: torch.dtype | str) -> int:
    """Return the peak resident set, in bytes, that a load in `dtype` may need."""
    return memory_plan(checkpoint, dtype).peak_bytes
