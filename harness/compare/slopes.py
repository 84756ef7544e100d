"""Slopes of one tap's error: whole, by channel group or head, by position, by expert. Knows taps; must not know limits.

What counts is how far a slope lies beyond its own confidence interval and beyond what honest runs show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.compare.sides import Sides
from harness.compare.values import span_of
from harness.metrics.slopes import Products, Slopes, group_slopes, joint_slopes
from harness.taps import part_step
from harness.types import Trace

FEWEST_TOKENS = 8
"""Tokens below which clusters say nothing of a slope's error."""
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


def slopes_of(sides: Sides, *, buckets: int) -> list[Slope]:
    """Return the worst slope of the whole, of heads (or channel groups) and of stretches of positions."""
    tokens, width = sides.expected.shape
    if tokens < FEWEST_TOKENS:
        return []
    products = Products(error=sides.errors.product, signal=sides.errors.signal)
    whole = products.whole()
    kinds = [("whole", whole)]
    if sides.groups > 1:
        kinds.append(("head" if sides.by_head else "channels", products))
    count = min(buckets, tokens // FEWEST_TOKENS)
    if count > 1:
        kinds.append(("position", whole.stretches(count)))
    together = Products(
        error=torch.cat([p.error for _, p in kinds], dim=-1), signal=torch.cat([p.signal for _, p in kinds], dim=-1)
    )
    size = width // sides.groups

    def at(kind: str, place: int) -> Any:
        if kind == "channels":
            return f"{place * size}-{(place + 1) * size - 1}"
        return {"whole": None, "head": place}.get(kind) if kind != "position" else span_of(sides.rows, count, place)

    found = group_slopes(together, weight=sides.floor.weight)
    return _worst([(kind, p.signal.shape[1]) for kind, p in kinds], found, at)


def expert_slopes(sides: Sides, *, parts: Tensor, owner: Tensor) -> list[Slope]:
    """Return the worst slope of an expert's share. Shapes: parts [N, K, E'], owner [N, K] of all N tokens."""
    owners = int(owner.max()) + 1 if owner.numel() else 0
    if not owners:
        return []
    if len(sides.rows) < len(parts):
        parts, owner = parts[sides.rows], owner[sides.rows]
    step = part_step(sides.expected.shape[-1])
    errors = torch.stack([a[:, ::step] - sides.expected[:, ::step] for a in (sides.actual, *sides.floors)])
    errors = errors.to(torch.float32 if sides.errors.narrow else torch.float64)
    slopes = joint_slopes(error=errors, parts=parts, owner=owner, weight=sides.floor.weight, owners=owners)
    return _worst([("expert", owners)], slopes, lambda _, place: place)


def parts_of(oracle: Trace, tap: str) -> tuple[Tensor, Tensor] | None:
    """Return the parts [T, K, E'] of a tap that the oracle recorded and their owners [T, K], or None."""
    parts, owner = oracle.tensors.get(f"{tap}.parts"), oracle.tensors.get(f"{tap}.parts.owner")
    if parts is None or owner is None:
        return None
    return parts.reshape(-1, *parts.shape[-2:]), owner.reshape(-1, owner.shape[-1])


def _worst(kinds: Sequence[tuple[str, int]], slopes: Slopes, at: Callable[[str, int], Any]) -> list[Slope]:
    """Return for each kind of slice the slope furthest beyond its interval (NaN first), none where none can be told.

    The columns of `slopes` are the slices of all kinds (kind, how many), one kind after the other; its rows are the
    port, then floors. `at` names a slice by its kind and number.
    """
    mine = Slopes(value=slopes.value[0], error=slopes.error[0], samples=slopes.samples)
    honest = torch.cat([torch.zeros_like(slopes.value[:1]), slopes.value[1:].abs()]).amax(dim=0)
    known = torch.isfinite(mine.error) | torch.isnan(mine.value)
    beyond = torch.where(known, mine.beyond(honest=honest, tests=TESTS), 0.0)
    size = mine.value.abs() * known
    columns = zip(*(t.tolist() for t in (known, beyond, size, mine.value, mine.error, mine.samples)), strict=True)
    told = list(columns)
    found, start = [], 0
    for kind, count in kinds:
        inside = told[start : start + count]
        start += count
        if not any(row[0] for row in inside):
            continue
        # a NaN is the largest; where nothing lies beyond its interval, the largest slope stands for its kind
        place = max(range(count), key=lambda i: (math.isnan(inside[i][1]), inside[i][1], inside[i][2]))
        _, further, _, value, error, samples = inside[place]
        found.append(Slope(slice=kind, at=at(kind, place), beyond=further, value=value, error=error, n=samples))
    return found
