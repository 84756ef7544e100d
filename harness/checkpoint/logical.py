"""What a weight is, seen from its stored parts, and what recognising one looks at. Knows records; no layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.declared import Declared
from harness.checkpoint.header import TensorRef

FP8 = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
BYTES = frozenset({"U8", "I8", "F4"})
E8M0 = frozenset({"U8", "F8_E8M0"})
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})

SCALE_SUFFIXES = ("_scale_inv", "_scale", "_qscale")
GLOBAL_SUFFIXES = ("_global_scale", "_scale_2")
_ROWS = (64, 128, 256, 512)
"""Sizes of blocks that are looked for where a grid does not fit the configured one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logical:
    """One weight as a model sees it. `parts` maps a role (weight, scale, global, shape, zero, group) to stored names.

    `extra` holds stored tensors that belong to it and do not change its values (activation scales). `problem` is why it
    cannot be decoded, empty if it can. `format`: plain, fp8_block, fp8_channel, mxfp8, mxfp4, mxfp4_blocks,
    nvfp4_multiplier, nvfp4_divisor, int4_packed, gptq_v1, gptq_v2, awq, unknown.
    """

    name: str
    format: str
    parts: Mapping[str, str]
    shape: tuple[int, ...]
    dtype: str
    extra: tuple[str, ...] = ()
    problem: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def quantised(self) -> bool:
        """True if values come from codes and scales."""
        return self.format != "plain"

    @property
    def numel(self) -> int:
        """Elements after decoding."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Folder:
    """What recognition looks at: the tensors, what the configuration says, and the checkpoint for its few contents.

    `beside` are the names of activation scales that occur anywhere in it; `has_global` says whether any global scale
    does: half a million look-ups of what is nowhere are saved.
    """

    tensors: Mapping[str, TensorRef]
    says: Declared
    checkpoint: Checkpoint
    beside: tuple[str, ...]
    has_global: bool


Recogniser = Callable[[Folder, str, TensorRef], Logical]


def scales_of(name: str, tensors: Mapping[str, TensorRef]) -> list[str]:
    """Return the stored scales that belong to a weight `X.weight` or a bare `X`, in the order they are preferred."""
    candidates = [name + suffix for suffix in SCALE_SUFFIXES]
    if name.endswith(".weight"):
        base = name[: -len("weight")]
        candidates += [base + "scale", base + "qscale_weight", base + "scales"]
    return [c for c in candidates if c in tensors]


def extras_of(base: str, folder: Folder) -> tuple[str, ...]:
    """Return activation scales beside a weight: they change no weight."""
    return tuple(base + n for n in folder.beside if base + n in folder.tensors)


def base_of(name: str) -> str:
    """Return the module of a stored name, with its dot; empty for a name without one."""
    return name.rsplit(".", 1)[0] + "." if "." in name else ""


def fitting(size: int, count: int) -> list[int]:
    """Return the usual block sizes of which `count` cover `size`, the last perhaps in part."""
    return [b for b in (16, 32, *_ROWS) if -(-size // b) == count]


def unpacked(ref: TensorRef, per_item: int = 2) -> tuple[int, ...]:
    """Return the shape after unpacking; the container counts F4 elements already."""
    if ref.dtype == "F4" or not ref.shape:
        return ref.shape
    return (*ref.shape[:-1], ref.shape[-1] * per_item)
