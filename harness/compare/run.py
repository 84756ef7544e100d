"""One run of one case: every tap that the oracle has, compared. Knows taps and records; must not know limits."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from harness.compare.align import like
from harness.compare.decisions import Decision, decisions_of, judge_decision
from harness.compare.equivalent import in_one_order, moved_factors, suspects
from harness.compare.exact import compare_exact
from harness.compare.isolation import not_isolated
from harness.compare.logits import compare_logits
from harness.compare.samples import samples_of
from harness.compare.sides import Sides, sides_of
from harness.compare.slices import further_slices, grid_of, rank_slices
from harness.compare.slopes import Slope, expert_slopes, parts_of, slopes_of
from harness.compare.structure import Effect, effects_of, token_ratios
from harness.compare.subject import Scene, Views, measured, number, problem, promised, shapes_differ
from harness.compare.values import Ratio, error_ratios, median_ratio
from harness.taps import DECISION_KINDS, EXACT_KINDS, level_of
from harness.types import Failure, Measurement, Run, Scope, Tap, Trace

BUCKETS = 8
"""Position buckets by default; a run's option `buckets` overrides it."""
AGAIN = ("error_ratio", "slope_beyond_noise", "bias_beyond_noise", "growth_beyond_noise")
"""Metrics of a unit's values, taken again without a factor that was moved within it."""
_MANDATORY = re.compile(r"layers\.\d+|vision\.blocks\.\d+|vision\.merger|embed|merged|logits|inputs\.token_ids")


def is_mandatory(tap: Tap) -> bool:
    """Say whether a port must show a tap (layer outputs, decisions, logits), unless its scope says it cannot."""
    return tap.kind in DECISION_KINDS or _MANDATORY.fullmatch(tap.name) is not None


def compare_run(
    *,
    stage: str,
    run: Run,
    oracle: Trace | Failure | None,
    floors: Sequence[Trace],
    accel: Trace | Failure | None,
    scope: Scope,
    dtype: str,
    places: Mapping[str, int] | None = None,
    heads: int = 0,
) -> list[Measurement]:
    """Measure one run against the oracle. Whatever was promised and is not there becomes a measurement with a problem.

    A free run (level 0) gives accumulated ratios and logits; a replay at level L gives error ratios of the taps that L
    isolates, and judges decisions. `dtype` is the port's precision. `run.options`: `phase` (a label), `compare_from`
    (first token judged), `buckets` (position buckets). `places` is the execution order to report in, so that runs which
    keep different taps agree on which place is first; by default the oracle's own in this run. `heads` is the number of
    attention heads, for taps whose channels are heads without saying so.
    """
    if not isinstance(oracle, Trace):
        return _lost(stage, run, oracle, "the oracle")
    if not isinstance(accel, Trace):
        return _lost(stage, run, accel, "the port", oracle=oracle, scope=scope, places=places)
    order = execution_order(oracle, places)
    scene = Scene(
        stage=stage, run=run, oracle=oracle, floors=floors, accel=accel, dtype=dtype, order=order, heads=heads
    )
    decisions = decisions_of(scene)
    found: list[Measurement] = []
    unseen: list[str] = []
    apart = not_isolated(scene)
    for name, tap in oracle.taps.items():
        if name not in oracle.tensors or not _isolated(run, tap) or _unobservable(name, scope) or tap.kind == "parts":
            continue
        if name not in accel.tensors:
            if is_mandatory(tap):
                found.append(problem(scene, tap, "missing", "the port did not record it"))
            elif run.level:
                unseen.append(name)
            continue
        if name not in apart or tap.kind in EXACT_KINDS or tap.kind in DECISION_KINDS:
            found += _compare_tap(scene, tap, decisions)
    found = _without_moved_factors(scene, decisions, found)
    if run.level:
        detail = {"taps": unseen[:50], "not_isolated": sorted(apart & accel.tensors.keys())[:50]}
        found.append(measured(stage, run, "unseen_taps", len(unseen), subject=run.id, n=len(order), detail=detail))
    return found


