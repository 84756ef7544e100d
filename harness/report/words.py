"""How numbers, places and verdicts are put into words. Knows Results; must not know any output format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.report.results import Results, StageReport
from harness.types import Finding, Measurement, Status, Verdict

TITLES = {
    "load": "Load", "startup": "Startup", "text": "Text", "image": "Image",
    "multi_card": "Multi-card", "long_context": "Long context",
}  # fmt: skip
FILES = {name: f"{i:02d}-{name.replace('_', '-')}.md" for i, name in enumerate(TITLES, start=1)}
_SELECTORS = frozenset({"level", "kind", "tap_level", "slice"})  # for criteria to select on, not a place
_USUAL = {"phase": "prefill", "layout": "single", "precision": "declared"}
_BAD = (Status.FAILED, Status.ERROR, Status.INCONCLUSIVE)
_GENEROUS = ("_over_plan", "_over_promise", "op_error_ratio")


def number(value: float | None) -> str:
    """Return a number as a person reads it: integers whole, others with four significant digits."""
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.4g}"


def value_text(measurement: Measurement | None) -> str:
    """Return the value, or why there is none."""
    if measurement is None:
        return "not measured"
    if measurement.value is None:
        return str(measurement.detail.get("non_finite") or measurement.problem or "not measured")
    return number(measurement.value)


def limit_text(verdict: Verdict) -> str:
    """Return the promise as an inequality, the limit at the worst measurement's n."""
    limit = verdict.criterion.limit if verdict.limit is None else verdict.limit
    return f"{verdict.criterion.op} {number(limit)}"


def pairs(mapping: Mapping[str, Any]) -> str:
    """Return `token 17, head 3`."""
    return ", ".join(f"{k} {number(v) if isinstance(v, float) else v}" for k, v in mapping.items())


def where_text(measurement: Measurement | None) -> str:
    """Return subject and slice of a measurement: `layers.2.attn (token 17)`; what is as usual is left out."""
    if measurement is None:
        return "-"
    shown = {
        k: v for k, v in measurement.where.items()
        if k not in _SELECTORS and v is not None and _USUAL.get(k) != v
    }  # fmt: skip
    subject = "the whole run" if measurement.subject == "*" else measurement.subject
    return f"{subject} ({pairs(shown)})" if shown else subject


def usage(verdict: Verdict) -> float:
    """Return how much of its limit a verdict's worst value takes: 1 is at the limit, infinity is without a value."""
    worst, limit, op = verdict.worst, verdict.limit, verdict.criterion.op
    if worst is None or worst.value is None or limit is None:
        return float("inf") if verdict.status in _BAD else 0.0
    value = worst.value
    if op in ("==", "!="):
        return 0.0 if verdict.status in (Status.PASSED, Status.SKIPPED) else float("inf")
    over, under = (value, limit) if op in ("<=", "<") else (limit, value)
    if under > 0 and over >= 0:
        return over / under
    return 0.0 if over <= under else float("inf")


def worst_verdict(stage: StageReport) -> Verdict | None:
    """Return the verdict to show first: of the first finding's place, else the one that used its limit most.

    Memory against a plan, and an operator against the bound of its formula, are shown only where they fail: how much of
    them was used says little.
    """
    judged = [v for v in stage.verdicts if v.status not in (Status.SKIPPED, Status.BLOCKED)]
    bad = [v for v in judged if v.status in _BAD and v.criterion.blocking]
    telling = [v for v in judged if v.criterion.blocking and not v.criterion.metric.endswith(_GENEROUS)]
    pool = bad or telling or [v for v in judged if v.criterion.blocking] or judged
    if not pool:
        return None
    if bad and stage.findings:
        tap, told = stage.findings[0].tap, stage.findings[0].message
        declared = [v for v in bad if v.worst is None or v.worst.where.get("precision", "declared") == "declared"]
        pool = declared or bad
        spoken_of = [v for v in pool if told.startswith(f"{v.criterion.metric} of ")]  # its worst may be elsewhere
        pool = [v for v in pool if v.worst is not None and v.worst.subject == tap] or spoken_of or pool
    return max(pool, key=usage)


def bad_verdicts(stage: StageReport) -> list[Verdict]:
    """Return the blocking verdicts that refuse a stage, in the checklist's order."""
    return [v for v in stage.verdicts if v.status in _BAD and v.criterion.blocking]


