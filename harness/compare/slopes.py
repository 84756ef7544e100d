"""Slopes of one tap's error: whole, by channel group or head, by position, by expert. Knows taps; must not know limits.

What counts is how far a slope lies beyond its own confidence interval and beyond what honest runs show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.metrics.real import is_narrow
from harness.metrics.slopes import Products, Slopes, group_slopes, inner_products, joint_slopes
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
    groups = heads or (GROUPS if width % GROUPS == 0 else 1)
    products = _products(sides, groups)
    whole = products.whole()
    kinds: list[tuple[str, Sequence[Any], Products]] = [("whole", [None], whole)]
    if groups > 1:
        size = width // groups
        at = range(groups) if heads else [f"{i * size}-{(i + 1) * size - 1}" for i in range(groups)]
        kinds.append(("head" if heads else "channels", at, products))
    count = min(buckets, tokens // FEWEST_TOKENS)
    if count > 1:
        which = torch.arange(tokens) * count // tokens
        inside = [rows[which == i] for i in range(count)]
        places = [f"{int(r.min())}-{int(r.max())}" for r in inside]
        kinds.append(("position", places, whole.stretches(count)))
    together = Products(
        error=torch.cat([p.error for _, _, p in kinds], dim=-1),
        signal=torch.cat([p.signal for _, _, p in kinds], dim=-1),
    )
    return _worst([(kind, at) for kind, at, _ in kinds], group_slopes(together, weight=sides.weight))


def _products(sides: Sides, groups: int) -> Products:
    """Return the inner products of all sides, the accel first; the signal's are made once."""
    narrow, signal, errors = is_narrow(sides.expected), None, []
    for actual in (sides.actual, *sides.floors):
        found = inner_products(
            actual=actual, expected=sides.expected, groups=groups, signal=signal, narrow=narrow
        )  # fmt: skip
        signal = found.signal
        errors.append(found.error)
    assert signal is not None
    return Products(error=torch.stack(errors), signal=signal)


def expert_slopes(sides: Sides, *, parts: Tensor, owner: Tensor) -> list[Slope]:
    """Return the worst slope of an expert's share. Shapes: parts [T, K, E'], owner [T, K], on the compared tokens."""
    step = part_step(sides.expected.shape[-1])
    owners = int(owner.max()) + 1 if owner.numel() else 0
    if not owners:
        return []
    kept = sides.expected[:, ::step].to(torch.float64)
    errors = torch.stack([a[:, ::step].to(torch.float64) - kept for a in (sides.actual, *sides.floors)])
    slopes = joint_slopes(error=errors, parts=parts, owner=owner, weight=sides.weight, owners=owners)
    return _worst([("expert", range(owners))], slopes)


def parts_of(oracle: Trace, tap: str) -> tuple[Tensor, Tensor] | None:
    """Return the parts [T, K, E'] of a tap that the oracle recorded and their owners [T, K], or None."""
    parts, owner = oracle.tensors.get(f"{tap}.parts"), oracle.tensors.get(f"{tap}.parts.owner")
    if parts is None or owner is None:
        return None
    return parts.reshape(-1, *parts.shape[-2:]), owner.reshape(-1, owner.shape[-1])


def _worst(kinds: Sequence[tuple[str, Sequence[Any]]], slopes: Slopes) -> list[Slope]:
    """Return for each kind of slice the slope furthest beyond its interval (NaN first), none where none can be told.

    The columns of `slopes` are the slices of all kinds, one kind after the other; its rows are the accel, then floors.
    """
    mine = Slopes(value=slopes.value[0], error=slopes.error[0], samples=slopes.samples)
    honest = torch.cat([torch.zeros_like(slopes.value[:1]), slopes.value[1:].abs()]).amax(dim=0)
    known = torch.isfinite(mine.error) | torch.isnan(mine.value)
    beyond = torch.where(known, mine.beyond(honest=honest, tests=TESTS), 0.0)
    size = mine.value.abs() * known
    found, start = [], 0
    for kind, at in kinds:
        inside = slice(start, start + len(at))
        start += len(at)
        if not bool(known[inside].any()):
            continue
        place = int(beyond[inside].argmax())  # a NaN is the largest
        if float(beyond[inside][place]) == 0.0:
            place = int(size[inside].argmax())
        column = inside.start + place
        found.append(
            Slope(
                slice=kind, at=at[place], beyond=float(beyond[column]), value=float(mine.value[column]),
                error=float(mine.error[column]), n=int(mine.samples[column]),
            )
        )  # fmt: skip
    return found