def _without_moved_factors(
    scene: Scene, decisions: Mapping[str, Decision], found: list[Measurement]
) -> list[Measurement]:
    """Measure units again without a factor whose inverse stands beside them; what is around them is judged as it is."""
    views = {name: _views(scene, scene.oracle.taps[name]) for name in suspects(scene, found)}
    sides = {name: (v.accel, v.oracle) for name, v in views.items() if isinstance(v, Views)}
    factors = moved_factors(sides)
    if not factors:
        return found
    again: dict[str, list[Measurement]] = {}
    for name, factor in factors.items():
        view = views[name]
        assert isinstance(view, Views)
        scaled = _values(scene, replace(view, accel=view.accel.to(torch.float64) / factor), decisions)
        message = f"judged without a factor of {factor:.4g}, whose inverse stands beside it"
        again[name] = [replace(m, detail={**m.detail, "message": message}) for m in scaled]
    kept = [m for m in found if m.subject not in factors or m.metric not in AGAIN]
    return [*kept, *(m for measurements in again.values() for m in measurements)]


def execution_order(oracle: Trace, places: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return each tap's place in execution order; one that `places` does not know stands with the tap before it."""
    order: dict[str, int] = {}
    last = 0
    for i, name in enumerate(oracle.taps):
        last = i if places is None else places.get(name, last)
        order[name] = last
    return order


def _isolated(run: Run, tap: Tap) -> bool:
    """Say whether a run says something about a tap: a replay about what its level isolates, a free run about layers."""
    if tap.kind in EXACT_KINDS or tap.kind in DECISION_KINDS:
        return True
    return level_of(tap.name) <= max(1, run.level)


def _unobservable(name: str, scope: Scope) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in scope.unobservable)


def _compare_tap(scene: Scene, tap: Tap, decisions: Mapping[str, Decision]) -> list[Measurement]:
    if tap.kind in EXACT_KINDS:
        return compare_exact(scene, tap)
    if tap.kind in DECISION_KINDS:
        shown = decisions[tap.name].accel is not None
        return judge_decision(scene, tap.name, decisions) if shown else [shapes_differ(scene, tap)]
    views = _views(scene, tap)
    if isinstance(views, Measurement):
        return [views]
    if not scene.run.level and scene.run.dtype:
        return []  # values of a free run are judged in the declared precision; this one is there to be replayed
    if tap.kind == "logits" and not scene.run.level:
        return compare_logits(scene, views)
    return _values(scene, views, decisions)


def _views(scene: Scene, tap: Tap) -> Views | Measurement:
    """Bring one tap of all sides into the oracle's shape."""
    expected = scene.oracle.tensors[tap.name]
    raw = scene.accel.tensors[tap.name]
    fitting = raw[..., : expected.shape[-1]] if tap.kind == "logits" else raw  # wider ones are judged as padding
    actual = like(fitting, scene.accel.taps[tap.name], other=expected, other_tap=tap)
    if actual is None:
        return shapes_differ(scene, tap)
    floors = []
    for trace in scene.floors:
        if tap.name in trace.tensors:
            floor = like(trace.tensors[tap.name], trace.taps[tap.name], other=expected, other_tap=tap)
            if floor is not None:
                floors.append((trace, floor))
    views = Views(tap=tap, oracle=expected, floors=[floor for _, floor in floors], accel=actual)
    return in_one_order(scene, views, [trace for trace, _ in floors])


