"""Measurements and criteria -> verdicts. Knows limits; must not know traces, stages' code or how numbers came about."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import date

from harness.types import Criterion, Measurement, Status, Verdict, Waiver

_PROBLEMS = {
    "missing": Status.ERROR,
    "error": Status.ERROR,
    "empty": Status.ERROR,
    "no_signal": Status.INCONCLUSIVE,
    "too_few": Status.INCONCLUSIVE,
    "statistics": Status.INCONCLUSIVE,
}
_SEVERITY = (Status.FAILED, Status.ERROR, Status.INCONCLUSIVE, Status.PASSED)


def limit_at(criterion: Criterion, n: int) -> float:
    """Return the limit for a slice of n samples; the slack always widens what is allowed."""
    slack = criterion.per_sqrt_n / math.sqrt(max(1, n))
    return criterion.limit - slack if criterion.op == ">=" else criterion.limit + slack


def margin_of(criterion: Criterion, measurement: Measurement) -> float:
    """Return how far inside its limit a value is (negative: outside; NaN for a NaN value)."""
    value, limit = measurement.value, limit_at(criterion, measurement.n)
    if value is None:
        return math.nan
    if criterion.op == "<=":
        return limit - value
    return value - limit if criterion.op == ">=" else 0.0 - abs(value - limit)


def status_of(criterion: Criterion, measurement: Measurement) -> Status:
    """Return the status of one measurement. A unit other than the criterion's is an ERROR."""
    if measurement.problem or measurement.value is None:
        return _PROBLEMS.get(measurement.problem, Status.ERROR)
    if measurement.unit != criterion.unit:
        return Status.ERROR
    return Status.PASSED if margin_of(criterion, measurement) >= 0 else Status.FAILED


def covers(criterion: Criterion, measurement: Measurement) -> bool:
    """Say whether a criterion is about a measurement.

    A measurement with a problem lacks the keys that only a value would have (which slice?), so it is covered by every
    criterion that could have been about it.
    """
    if measurement.metric != criterion.metric or measurement.stage != criterion.stage:
        return False
    broken = bool(measurement.problem)
    if not _glob(measurement.subject, criterion.subject) and not (broken and measurement.subject == "*"):
        return False
    known = {**measurement.where, "case": measurement.case, "run": measurement.run}
    return all(
        _glob(str(known[key]), glob) if key in known else broken for key, glob in criterion.select.items()
    )  # fmt: skip


def _glob(text: str, globs: str) -> bool:
    """Match a text against globs separated by `|`."""
    return globs == "*" or any(fnmatch.fnmatchcase(text, glob) for glob in globs.split("|"))


def failing(criterion: Criterion, measurements: Iterable[Measurement]) -> list[Measurement]:
    """Return what breaks a criterion, in execution order, the deepest unit first among equals."""
    broken = [m for m in measurements if covers(criterion, m) and status_of(criterion, m) is not Status.PASSED]
    return sorted(broken, key=lambda m: (m.order, -int(m.where.get("tap_level", 0))))


def breaking(verdicts: Iterable[Verdict], measurements: Sequence[Measurement]) -> list[tuple[Criterion, Measurement]]:
    """Return what breaks each verdict that neither passed, nor was skipped or waived, with the promise it breaks."""
    standing = (Status.PASSED, Status.SKIPPED, Status.WAIVED)
    return [
        (v.criterion, m) for v in verdicts if v.status not in standing for m in failing(v.criterion, measurements)
    ]  # fmt: skip


