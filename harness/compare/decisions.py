"""Decisions of one run: where the sides agree, and how far a flip is outside what noise explains. Knows no limits."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.compare.align import as_choices
from harness.compare.subject import Scene, measured
from harness.metrics.discrete import Sets, as_sets, margin_z, score_error, valid_candidates
from harness.taps import DECISION_KINDS, PINNED_KINDS, layer_of, level_of, unit_of
from harness.types import Measurement, Tap, Trace

FLIPS_ALLOWED, FLIPS_PER_FLOOR_FLIP = 4, 3
"""Flips that are not counted as excess: honest ports stay below 4 + 3 x the floor's own."""

_ROUTER = re.compile(r"\.(router|gate)(\.out\.\d+)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision tap of all sides as sets. Shapes: [R, N], R = tokens x choices per token; `groups` R / tokens.

    `same` [tokens] says where the accel's choice equals the oracle's (everywhere if it did not show it), `floors_same`
    where each floor's does, `floor_same` where all floors' do.
    """

    tap: Tap
    groups: int
    oracle: Sets
    accel: Sets | None
    scores: Tensor | None
    floor_scores: Sequence[Tensor]
    valid: Tensor
    accel_valid: Tensor
    pinned: bool
    same: Tensor
    floors_same: Sequence[Tensor]
    floor_same: Tensor


def decisions_of(scene: Scene) -> dict[str, Decision]:
    """Return all decisions that the oracle took, in execution order."""
    found = {}
    for name, tap in scene.oracle.taps.items():
        if tap.kind in DECISION_KINDS and name in scene.oracle.tensors:
            found[name] = _decision(scene, tap)
    return found


def _decision(scene: Scene, tap: Tap) -> Decision:
    ids, tokens = _choices(scene.oracle, tap.name) or (torch.zeros(1, 1, dtype=torch.int64), 1)
    groups = max(1, ids.shape[0] // max(1, tokens))
    scores = _scores(scene.oracle, tap.name, ids.shape[0])
    accel = _rows(scene.accel, tap.name, ids.shape[0])
    candidates = int(scores.shape[1]) if scores is not None else 1 + max(
        int(t.max()) if t is not None and t.numel() else 0 for t in (ids, accel)
    )  # fmt: skip
    valid = valid_candidates(scores) if scores is not None else torch.ones(ids.shape[0], candidates, dtype=torch.bool)
    mine = _scores(scene.accel, tap.name, ids.shape[0])
    floors = [r for f in scene.floors if (r := _rows(f, tap.name, ids.shape[0])) is not None]
    floor_scores = [s for f in scene.floors if (s := _scores(f, tap.name, ids.shape[0])) is not None]
    own = as_sets(ids, candidates=candidates)
    chosen = as_sets(accel, candidates=candidates) if accel is not None else None
    everywhere = torch.ones(ids.shape[0] // groups, dtype=torch.bool)

    def same(other: Sets) -> Tensor:
        return ((other.member & valid) == (own.member & valid)).all(dim=1).reshape(-1, groups).all(dim=1)

    floors_same = [same(as_sets(f, candidates=candidates)) for f in floors]
    return Decision(
        tap=tap,
        groups=groups,
        oracle=own,
        accel=chosen,
        same=same(chosen) if chosen is not None else everywhere,
        floors_same=floors_same,
        floor_same=torch.stack([everywhere, *floors_same]).all(dim=0),
        scores=scores,
        floor_scores=[s for s in floor_scores if scores is not None and s.shape == scores.shape],
        valid=valid,
        accel_valid=valid_candidates(mine) if mine is not None and mine.shape == valid.shape else valid,
        pinned=_is_pinned(scene, tap.name),
    )


def _choices(trace: Trace, name: str) -> tuple[Tensor, int] | None:
    return as_choices(trace.tensors[name], trace.taps[name]) if name in trace.tensors else None


def _rows(trace: Trace, name: str, rows: int) -> Tensor | None:
    found = _choices(trace, name)
    return found[0] if found is not None and found[0].shape[0] == rows else None


def _scores(trace: Trace, name: str, rows: int) -> Tensor | None:
    """Return the scores behind a decision as [R, N]: its own, an earlier decision's that it repeats, or the router's.

    A router that chooses by other means than top-k still hands out one score by candidate.
    """
    own = _rows(trace, name + ".scores", rows)
    if own is not None:
        return own if own.is_floating_point() else None
    if name not in trace.taps:
        return None
    layer = layer_of(name)
    before = [n for n in itertools.takewhile(lambda n: n != name, trace.taps) if layer_of(n) == layer]
    least = int(trace.tensors[name].max()) + 1 if name in trace.tensors and trace.tensors[name].numel() else 0
    for earlier in reversed([n for n in before if n.endswith(".scores") or _ROUTER.search(n)]):
        found = _rows(trace, earlier, rows)
        if found is not None and found.is_floating_point() and found.shape[1] >= max(least, 2):
            return found
    return None


def _is_pinned(scene: Scene, name: str) -> bool:
    """Say whether every side went on with the same choice, so that values behind it need no agreement."""
    if not scene.run.pin_decisions or not scene.run.level:
        return False
    sides = [scene.oracle, *scene.floors, *([] if scene.run.pin_role == "accel" else [scene.accel])]
    return all(
        name in side.tensors and name not in side.facts.get("notes", {}) and name in side.facts.get("pinned", (name,))
        for side in sides
    )


def conditions(scene: Scene, tap: str, decisions: Mapping[str, Decision]) -> list[str]:
    """Return the decisions that a tap's value depends on in this run.

    They lie in the tap's layer and before it, and are neither pinned nor behind a unit whose output was overwritten.
    """
    place = scene.order.get(tap, 1 << 30)
    unit, layer = unit_of(tap), layer_of(tap)
    earlier = [
        name for name, d in decisions.items()
        if layer_of(name) == layer and not d.pinned and name != tap and scene.order[name] <= place
    ]  # fmt: skip
    if not earlier or not scene.run.level:
        return earlier
    overwritten = [
        n for n in scene.under(layer)
        if scene.oracle.taps[n].kind in PINNED_KINDS and level_of(n) <= scene.run.level
    ]  # fmt: skip
    return [
        name for name in earlier
        if not any(_within(_chooser(name), p) and not _within(unit, p, own=True) for p in overwritten)
    ]  # fmt: skip


def _chooser(decision: str) -> str:
    """Return the unit that a decision is taken in: `layers.3.moe.router.topk.1` -> `layers.3.moe.router`."""
    return re.sub(r"\.topk(\.\d+)?(\.scores)?$", "", unit_of(decision))


def _within(unit: str, outer: str, *, own: bool = False) -> bool:
    return unit.startswith(outer + ".") or (own and unit == outer)


def agreeing(names: Sequence[str], decisions: Mapping[str, Decision], *, floors_only: bool = False) -> Tensor | None:
    """Return where all the named decisions agree on all sides, [tokens], or None without any."""
    mask: Tensor | None = None
    for name in names:
        one = decisions[name].floor_same if floors_only else decisions[name].floor_same & decisions[name].same
        mask = one if mask is None else (mask & one if mask.shape == one.shape else mask)
    return mask


def judge_decision(scene: Scene, name: str, decisions: Mapping[str, Decision]) -> list[Measurement]:
    """Measure one decision: margins of flips, their number, sizes, and members outside the valid set."""
    d = decisions[name]
    order = scene.order[name]
    free = not scene.run.level
    earlier = agreeing(conditions(scene, name, decisions), decisions)
    tokens = d.valid.shape[0] // d.groups
    if earlier is None or earlier.shape[0] != tokens:
        earlier = torch.ones(tokens, dtype=torch.bool)
    earlier = earlier & (torch.arange(tokens) >= scene.first_token)
    if d.accel is None:
        return []

    def number(metric: str, value: float, n: int, **where: object) -> Measurement:
        return measured(
            scene.stage, scene.run, metric, value, subject=name, order=order, n=n, kind=d.tap.kind, where=where
        )

    judged = int(earlier.sum())
    share = float(d.same[earlier].to(torch.float64).mean()) if judged else 1.0
    found = [number("agreeing_share", share, judged)]
    if free:
        return found
    rows = earlier.repeat_interleave(d.groups)
    size, outside = _wrong_sets(d, rows)
    flips = int((~d.same & earlier).sum())
    floor_flips = max((int((~same & earlier).sum()) for same in d.floors_same), default=0)
    found.append(number("decision_size_mismatches", size, judged))
    found.append(number("decision_outside_valid", outside, judged))
    excess = flips - (FLIPS_ALLOWED + FLIPS_PER_FLOOR_FLIP * floor_flips)
    found.append(number("decision_flips_excess", excess, judged, flips=flips, floor_flips=floor_flips))
    found.append(_margin(scene, d, rows, flips, judged))
    return found


def _wrong_sets(d: Decision, rows: Tensor) -> tuple[int, int]:
    """Count rows whose set has another size, and members that were no candidates.

    A chosen item that the oracle's mask forbids is harmless filling where the port masked it too (fewer candidates
    than k): it counts only if the port held it for a real candidate.
    """
    assert d.accel is not None
    spare = d.oracle.member.sum(dim=1) > (d.oracle.member & d.valid).sum(dim=1)
    forbidden = d.accel.member & ~d.valid
    believed = forbidden & d.accel_valid if d.accel_valid is not d.valid else forbidden & ~spare[:, None]
    size = (d.accel.member & d.valid).sum(dim=1) + believed.sum(dim=1) != (d.oracle.member & d.valid).sum(dim=1)
    return int((size & rows).sum()), int(((believed.sum(dim=1) + d.accel.strays) * rows).sum())


def _margin(scene: Scene, d: Decision, rows: Tensor, flips: int, judged: int) -> Measurement:
    """Return the largest margin of a flip. Those without scores are judged by their number alone."""
    order, value, where = scene.order[d.tap.name], 0.0, {}
    unweighed = flips > 0 and (d.scores is None or not d.floor_scores)
    detail = {"message": f"{flips} flips judged by their number: no scores were recorded"} if unweighed else {}
    if flips and not unweighed and d.scores is not None and d.accel is not None:
        uncertainty = torch.stack(
            [score_error(actual=f, expected=d.scores, valid=d.valid) for f in d.floor_scores]
        ).amax(dim=0)
        z = margin_z(
            actual=d.accel.member & d.valid,
            expected=d.oracle.member & d.valid,
            scores=d.scores,
            uncertainty=uncertainty,
        )
        z = torch.where(rows, z, torch.zeros_like(z))
        value, where = float(z.max()), {"token": int(z.argmax()) // d.groups}
    return measured(
        scene.stage, scene.run, "decision_margin_z", value, subject=d.tap.name, order=order, n=judged,
        kind=d.tap.kind, where=where, detail=detail,
    )  # fmt: skip
