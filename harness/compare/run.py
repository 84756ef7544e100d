"""One run of one case: every tap that the oracle has, compared. Knows taps and records; must not know limits."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness.compare.align import as_rows, broadcastable, like
from harness.compare.decisions import Decision, agreeing, conditions, decisions_of, judge_decision
from harness.compare.equivalent import in_one_order, moved_factors, suspects
from harness.compare.isolation import not_isolated
from harness.compare.slopes import Sides, Slope, expert_slopes, parts_of, slopes_of
from harness.compare.subject import Scene, Views, measured
from harness.compare.values import SMALLEST_SLICE, error_ratios, floor_of, median_ratio
from harness.metrics.discrete import valid_candidates
from harness.metrics.distributions import kl_nats, padding_probability, top1_agreement
from harness.metrics.real import all_finite, has_signal, mismatches, rel_rms_error, widened
from harness.taps import DECISION_KINDS, EXACT_KINDS, level_of
from harness.types import Failure, Measurement, Run, Scope, Tap, Trace

BUCKETS = 8
"""Position buckets by default; a run's option `buckets` overrides it."""
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
                found.append(_problem(scene, tap, "missing", "the port did not record it"))
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
    kept = [m for m in found if m.subject not in factors or m.metric not in ("error_ratio", "slope_beyond_noise")]
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
        return _exact(scene, tap)
    if tap.kind in DECISION_KINDS:
        if decisions[tap.name].accel is None:
            shape = tuple(scene.accel.tensors[tap.name].shape)
            return [_problem(scene, tap, "error", _shapes(shape, tuple(scene.oracle.tensors[tap.name].shape)))]
        return judge_decision(scene, tap.name, decisions)
    views = _views(scene, tap)
    if isinstance(views, Measurement):
        return [views]
    if not scene.run.level and scene.run.dtype:
        return []  # values of a free run are judged in the declared precision; this one is there to be replayed
    if tap.kind == "logits" and not scene.run.level:
        return _logits(scene, views)
    return _values(scene, views, decisions)


def _views(scene: Scene, tap: Tap) -> Views | Measurement:
    """Bring one tap of all sides into the oracle's shape."""
    expected = scene.oracle.tensors[tap.name]
    raw = scene.accel.tensors[tap.name]
    fitting = raw[..., : expected.shape[-1]] if tap.kind == "logits" else raw  # wider ones are judged as padding
    actual = like(fitting, scene.accel.taps[tap.name], other=expected, other_tap=tap)
    if actual is None:
        return _problem(scene, tap, "error", _shapes(tuple(raw.shape), tuple(expected.shape)))
    floors = []
    for trace in scene.floors:
        if tap.name in trace.tensors:
            floor = like(trace.tensors[tap.name], trace.taps[tap.name], other=expected, other_tap=tap)
            if floor is not None:
                floors.append(floor)
    return in_one_order(scene, Views(tap=tap, oracle=expected, floors=floors, accel=actual))


