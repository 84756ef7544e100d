"""One tap of all sides as matrices on the tokens that are compared. Knows taps and decisions; must not know limits.

Whatever is to be told of a tap's values is told of this record: ratios, slopes, and any further test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.compare.align import as_rows
from harness.compare.decisions import Decision, agreeing, conditions
from harness.compare.subject import Scene, Views, problem
from harness.compare.values import SMALLEST_SLICE, Floor, with_floor
from harness.metrics.discrete import valid_candidates
from harness.metrics.real import Errors, all_finite, has_signal
from harness.types import Measurement, Tap

GROUPS = 8
"""Groups of consecutive channels where heads are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """One tap of all sides on the tokens that are compared, each in its own precision.

    `rows` holds the token index of each row; `tokens` False says that rows are no places in a sequence; `heads` is 0
    without a head axis. `groups` of consecutive channels are heads where `by_head`. `errors` are the sums over errors,
    the port's first, then the floors'; those by column weigh tokens as `floor` does.
    Shapes: actual, expected [T, E], floors S x [T, E], rows [T].
    """

    tap: Tap
    actual: Tensor
    expected: Tensor
    floors: Sequence[Tensor]
    rows: Tensor
    tokens: bool
    heads: int
    groups: int
    by_head: bool
    errors: Errors
    floor: Floor


def sides_of(scene: Scene, views: Views, decisions: Mapping[str, Decision]) -> Sides | Measurement | None:
    """Return a tap's values where decisions agree, what stands for them, or None where nothing is to be said."""
    tap, rows = views.tap, as_rows(views.oracle, views.tap)
    every = [rows.values, *(as_rows(t, tap).values for t in (views.accel, *views.floors))]
    if tap.kind == "scores":  # masked candidates have no value; where the port masks is judged with the decision
        valid = valid_candidates(rows.values)
        every = [torch.where(valid, values, 0.0) for values in every]
    count = len(rows.values)
    keep = kept_tokens(scene, tap, decisions, count) if rows.tokens else torch.arange(count)
    if keep is None:
        return None
    if len(keep) < count:
        every = [values[keep] for values in every]
    expected, actual, *floors = every
    if expected.numel() < min(SMALLEST_SLICE, rows.values.numel()):
        return problem(scene, tap, "too_few", f"decisions agree on {len(keep)} of {count} tokens")
    heads = rows.heads or _core_heads(scene, tap, expected)
    groups = heads or (GROUPS if expected.shape[1] % GROUPS == 0 else 1)
    errors, floor = with_floor(
        actual=actual, floors=floors, expected=expected, dtype=getattr(torch, scene.dtype),
        groups=groups if scene.run.level else 1,
    )  # fmt: skip
    silent = _without_signal(scene, tap, errors, every)
    if silent is not None:
        return silent
    return Sides(
        tap=tap, actual=actual, expected=expected, floors=floors, rows=keep, tokens=rows.tokens, heads=rows.heads,
        groups=groups, by_head=heads > 0, errors=errors, floor=floor,
    )  # fmt: skip


def _core_heads(scene: Scene, tap: Tap, values: Tensor) -> int:
    """Return the number of heads whose outputs, side by side, are the input of an output projection; else 0."""
    core = tap.name.endswith(".attn.core")
    return scene.heads if core and scene.heads and values.shape[-1] % scene.heads == 0 else 0


def kept_tokens(scene: Scene, tap: Tap, decisions: Mapping[str, Decision], count: int) -> Tensor | None:
    """Return the tokens to compare, or None where already the floors leave too few to say anything."""
    names = conditions(scene, tap.name, decisions) if scene.run.level else []
    if not names:
        return torch.arange(min(scene.first_token, count), count)
    mask = torch.arange(count) >= scene.first_token
    agree, honest = agreeing(names, decisions), agreeing(names, decisions, floors_only=True)
    if agree is not None and honest is not None and agree.shape == mask.shape:
        if int((mask & honest).sum()) * 4 < int(mask.sum()):
            return None
        mask = mask & agree
    return mask.nonzero().reshape(-1)


def _without_signal(scene: Scene, tap: Tap, errors: Errors, every: Sequence[Tensor]) -> Measurement | None:
    """Return what is to be said instead of a ratio where oracle or floor (every: oracle, port, floors) carry none."""
    expected, actual, *floors = every
    if not bool(torch.isfinite(errors.signal.sum())) and not all_finite(expected):
        return problem(scene, tap, "error", "the oracle's value is not finite: the reference cannot be judged by")
    if not bool(torch.isfinite(errors.error[1:].sum())) and not all(all_finite(f) for f in floors):
        return problem(
            scene, tap, "error", "the floor's value is not finite: the reference overflows in this precision"
        )
    if float(errors.signal.sum()) != 0 or has_signal(expected) or any(has_signal(f) for f in floors):
        return None
    if actual.any() and torch.isfinite(actual).all():
        return problem(scene, tap, "no_signal", "the expected value is zero everywhere, the port's is not")
    return None
