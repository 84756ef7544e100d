"""Tensors of two sides brought to one shape. Knows the named axes of taps; must not know metrics or limits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.types import Tap


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A tap as a matrix: values [T, E], channels head-major; `heads` 0 without a head axis.

    `tokens` False says that the rows are no places in a sequence (a table, a state), so only the whole is meaningful.
    """

    values: Tensor
    heads: int
    tokens: bool


def axes_of(tap: Tap, tensor: Tensor) -> tuple[str, ...]:
    """Return the names of a tensor's axes; nameless ones where the tap's names do not fit its rank."""
    return tap.dims if len(tap.dims) == tensor.dim() else tuple(f"axis{i}" for i in range(tensor.dim()))


def like(tensor: Tensor, tap: Tap, *, other: Tensor, other_tap: Tap) -> Tensor | None:
    """Return `tensor` in the shape of `other`, axes of size 1 apart, or None where it does not fit."""
    mine, theirs = axes_of(tap, tensor), axes_of(other_tap, other)
    if mine != theirs and sorted(mine) == sorted(theirs) and len(set(mine)) == len(mine):
        tensor = tensor.permute([mine.index(axis) for axis in theirs])
    if [s for s in tensor.shape if s != 1] != [s for s in other.shape if s != 1]:
        return None
    return tensor.reshape(other.shape)


def as_rows(tensor: Tensor, tap: Tap) -> Rows:
    """Return a tap as a matrix with one row per token (per patch in a vision tower)."""
    axes = axes_of(tap, tensor)
    if "token" in axes:
        moved = [axes.index("token")]
        heads = int(tensor.shape[axes.index("head")]) if "head" in axes else 0
        if heads:
            moved.append(axes.index("head"))
        rest = [i for i in range(tensor.dim()) if i not in moved]
        values = tensor.permute(moved + rest).reshape(tensor.shape[moved[0]], -1)
        return Rows(values=values, heads=heads, tokens=True)
    if tensor.dim() >= 2:
        return Rows(values=tensor.reshape(-1, tensor.shape[-1]), heads=0, tokens=tap.name.startswith("vision."))
    return Rows(values=tensor.reshape(1, -1), heads=0, tokens=False)


def as_choices(tensor: Tensor, tap: Tap) -> tuple[Tensor, int]:
    """Return ids or scores of a decision as [T * G, K] and T; G counts the choices by token (heads, groups)."""
    axes = axes_of(tap, tensor)
    if "token" in axes and axes.index("token") != tensor.dim() - 1:
        tensor = tensor.movedim(axes.index("token"), 0)
    elif tensor.dim() >= 3 and tensor.shape[0] == 1:
        tensor = tensor[0]
    rows = int(tensor.shape[0]) if tensor.dim() > 1 else 1
    return tensor.reshape(-1, tensor.shape[-1]), rows


def broadcastable(actual: Tensor, expected: Tensor) -> Tensor | None:
    """Return integer inputs expanded to the reference's shape (position ids given once for three axes), or None."""
    try:
        return torch.broadcast_to(actual, expected.shape)
    except RuntimeError:
        return None