def _values(scene: Scene, views: Views, decisions: Mapping[str, Decision]) -> list[Measurement]:
    """Compare a real-valued tap on the tokens whose decisions agree."""
    tap = views.tap
    expected = as_rows(views.oracle, tap)
    actual, floors = as_rows(views.accel, tap).values, [as_rows(f, tap).values for f in views.floors]
    values = expected.values
    if tap.kind == "scores":  # masked candidates have no value; where the port masks is judged with the decision
        valid = valid_candidates(values)
        actual, values = torch.where(valid, actual, 0.0), torch.where(valid, values, 0.0)
        floors = [torch.where(valid, f, 0.0) for f in floors]
    keep = _kept(scene, tap, decisions, values.shape[0]) if expected.tokens else torch.arange(values.shape[0])
    if keep is None:
        return []
    actual, values, *floors = (widened(_rows_of(v, keep)) for v in (actual, values, *floors))
    if values.numel() < min(SMALLEST_SLICE, expected.values.numel()):
        return [_problem(scene, tap, "too_few", f"decisions agree on {len(keep)} of {len(expected.values)} tokens")]
    silent = _without_signal(scene, tap, actual, values, floors)
    if silent is not None:
        return [silent]
    floor = floor_of(floors=floors, expected=values, dtype=getattr(torch, scene.dtype))
    if not scene.run.level:
        ratio = median_ratio(actual=actual, expected=values, floor=floor)
        return [_number(scene, tap, "accumulated_ratio", ratio, len(keep))]
    buckets = int(scene.run.options.get("buckets", BUCKETS))
    ratios = error_ratios(
        actual=actual, expected=values, floor=floor, heads=expected.heads, tokens=expected.tokens, rows=keep,
        buckets=buckets,
    )  # fmt: skip
    found = [
        _number(scene, tap, "error_ratio", r.value, r.n, slice=r.slice, **({} if r.at is None else {r.slice: r.at}))
        for r in ratios
    ]
    if not expected.tokens or tap.kind != "hidden":
        return found
    sides = Sides(actual=actual, expected=values, floors=floors, weight=floor.weight)
    slopes = slopes_of(sides, heads=expected.heads or _core_heads(scene, tap, values), rows=keep, buckets=buckets)
    parts = parts_of(scene.oracle, tap.name)
    if parts is not None and len(parts[0]) == len(expected.values):
        slopes += expert_slopes(sides, parts=_rows_of(parts[0], keep), owner=_rows_of(parts[1], keep))
    return found + [_slope(scene, tap, s) for s in slopes]


def _rows_of(values: Tensor, keep: Tensor) -> Tensor:
    return values if len(keep) == len(values) else values[keep]


def _core_heads(scene: Scene, tap: Tap, values: Tensor) -> int:
    """Return the number of heads whose outputs, side by side, are the input of an output projection; else 0."""
    core = tap.name.endswith(".attn.core")
    return scene.heads if core and scene.heads and values.shape[-1] % scene.heads == 0 else 0


def _slope(scene: Scene, tap: Tap, slope: Slope) -> Measurement:
    where = {"slice": slope.slice, **({} if slope.at is None else {slope.slice: slope.at})}
    detail = {"slope": slope.value, "standard_error": slope.error}
    return measured(
        scene.stage, scene.run, "slope_beyond_noise", slope.beyond, subject=tap.name, order=scene.order[tap.name],
        n=slope.n, kind=tap.kind, where=where, detail=detail,
    )  # fmt: skip


def _kept(scene: Scene, tap: Tap, decisions: Mapping[str, Decision], count: int) -> Tensor | None:
    """Return the tokens to compare, or None where already the floors leave too few to say anything."""
    mask = torch.arange(count) >= scene.first_token
    names = conditions(scene, tap.name, decisions) if scene.run.level else []
    agree, honest = agreeing(names, decisions), agreeing(names, decisions, floors_only=True)
    if agree is not None and honest is not None and agree.shape == mask.shape:
        if int((mask & honest).sum()) * 4 < int(mask.sum()):
            return None
        mask = mask & agree
    return mask.nonzero().reshape(-1)


def _without_signal(
    scene: Scene, tap: Tap, actual: Tensor, expected: Tensor, floors: Sequence[Tensor]
) -> Measurement | None:
    """Return what is to be said instead of a ratio where oracle or floor cannot carry one."""
    if not all_finite(expected):
        return _problem(scene, tap, "error", "the oracle's value is not finite: the reference cannot be judged by")
    if not all(all_finite(f) for f in floors):
        return _problem(
            scene, tap, "error", "the floor's value is not finite: the reference overflows in this precision"
        )
    zero = not has_signal(expected) and not any(has_signal(f) for f in floors)
    if zero and actual.any() and torch.isfinite(actual).all():
        return _problem(scene, tap, "no_signal", "the expected value is zero everywhere, the port's is not")
    return None


