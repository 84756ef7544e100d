"""From failing measurements to the first wrong places. Knows tap names and replay levels; must not know traces.

A replay at level L overwrites every tap of at most that level, so what it measures at a tap is the segment behind the
taps before it. A failure at the deepest level therefore names its place by itself; one of a shallower level counts only
where nothing below that unit failed deeper; accumulated values localise nothing and speak only when nothing else does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.diagnose.causes import ACCUMULATED, BROKEN_OFF, FOREMOST, cause_of
from harness.gate import limit_at
from harness.taps import is_input, layer_of, level_of, unit_of
from harness.types import Criterion, Finding, Measurement

TOP = 5
"""Places that are worth a reader's time; the rest are counted."""

EVIDENCE = 6

Failing = tuple[Criterion, Measurement]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Failing measurements of one place. `tap` is the first in execution order; `order` its position.

    The first `own` of `failing` are of the place itself, the rest of what lies inside and was not isolated from it.
    """

    tap: str
    order: int
    failing: tuple[Failing, ...]
    own: int


def explain(failing: Sequence[Failing], *, modules: Mapping[str, str], reproduce: str) -> list[Finding]:
    """Return findings, the first wrong place in execution order first.

    `failing` pairs each measurement outside its promise with the criterion; `modules` gives the port's own path by tap.
    """
    blocking = [pair for pair in failing if pair[0].blocking] or list(failing)
    lost = [pair for pair in blocking if _is_lost(pair[1])]
    told = [p for p in blocking if not _is_lost(p[1]) and not (lost and p[1].value is None)]
    places = sorted(_split(told), key=lambda p: p.order)
    first = [p for p in places if any(m.metric in FOREMOST for _, m in p.failing)]
    places = [*first, *(p for p in places if p not in first)]
    broke = [pair for pair in lost if pair[1].detail.get("kind") != "refused"]
    leading = len(first) if broke or not places else len(places)  # what was refused follows from what was found
    findings = [_finding(place, modules, reproduce) for place in places[: min(TOP, leading)]]
    findings += _lost_findings(lost if broke or not findings else [], modules, reproduce)
    findings += [_finding(place, modules, reproduce) for place in places[min(TOP, leading) : TOP]]
    if lost and not broke and places:
        runs = ", ".join(sorted({m.run for _, m in lost if m.run}))
        findings[0] = replace(findings[0], evidence=(*findings[0].evidence, f"therefore not measured: {runs}"))
    if len(places) > TOP:
        rest = f"{len(places) - TOP} further places are outside their limits, the last one {places[-1].tap}"
        findings[-1] = replace(findings[-1], evidence=(*findings[-1].evidence, rest))
    return findings


def _is_lost(measurement: Measurement) -> bool:
    """Say whether a whole run was lost, so that each of its taps repeats the same message."""
    return measurement.problem == "error" and "last_tap" in measurement.detail


def _level(measurement: Measurement) -> int:
    level = measurement.where.get("level", 0)
    return int(level) if isinstance(level, (int, float)) else 0


def _split(failing: Sequence[Failing]) -> list[Place]:
    """Group failing measurements by place, keeping of each subtree what was isolated deepest."""
    local = [p for p in failing if p[1].metric not in ACCUMULATED]
    if not local:
        return _accumulated(failing)
    kept: list[Failing] = []
    for level in sorted({_level(m) for _, m in local}, reverse=True):
        deeper = {unit_of(m.subject) for _, m in kept}
        kept += [p for p in local if _level(p[1]) == level and not _explained(p[1], deeper)]
    wrong = {(m.run, unit_of(m.subject)) for _, m in kept if m.metric == "error_ratio"}
    groups: dict[str, list[Failing]] = {}
    for pair in kept:
        outer = _isolated_around(pair[1])
        key = outer if (pair[1].run, outer) in wrong else _group(pair[1])
        groups.setdefault(key, []).append(pair)
    return [_place(group, unit) for unit, group in groups.items()]


def _explained(measurement: Measurement, deeper: Iterable[str]) -> bool:
    """Say whether a place inside the unit, isolated deeper, failed too. Exact values explain themselves."""
    if measurement.metric == "exact_mismatches":
        return False
    unit = unit_of(measurement.subject)
    return any(d.startswith(unit + ".") for d in deeper) or (not is_input(measurement.subject) and unit in set(deeper))


def _group(measurement: Measurement) -> str:
    """Return the key of a place: a unit, or the glue in front of one; a decision goes with what it was chosen by."""
    tap = measurement.subject
    if is_input(tap):
        return tap
    return tap.split(".topk")[0] + (".topk" if ".topk" in tap else "")


def _isolated_around(measurement: Measurement) -> str:
    """Return the unit that a replay isolated around a decision, or an empty string.

    A replay of layers overwrites nothing inside one: what is chosen there follows whatever went wrong before it in the
    layer, so where the layer's value is wrong too, the layer is the place.
    """
    tap, level = measurement.subject, _level(measurement)
    if ".topk" not in tap or not 1 <= level < level_of(tap):
        return ""
    layer = layer_of(tap)
    return ".".join([layer, *tap[len(layer) + 1 :].split(".")[: level - 1]])


def _place(group: Sequence[Failing], unit: str = "") -> Place:
    """Return the place of a group: its unit's own first tap, whose measurements speak before those inside of it."""
    own = [p for p in group if unit_of(p[1].subject) == unit] or list(group)
    first = min(own, key=lambda p: p[1].order)
    inside = [p for p in group if p not in own]
    failing = (*sorted(own, key=_badness), *sorted(inside, key=_badness))
    return Place(tap=first[1].subject, order=first[1].order, failing=failing, own=len(own))


