"""Two folders of traces against each other, no model needed (`day0 compare`). Knows traces, compare and gate.

Traces of both folders are paired by what was asked (input, replay level), not by name: goldens and runs lie under
different names. What has no counterpart is an ERROR.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from harness import gate
from harness.checklist import load_checklists
from harness.compare import compare_run
from harness.diagnose import explain
from harness.errors import TraceError
from harness.golden import load_trace
from harness.report.results import Environment, Results, build_results
from harness.types import STAGES, Criterion, Measurement, Scope, StageResult, Trace, as_json, digest_of

_COMPARABLE = ("forward", "steps", "simulate", "ranks", "generate")
_COMPARED = ("exact_mismatches", "input_rel_rms_error", "error_ratio", "accumulated_ratio", "logits_kl_ratio")
_DECIDED = ("decision_margin_z", "decision_flips_excess", "decision_size_mismatches", "decision_outside_valid")


def compare_dirs(actual: Path, expected: Path, checklists: Path | None = None) -> Results:
    """Judge the traces in `actual` by those in `expected`. Raises TraceError for an unreadable or empty folder."""
    promises = load_checklists(checklists)
    ours = [t for t in _traces(actual) if t.run.kind in _COMPARABLE and t.run.kind != "generate"]
    theirs = [t for t in _traces(expected) if t.run.kind in _COMPARABLE]
    if not ours:
        raise TraceError(f"expected traces of forwards in {actual}, found none; name a folder that `day0` recorded")
    oracles, floors = _answers(theirs)
    by_stage: dict[str, list[Measurement]] = defaultdict(list)
    for trace in ours:
        stage = trace.run.stage if trace.run.stage in STAGES else "text"
        key = _question(trace)
        measured = compare_run(
            stage=stage,
            run=trace.run,
            oracle=oracles.get(key),
            floors=[f for f in floors[key] if _phased(f) == _phased(trace)] or floors[key],
            accel=trace,
            scope=Scope(),
            dtype=trace.setup.dtype,
        )
        by_stage[stage] += measured
    stages = [_judged(stage, by_stage[stage], promises, actual, expected) for stage in STAGES if stage in by_stage]
    missing = "" if any(floors.values()) else "no floor was recorded: every value is held to half an ulp of the port"
    return build_results(
        stages,
        claimed={"traces": str(actual)},
        not_covered=[s for s in ("load and startup: traces hold neither", missing) if s],
        environment=Environment(digests={"checklists": promises.digest}),
        questions=promises.questions,
        partial=True,
        partial_reason="traces alone were compared",
        command=f"day0 compare {actual} {expected}",
        started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def _traces(folder: Path) -> list[Trace]:
    manifests = sorted(folder.rglob("manifest.json")) if folder.is_dir() else []
    if not manifests:
        raise TraceError(f"expected recorded traces below {folder}, found no manifest.json; `day0 record` makes some")
    return [load_trace(m.parent) for m in manifests]


def _question(trace: Trace) -> str:
    """Return what a trace answers: the input, the replay level, whether decisions were given."""
    run = trace.run
    return digest_of([as_json(run.case) if run.case else None, run.level, run.pin_decisions, list(run.taps)])


def _phased(trace: Trace) -> Any:
    return (trace.run.steps, trace.run.before) if trace.run.kind == "steps" else None


def _answers(traces: Iterable[Trace]) -> tuple[dict[str, Trace], dict[str, list[Trace]]]:
    """Return the oracle and the floors by question. Where no trace says `oracle`, every trace stands for one."""
    traces = [t for t in traces if t.run.kind != "generate"]
    named = any(t.setup.role == "oracle" for t in traces)
    oracles: dict[str, Trace] = {}
    floors: dict[str, list[Trace]] = defaultdict(list)
    for trace in traces:
        if trace.setup.role == "floor":
            floors[_question(trace)].append(trace)
        elif trace.setup.role == "oracle" or not named:
            oracles.setdefault(_question(trace), trace)
    return oracles, floors


def _judged(
    stage: str, measurements: Sequence[Measurement], promises: Any, actual: Path, expected: Path
) -> StageResult:
    criteria = [c for c in promises.by_stage[stage] if _told(c, measurements)]
    verdicts, unjudged = gate.judge(
        criteria=criteria, measurements=measurements, in_scope=lambda _: "", today=datetime.date.today()
    )
    reproduce = f"day0 compare {actual} {expected}"
    verdicts = [dataclasses.replace(v, reproduce=reproduce) for v in verdicts]
    status, reason = gate.stage_status(verdicts)
    bad = [(c, m) for c in criteria for m in gate.failing(c, measurements)]
    findings = explain(bad, modules={}, reproduce=reproduce)
    return StageResult(
        name=stage,
        status=status,
        reason=reason,
        verdicts=tuple(verdicts),
        findings=tuple(findings),
        unjudged=tuple(unjudged),
    )


def _told(criterion: Criterion, measurements: Sequence[Measurement]) -> bool:
    """Say whether traces can say something about a criterion: memory, tokens, weights are not promised here."""
    known = criterion.metric in (*_COMPARED, *_DECIDED)
    return known and any(gate.covers(criterion, m) for m in measurements)