def _logits(scene: Scene, views: Views) -> list[Measurement]:
    """Compare the distributions of a free run. The floor is never below rounding the oracle's own logits.

    The ratio is one of medians over tokens, as of accumulated values: one route that flips honestly, in a short prompt,
    moves a mean by hundreds.
    """
    rows = [as_rows(t, views.tap).values[scene.first_token :] for t in (views.oracle, views.accel, *views.floors)]
    expected, actual, floors = rows[0], rows[1], rows[2:]
    rounded = expected.to(getattr(torch, scene.dtype))
    kl = kl_nats(actual=actual, expected=expected)
    floor_kls = torch.stack([kl_nats(actual=f, expected=expected) for f in (rounded, *floors)])
    n = int(expected.shape[0])
    floor_top1 = min((top1_agreement(actual=f, expected=expected) for f in floors), default=1.0)
    ratio = float(kl.quantile(0.5) / floor_kls.quantile(0.5, dim=1).max())
    top1 = top1_agreement(actual=actual, expected=expected)
    whole = scene.accel.tensors[views.tap.name]
    return [
        _number(scene, views.tap, "padding_probability", _padding(whole, expected), whole.numel()),
        _number(scene, views.tap, "logits_kl_ratio", ratio, n, token=int(kl.argmax())),
        _number(scene, views.tap, "kl_nats_per_token", float(kl.mean()), n, floor=float(floor_kls.mean(dim=1).max())),
        _number(scene, views.tap, "top1_agreement", top1, n, floor=floor_top1),
    ]  # fmt: skip


def _padding(logits: Tensor, expected: Tensor) -> float:
    """Return what the port gives to columns beyond the reference's vocabulary (padded for tiles or shards)."""
    return padding_probability(logits.reshape(-1, logits.shape[-1]), vocab=expected.shape[-1])


def _exact(scene: Scene, tap: Tap) -> list[Measurement]:
    """Compare by equality: ids, positions, grids, masks. Real-valued inputs (pixels) by their relative error."""
    expected, raw = scene.oracle.tensors[tap.name], scene.accel.tensors[tap.name]
    actual = like(raw, scene.accel.taps[tap.name], other=expected, other_tap=tap)
    if actual is None and not raw.is_floating_point():
        actual = broadcastable(raw, expected)
    if actual is None:
        return [_problem(scene, tap, "error", _shapes(tuple(raw.shape), tuple(expected.shape)))]
    if tap.kind == "mask":
        actual, expected = _allows(actual), _allows(expected)
    elif expected.is_floating_point():
        return [
            _number(scene, tap, "input_rel_rms_error", rel_rms_error(actual=actual, expected=expected), actual.numel())
        ]
    return [_number(scene, tap, "exact_mismatches", mismatches(actual=actual, expected=expected), actual.numel())]


def _allows(mask: Tensor) -> Tensor:
    """Return a mask as booleans: additive masks allow where nothing very negative is added."""
    return valid_candidates(mask) if mask.is_floating_point() else mask != 0


def _number(scene: Scene, tap: Tap, metric: str, value: float, n: int, **where: object) -> Measurement:
    return measured(
        scene.stage, scene.run, metric, value, subject=tap.name, order=scene.order[tap.name], n=n, kind=tap.kind,
        where=where,
    )  # fmt: skip


def _problem(scene: Scene, tap: Tap, problem: str, message: str) -> Measurement:
    return measured(
        scene.stage, scene.run, _promised(scene.run, tap), None, subject=tap.name, order=scene.order[tap.name],
        kind=tap.kind, problem=problem, detail={"message": message},
    )  # fmt: skip


def _promised(run: Run, tap: Tap) -> str:
    """Return the metric that a tap's comparison would have led to."""
    if tap.kind in EXACT_KINDS:
        return "exact_mismatches"
    if tap.kind in DECISION_KINDS:
        return "decision_margin_z" if run.level else "agreeing_share"
    if run.level:
        return "error_ratio"
    return "logits_kl_ratio" if tap.kind == "logits" else "accumulated_ratio"


def _shapes(found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    return f"expected the shape {expected} of the reference, found {found}"


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
            stage, run, _promised(run, tap), None, subject=name, order=order[name], kind=tap.kind, problem="error",
            detail=detail,
        )
        for name, tap in oracle.taps.items()
        if is_mandatory(tap) and _isolated(run, tap) and not _unobservable(name, scope)
    ]  # fmt: skip