def _accumulated(failing: Sequence[Failing]) -> list[Place]:
    """Return one place where only accumulated values fail: the first tap, which is where to look, not what is wrong."""
    return [_place(failing)] if failing else []


def _badness(pair: Failing) -> tuple[int, bool, float]:
    """Order the worst first: the file itself, what is not finite or measured, what fails in the declared precision."""
    criterion, m = pair
    if m.metric in FOREMOST:
        return (-1, False, 0.0)
    if m.value is None or not math.isfinite(m.value):
        return (0, False, 0.0)
    limit, sharper = limit_at(criterion, m.n), m.where.get("precision", "declared") != "declared"
    return (1, sharper, -(abs(m.value / limit) if limit else abs(m.value)))


def _finding(place: Place, modules: Mapping[str, str], reproduce: str) -> Finding:
    criterion, worst = place.failing[0]
    ratios = [m.value for _, m in place.failing if m.metric == "error_ratio" and m.value is not None]
    return Finding(
        tap=place.tap,
        module=_module(place.tap, modules) or str(worst.detail.get("module", "")),
        op=unit_of(place.tap).rsplit(".", 1)[-1] if not place.tap.startswith("inputs.") else "input",
        cause=cause_of(place.tap, [m for _, m in place.failing[: place.own]]),
        message=_sentence(criterion, worst),
        evidence=tuple(dict.fromkeys(_sentence(c, m) for c, m in place.failing[1:]))[:EVIDENCE],
        residual_ratio=max(ratios, key=lambda v: math.inf if math.isnan(v) else v) if ratios else None,
        reproduce=reproduce,
    )


def _module(tap: str, modules: Mapping[str, str]) -> str:
    """Return the port's own path of a tap or of the nearest unit around it."""
    if tap in modules:
        return modules[tap]
    unit = unit_of(tap)
    while unit:
        if unit in modules:
            return modules[unit]
        unit = unit.rpartition(".")[0]
    return ""


def _sentence(criterion: Criterion, measurement: Measurement) -> str:
    """Return one measurement in words: what, how much, where, and what was promised."""
    m = measurement
    head = f"{m.metric} of {m.subject}"
    if m.value is None:
        return f"{head} was not measured ({m.problem}): {m.detail.get('message', 'no reason given')}{_origin(m)}"
    promised = f"{criterion.op} {limit_at(criterion, m.n):.4g} {m.unit}"
    at = f" at {m.where['slice']} {m.where[m.where['slice']]}" if m.where.get("slice") in m.where else ""
    token = f" at token {m.where['token']}" if not at and "token" in m.where else ""
    value = f"{m.value:.0f}" if m.unit == "count" else f"{m.value:.4g}"
    return f"{head} is {value}{at}{token}, promised {promised}{_origin(m)}{_told(m)}"


def _told(m: Measurement) -> str:
    """Return what a measurement itself says of its value: its message, or what was expected and found."""
    if m.detail.get("message"):
        return f": {m.detail['message']}"
    if "actual" in m.detail and "expected" in m.detail:
        return f": expected {m.detail['expected']}, found {m.detail['actual']}"
    return ""


def _origin(m: Measurement) -> str:
    parts = [f"run {m.run}"] if m.run else []
    parts += [str(m.where["phase"])] if m.where.get("phase") else []
    parts += [str(m.where["layout"])] if m.where.get("layout", "single") != "single" else []
    parts += [f"n {m.n}"] if m.n > 1 else []
    return f" ({', '.join(parts)})" if parts else ""


def _lost_findings(lost: Sequence[Failing], modules: Mapping[str, str], reproduce: str) -> list[Finding]:
    """Return a finding per message of runs that did not end. Runs that never started are told with those that did."""
    groups: dict[str, list[Measurement]] = {}
    for _, m in lost:
        groups.setdefault(str(m.detail.get("message", "")), []).append(m)
    seen = [g for g in groups.values() if any(m.detail.get("last_tap") for m in g)]
    unseen = [g for g in groups.values() if g not in seen]
    if not seen:
        return [_lost_finding(group, modules, reproduce) for group in unseen[:TOP]]
    findings = [_lost_finding(group, modules, reproduce) for group in seen[:TOP]]
    more = sorted({m.run for group in unseen for m in group if m.run})
    if more:
        line = f"therefore not measured: {', '.join(more)}"
        findings[0] = replace(findings[0], evidence=(*findings[0].evidence, line))
    return findings


def _lost_finding(group: Sequence[Measurement], modules: Mapping[str, str], reproduce: str) -> Finding:
    """Return one finding for a run that did not end: its last tap is where it was."""
    message = str(group[0].detail.get("message", ""))
    last = next((str(m.detail["last_tap"]) for m in group if m.detail.get("last_tap")), "")
    runs = sorted({m.run for m in group if m.run})
    subject = last or min(group, key=lambda m: m.order).subject
    after = (
        "look at what runs behind this place" if last else "no tap was reached: loading, or the first step of the run"
    )
    end = next((text for m in group if (text := BROKEN_OFF.get(str(m.detail.get("kind"))))), "")
    return Finding(
        tap=subject,
        module=_module(subject, modules),
        op="" if " " in subject else unit_of(subject).rsplit(".", 1)[-1],
        cause=f"the run broke off, so the rest of it was not seen; {after}{f'; {end}' if end else ''}",
        message=message,
        evidence=(f"runs lost: {', '.join(runs)}",) if runs else (),
        reproduce=reproduce,
    )