def counts(stage: StageReport) -> str:
    """Return `7 passed, 1 failed, 2 skipped`."""
    tally: dict[str, int] = {}
    for verdict in stage.verdicts:
        word = verdict.status.value.lower()
        tally[word] = tally.get(word, 0) + 1
    return ", ".join(f"{n} {word}" for word, n in tally.items()) or "no criteria"


def first_place(stage: StageReport) -> str:
    """Return the first divergent tap with the port's own name for it, or what failed where there is no tap."""
    if stage.findings:
        return place(stage.findings[0])
    bad = bad_verdicts(stage)
    return where_text(bad[0].worst) if bad else ""


def place(finding: Finding) -> str:
    """Return a finding's tap, with the port's module where it is called otherwise."""
    own = f" (in the port: {finding.module})" if finding.module and finding.module != finding.tap else ""
    return f"{'the whole run' if finding.tap == '*' else finding.tap}{own}"


def place_label(stage: StageReport) -> str:
    """Return what the first place of a stage is called: weights and requests are no taps."""
    return "first wrong place" if stage.name in ("load", "startup") else "first divergent tap"


def stage_sentence(stage: StageReport) -> str:
    """Return the verdict on a stage as one sentence."""
    title = TITLES.get(stage.name, stage.name)
    if stage.status is Status.PASSED:
        waived = sum(v.status is Status.WAIVED for v in stage.verdicts)
        also = f" {waived} of them by a waiver." if waived else ""
        blocking = sum(v.criterion.blocking and v.status in (Status.PASSED, Status.WAIVED) for v in stage.verdicts)
        kept = (
            "its one blocking criterion in scope holds"
            if blocking == 1
            else f"all {blocking} blocking criteria in scope hold"
        )
        return f"{title} is accepted: {kept}.{also}"
    if stage.status is Status.SKIPPED:
        return f"{title} was not checked: {(stage.reason or 'it is outside the declared scope').rstrip('.')}."
    if stage.status is Status.BLOCKED:
        return f"{title} was not run: {(stage.reason or 'an earlier stage was not accepted').rstrip('.')}."
    bad = bad_verdicts(stage)
    where = f"; the first wrong place is {first_place(stage)}" if first_place(stage) else ""
    if stage.status is Status.ERROR:
        why = stage.reason or (bad[0].reason if bad else "something promised was not measured")
        return f"{title} is refused, because it could not be judged: {why.rstrip('.')}{where}."
    if stage.status is Status.INCONCLUSIVE:
        why = stage.reason or (bad[0].reason if bad else "there were too few samples or no signal")
        return f"{title} is not accepted, because the evidence does not decide it: {why.rstrip('.')}."
    ids = ", ".join(v.criterion.id for v in bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
    return f"{title} is refused: {ids or stage.reason or 'a blocking criterion'} did not hold{where}."


def run_sentence(results: Results) -> str:
    """Return the verdict on a run as one sentence, and of a cut model another that says so."""
    sentence = _verdict(results)
    return f"{sentence} Verified was {results.cut['sentence']}, not the model." if results.cut else sentence


def _verdict(results: Results) -> str:
    names = [TITLES[s.name].lower() for s in results.stages if s.accepted and s.name in TITLES]
    if results.accepted:
        return f"The port is accepted for what was claimed and exercised: {', '.join(names)}{_reservations(results)}."
    refused = results.first_refused
    if refused is not None and any(v.criterion.metric == "index_problems" for v in bad_verdicts(refused)):
        return f"The checkpoint is damaged or incomplete, so nothing is said of the port. {stage_sentence(refused)}"
    if refused is not None:
        return f"The port is not accepted. {stage_sentence(refused)}"
    if results.problems:
        return f"The port is not accepted: {results.problems[0]}"
    skipped = [s for s in results.stages if s.status is Status.SKIPPED]
    if names:
        return f"The port is not accepted: a required stage was not checked ({', '.join(s.name for s in skipped)})."
    return "Nothing was verified: no stage is in scope."


def _reservations(results: Results) -> str:
    skipped = [TITLES[s.name].lower() for s in results.stages if s.status is Status.SKIPPED and s.name in TITLES]
    parts = [f"not checked: {', '.join(skipped)}"] if skipped else []
    if results.partial:
        parts.append(f"a partial run{': ' + results.partial_reason if results.partial_reason else ''}")
    return f" ({'; '.join(parts)})" if parts else ""