def judge(
    *,
    criteria: Sequence[Criterion],
    measurements: Sequence[Measurement],
    in_scope: Callable[[str], str],
    waivers: Sequence[Waiver] = (),
    today: date,
) -> tuple[list[Verdict], list[str]]:
    """Judge every promise, and list the measurements that no promise covers.

    `in_scope` returns the reason why a word of `needs` is out of scope, or an empty string. The verdicts are those of
    `criteria` in order, then one failed verdict for each waiver that is expired or matches nothing.
    """
    by_metric: dict[str, list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        by_metric[measurement.metric].append(measurement)
    verdicts, extra = [], []
    covered: set[int] = set()
    for criterion in criteria:
        about = [m for m in by_metric[criterion.metric] if covers(criterion, m)]
        covered.update(id(m) for m in about)
        reason = "; ".join(filter(None, (in_scope(word) for word in criterion.needs)))
        if reason:
            verdicts.append(Verdict(criterion=criterion, status=Status.SKIPPED, reason=reason))
            continue
        own = [w for w in waivers if w.criterion == criterion.id]
        verdict, unused = _judge_one(criterion, about, own, today)
        verdicts.append(verdict)
        extra += unused
    return verdicts + extra, _unjudged(m for m in measurements if id(m) not in covered)


def _judge_one(
    criterion: Criterion, about: Sequence[Measurement], waivers: Sequence[Waiver], today: date
) -> tuple[Verdict, list[Verdict]]:
    if not about:
        reason = f"promised but not measured: no {criterion.metric} for {criterion.subject}{_selected(criterion)}"
        return Verdict(criterion=criterion, status=Status.ERROR, reason=reason), _refused(criterion, waivers, (), today)
    broken = [m for m in about if status_of(criterion, m) is not Status.PASSED]
    valid = [w for w in waivers if date.fromisoformat(w.expires) >= today]
    waived = [w for w in valid if any(_glob(m.subject, w.subject) for m in broken)]
    left = [m for m in broken if not any(_glob(m.subject, w.subject) for w in waived)]
    worst = _worst(criterion, left or broken or about)
    status = min((status_of(criterion, m) for m in left), key=_SEVERITY.index, default=Status.PASSED)
    reason = _reason(criterion, worst)
    if broken and not left:
        status, reason = Status.WAIVED, "; ".join(f"waived by {w.owner} until {w.expires}: {w.link}" for w in waived)
    return Verdict(
        criterion=criterion,
        status=status,
        worst=worst,
        limit=limit_at(criterion, worst.n),
        margin=margin_of(criterion, worst) if worst.value is not None else None,
        count=len(about),
        failed=len(broken),
        reason=reason,
    ), _refused(criterion, waivers, waived, today)


def _worst(criterion: Criterion, measurements: Sequence[Measurement]) -> Measurement:
    """Return the worst measurement: by status, then NaN, then the smallest margin relative to the limit."""

    def rank(m: Measurement) -> tuple[int, float]:
        margin = margin_of(criterion, m)
        scale = abs(limit_at(criterion, m.n)) or 1.0
        return _SEVERITY.index(status_of(criterion, m)), -math.inf if math.isnan(margin) else margin / scale

    return min(measurements, key=rank)


def _reason(criterion: Criterion, worst: Measurement) -> str:
    if worst.problem or worst.value is None:
        return f"{worst.problem or 'no value'}: {worst.detail.get('message', worst.subject)} ({worst.subject})"
    if worst.unit != criterion.unit:
        return f"expected the unit {criterion.unit!r} for {criterion.metric}, found {worst.unit!r}"
    if not math.isfinite(worst.value):
        return f"not finite at {worst.subject}"
    return ""


def _selected(criterion: Criterion) -> str:
    return "".join(f", {key} {glob}" for key, glob in criterion.select.items())


def _refused(criterion: Criterion, waivers: Sequence[Waiver], used: Sequence[Waiver], today: date) -> list[Verdict]:
    """Return a failed verdict for each waiver that is expired or waives nothing: both hide what the checklist says."""
    found = []
    for waiver in waivers:
        if waiver in used:
            continue
        expired = date.fromisoformat(waiver.expires) < today
        what = f"expired on {waiver.expires}" if expired else "matches nothing that fails; remove it"
        promise = dataclasses.replace(
            criterion,
            id=f"waiver:{waiver.criterion}:{waiver.subject}",
            blocking=True,
            core=False,
            why="a waiver is an exception with an owner and an end; a stale one hides the next failure",
        )
        reason = f"the waiver of {waiver.criterion} for {waiver.subject} by {waiver.owner} ({waiver.link}) {what}"
        found.append(Verdict(criterion=promise, status=Status.FAILED, reason=reason))
    return found


def _unjudged(measurements: Iterable[Measurement]) -> list[str]:
    groups: dict[str, list[Measurement]] = defaultdict(list)
    for m in measurements:
        groups[f"{m.metric} in {m.run}" if m.run else m.metric].append(m)
    lines = []
    for name, group in sorted(groups.items()):
        subjects = sorted({m.subject for m in group})
        more = f" and {len(subjects) - 3} more" if len(subjects) > 3 else ""
        lines.append(f"{name}: {', '.join(subjects[:3])}{more}")
    return lines


def stage_status(verdicts: Sequence[Verdict]) -> tuple[Status, str]:
    """Return a stage's status and the reason. PASSED is the only accepted one.

    A stage passes when at least one blocking criterion is in scope and all of those are PASSED or WAIVED. A core
    criterion cannot be scoped out while the stage is claimed.
    """
    blocking = [v for v in verdicts if v.criterion.blocking]
    judged = [v for v in blocking if v.status is not Status.SKIPPED]
    bad = [v for v in judged if v.status not in (Status.PASSED, Status.WAIVED)]
    for status in (Status.FAILED, Status.ERROR, Status.INCONCLUSIVE):
        hit = [v for v in bad if v.status is status]
        if hit:
            return status, f"{len(bad)} of {len(judged)} blocking criteria, first {hit[0].criterion.id}"
    core = [v for v in verdicts if v.criterion.core and v.status is Status.SKIPPED]
    if core:
        return Status.ERROR, f"core criterion {core[0].criterion.id} cannot be scoped out: {core[0].reason}"
    if bad:
        return Status.ERROR, f"unexpected status of {bad[0].criterion.id}: {bad[0].status.value}"
    if not judged:
        return Status.ERROR, "no blocking criterion is in scope, so nothing would be proved"
    waived = sum(v.status is Status.WAIVED for v in judged)
    return Status.PASSED, f"{len(judged)} blocking criteria" + (f", {waived} waived" if waived else "")
