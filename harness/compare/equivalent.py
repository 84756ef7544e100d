"""Ways to write the same thing: choices in another order, a factor at another place. Knows taps, not limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.compare.subject import Scene, Views
from harness.taps import DECISION_KINDS, child_of, is_input, level_of
from harness.types import Measurement, Trace

GROSS = 4.0
"""Error ratio from which on a unit's values may be a factor of what is expected; smaller ones are what they are."""
FACTOR, LEFT, ONE = 1.1, 0.05, 0.01
"""A moved factor is at least so far from 1, leaves at most so much of the error, and meets its inverse so well."""


def in_one_order(scene: Scene, views: Views, floors: Sequence[Trace]) -> Views:
    """Return values that belong to choices (routing weights, [T, K]) sorted by the choice, on every side by its own.

    In which order a router hands on what it chose decides nothing, as long as its weights come in the same. `floors`
    are the traces that the floors of the views come from.
    """
    name = _told(scene, views)
    if name is None:
        return views
    mine, theirs = _ids(scene.accel, name), _ids(scene.oracle, name)
    if mine is None or theirs is None or torch.equal(mine, theirs):
        return views
    return Views(
        tap=views.tap,
        oracle=_sorted(views.oracle, theirs),
        floors=[
            _sorted(v, ids) for v, f in zip(views.floors, floors, strict=True) if (ids := _ids(f, name)) is not None
        ],
        accel=_sorted(views.accel, mine),
    )


def _told(scene: Scene, views: Views) -> str | None:
    """Return the decision tap that says whose the last axis of a tap is: what experts in the same layer are told.

    Only what a unit gives at the level that is isolated is in the port's own order; behind it stands the reference's.
    """
    own = level_of(views.tap.name) == scene.run.level and not is_input(views.tap.name)
    if views.tap.kind != "hidden" or views.oracle.dim() < 2 or not own:
        return None
    parent = child_of(views.tap.name)
    for name in scene.under(parent):
        if scene.oracle.taps[name].kind in DECISION_KINDS and is_input(name):
            ids = scene.oracle.tensors.get(name)
            if ids is not None and ids.shape[-1] == views.oracle.shape[-1] and ids.numel() == views.oracle.numel():
                return name
    return None


def _ids(trace: Trace, name: str) -> Tensor | None:
    return trace.tensors.get(name)


def _sorted(values: Tensor, ids: Tensor) -> Tensor:
    order = ids.reshape(-1, ids.shape[-1]).argsort(dim=-1, stable=True)
    return values.reshape(order.shape).gather(-1, order).reshape(values.shape)


def suspects(scene: Scene, found: list[Measurement]) -> list[str]:
    """Return the smallest units of a replay that are grossly off as a whole, where one parent has several of them."""
    if scene.run.level < 3:
        return []
    gross = [
        m.subject for m in found
        if m.metric == "error_ratio" and m.where.get("slice") == "whole" and level_of(m.subject) == 3
        and m.value is not None and m.value > GROSS
    ]  # fmt: skip
    parents = [child_of(name) for name in gross]
    return [name for name, parent in zip(gross, parents, strict=True) if parents.count(parent) > 1]


def moved_factors(sides: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return the factor of each place, {tap: (actual, expected)}, whose inverse stands at another place of one parent.

    What is a factor there and its inverse here is undone before the parent gives its result, which is judged by itself.
    """
    factors: dict[str, float] = {}
    for name, (actual, expected) in sides.items():
        a, e = actual.to(torch.float64), expected.to(torch.float64)
        power = float(e.square().sum())
        factor = float((a * e).sum()) / power if power else math.nan
        error = float((a - e).norm())
        if factor > 0 and abs(math.log(factor)) > math.log(FACTOR) and float((a - factor * e).norm()) <= LEFT * error:
            factors[name] = factor
    return {
        name: factor
        for name, factor in factors.items()
        if any(
            other != name and child_of(other) == child_of(name) and abs(factor * inverse - 1) < ONE
            for other, inverse in factors.items()
        )
    }