def _values(scene: Scene, views: Views, decisions: Mapping[str, Decision]) -> list[Measurement]:
    """Compare a real-valued tap on the tokens whose decisions agree."""
    sides = sides_of(scene, views, decisions)
    if not isinstance(sides, Sides):
        return [] if sides is None else [sides]
    if not scene.run.level:
        ratio = median_ratio(token=sides.errors.error[0], floor=sides.floor)
        return [number(scene, sides.tap, "accumulated_ratio", ratio, len(sides.rows))]
    buckets = int(scene.run.options.get("buckets", BUCKETS))
    by_token = token_ratios(sides)
    samples = samples_of(actual=sides.actual, floors=sides.floors, expected=sides.expected, ratio=by_token)
    ratios = error_ratios(
        token=sides.errors.error[0], channel=sides.errors.column[0], floor=sides.floor, samples=samples,
        heads=sides.heads, tokens=sides.tokens, rows=sides.rows, buckets=buckets,
    )  # fmt: skip
    total, width = views.oracle.numel() // sides.expected.shape[1], sides.expected.shape[1]
    if sides.tokens:
        ratios += rank_slices(
            ranks=scene.run.layout.tp, rows=len(sides.rows), channel=sides.errors.column[0], floor=sides.floor.channel
        )
        ratios += further_slices(
            run=scene.run, tap=sides.tap, rows=sides.rows, total=total, width=width, token=by_token, samples=samples,
            grid=grid_of(scene.oracle),
        )  # fmt: skip
    found = [_ratio(scene, sides.tap, r) for r in ratios]
    if not sides.tokens or sides.tap.kind != "hidden":
        return found
    found += [_effect(scene, sides.tap, e) for e in effects_of(sides)]
    slopes = slopes_of(sides, buckets=buckets)
    parts = parts_of(scene.oracle, sides.tap.name)
    if parts is not None and len(parts[0]) == total:
        slopes += expert_slopes(sides, parts=parts[0], owner=parts[1])
    return found + [_slope(scene, sides.tap, s) for s in slopes]


def _ratio(scene: Scene, tap: Tap, ratio: Ratio) -> Measurement:
    told = number(scene, tap, "error_ratio", ratio.value, ratio.n, **_slice(ratio.slice, ratio.at))
    return replace(told, detail={"message": ratio.says}) if ratio.says else told


def _slope(scene: Scene, tap: Tap, slope: Slope) -> Measurement:
    told = number(scene, tap, "slope_beyond_noise", slope.beyond, slope.n, **_slice(slope.slice, slope.at))
    return replace(told, detail={"slope": slope.value, "standard_error": slope.error})


def _effect(scene: Scene, tap: Tap, effect: Effect) -> Measurement:
    detail = {"effect": effect.value, **({"message": effect.says} if effect.beyond else {})}
    told = number(scene, tap, effect.metric, effect.beyond, effect.n, **_slice(effect.slice, effect.at))
    return replace(told, detail=detail)


def _slice(name: str, at: object) -> dict[str, object]:
    return {"slice": name} if at is None else {"slice": name, name: at}


def _lost(
    stage: str,
    run: Run,
    side: Trace | Failure | None,
    who: str,
    *,
    oracle: Trace | None = None,
    scope: Scope | None = None,
    places: Mapping[str, int] | None = None,
) -> list[Measurement]:
    """Measure a run that did not end as missing: tap by tap where the promised taps are known."""
    assert not isinstance(side, Trace)
    message = f"{who}: {side.kind}: {side.message}" if side is not None else f"{who} has no trace of this run"
    told = {"last_tap": side.last_tap, "kind": side.kind} if side is not None else {"last_tap": "", "kind": ""}
    detail = {"message": message, **told}
    if oracle is None or scope is None:
        metrics = ("error_ratio",) if run.level else ("accumulated_ratio", "logits_kl_ratio", "exact_mismatches")
        return [measured(stage, run, m, None, subject="*", problem="error", detail=detail) for m in metrics]
    order = execution_order(oracle, places)
    return [
        measured(
            stage, run, promised(run, tap), None, subject=name, order=order[name], kind=tap.kind, problem="error",
            detail=detail,
        )
        for name, tap in oracle.taps.items()
        if is_mandatory(tap) and _isolated(run, tap) and not _unobservable(name, scope)
    ]  # fmt: skip
