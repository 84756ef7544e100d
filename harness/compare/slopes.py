"""Slopes of one tap's error: whole, by channel group or head, by position, by expert. Knows taps; must not know limits.

What counts is how far a slope lies beyond its own confidence interval and beyond what honest runs show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.metrics.slopes import Slopes, channel_slopes, greatest, joint_slopes, position_slopes
from harness.taps import part_step
from harness.types import Trace

FEWEST_TOKENS = 8
"""Tokens below which clusters say nothing of a slope's error."""
GROUPS = 8
"""Groups of consecutive channels where heads are not known."""
TESTS = 4096
"""Slopes of one run that are looked at, in order of magnitude (taps times slices): intervals allow for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """The slope furthest beyond its interval. `beyond` is by how much, `value` and `error` the slope itself."""

    slice: str
    at: Any
    beyond: float
    value: float
    error: float
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """One tap as rows on the tokens that are compared: actual, expected [T, E]; floors; weight [T]."""

    actual: Tensor
    expected: Tensor
    floors: Sequence[Tensor]
    weight: Tensor


def slopes_of(sides: Sides, *, heads: int, rows: Tensor, buckets: int) -> list[Slope]:
    """Return the worst slope of the whole, of heads (or channel groups) and of stretches of positions.

    `heads` is 0 where the channels are not those of heads; `rows` [T] holds the token index of each row.
    """
    tokens, width = sides.expected.shape
    if tokens < FEWEST_TOKENS:
        return []
    groups = heads or (GROUPS if width % GROUPS == 0 else 0)
    found = [_by_channel(sides, "whole", [None], 1)]
    if groups > 1:
        size = width // groups
        at = range(groups) if heads else [f"{i * size}-{(i + 1) * size - 1}" for i in range(groups)]
        found.append(_by_channel(sides, "head" if heads else "channels", at, groups))
    count = min(buckets, tokens // FEWEST_TOKENS)
    if count > 1:
        which = torch.arange(tokens) * count // tokens
        inside = [rows[which == i] for i in range(count)]
        places = [f"{int(r.min())}-{int(r.max())}" for r in inside]
        found.append(
            _worst("position", places, sides, [
                position_slopes(actual=a, expected=sides.expected, weight=sides.weight, buckets=count)
                for a in (sides.actual, *sides.floors)
            ])
        )  # fmt: skip
    return [s for s in found if s is not None]


def expert_slopes(sides: Sides, *, parts: Tensor, owner: Tensor) -> list[Slope]:
    """Return the worst slope of an expert's share. Shapes: parts [T, K, E'], owner [T, K], on the compared tokens."""
    step = part_step(sides.expected.shape[-1])
    owners = int(owner.max()) + 1 if owner.numel() else 0
    if not owners:
        return []
    kept = sides.expected[:, ::step].to(torch.float64)
    all_slopes = [
        joint_slopes(
            error=a[:, ::step].to(torch.float64) - kept, parts=parts, owner=owner, weight=sides.weight, owners=owners
        )
        for a in (sides.actual, *sides.floors)
    ]
    return [s for s in [_worst("expert", range(owners), sides, all_slopes)] if s is not None]


def parts_of(oracle: Trace, tap: str) -> tuple[Tensor, Tensor] | None:
    """Return the parts [T, K, E'] of a tap that the oracle recorded and their owners [T, K], or None."""
    parts, owner = oracle.tensors.get(f"{tap}.parts"), oracle.tensors.get(f"{tap}.parts.owner")
    if parts is None or owner is None:
        return None
    return parts.reshape(-1, *parts.shape[-2:]), owner.reshape(-1, owner.shape[-1])


def _by_channel(sides: Sides, kind: str, at: Sequence[Any], groups: int) -> Slope | None:
    all_slopes = [
        channel_slopes(actual=a, expected=sides.expected, weight=sides.weight, groups=groups)
        for a in (sides.actual, *sides.floors)
    ]
    return _worst(kind, at, sides, all_slopes)


def _worst(kind: str, at: Sequence[Any], sides: Sides, all_slopes: Sequence[Slopes]) -> Slope | None:
    """Return the slope furthest beyond its interval (NaN first), or None where none can be told."""
    mine, honest = all_slopes[0], list(all_slopes[1:])
    known = torch.isfinite(mine.error) | torch.isnan(mine.value)
    if not bool(known.any()):
        return None
    beyond = mine.beyond(honest=greatest(honest, mine), tests=TESTS)
    beyond = torch.where(known, beyond, torch.zeros_like(beyond))
    place = int(beyond.argmax())  # a NaN is the largest
    if float(beyond[place]) == 0.0:
        place = int((mine.value.abs() * known).argmax())
    return Slope(
        slice=kind,
        at=at[place],
        beyond=float(beyond[place]),
        value=float(mine.value[place]),
        error=float(mine.error[place]),
        n=int(mine.samples[place]),
    )
