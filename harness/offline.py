"""Two folders of traces against each other, no model needed (`day0 compare`). Knows traces, compare and gate.

Traces of both folders are paired by what was asked (input, replay level), not by name: goldens, runs and recordings of
other engines lie under different names. What has no counterpart is an ERROR.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import gate
from harness.checklist import load_checklists
from harness.compare import compare_run
from harness.compare.run import is_mandatory
from harness.compare.subject import measured
from harness.compare.triage import holds_statistics_alone, triage
from harness.diagnose import diagnose
from harness.errors import TraceError
from harness.golden import load_recordings
from harness.mapping import apply_mapping, proposal_text, propose, read_mapping
from harness.report.results import Environment, Results, build_results
from harness.taps import DECISION_KINDS
from harness.types import STAGES, Failure, Measurement, Scope, StageResult, Trace, digest_of

_COMPARABLE = ("forward", "steps", "simulate", "ranks")


def compare_dirs(
    actual: Path, expected: Path, checklists: Path | None = None, *, mapping: Path | None = None
) -> Results:
    """Judge the traces in `actual` by those in `expected`, the former brought to canonical names by a mapping file.

    Raises TraceError for an unreadable or empty folder, MappingError for a mapping that cannot be used.
    """
    promises = load_checklists(checklists)
    rows = read_mapping(mapping) if mapping is not None else []
    ours = [apply_mapping(t, rows) if rows else t for t in _comparable(actual)]
    theirs = _comparable(expected)
    _check_checkpoint(ours, theirs)
    oracles, floors = _answers(theirs)
    command = f"day0 compare {actual} {expected}" + (f" --map {mapping}" if mapping else "")
    by_stage: dict[str, list[Measurement]] = defaultdict(list)
    extra: set[str] = set()
    coarse: set[str] = set()
    if not any(_asked(trace, oracles) in oracles for trace in ours):
        raise TraceError(f"{_unpaired(ours[0], oracles, expected).message}; record the same token ids on both sides")
    known: dict[tuple[str, str], Trace] = {}
    for trace in ours:
        stage = trace.run.stage if trace.run.stage in STAGES else "text"
        key = _asked(trace, oracles)
        oracle = oracles.get(key)
        known |= _by_role(trace, oracle, floors[key])
        by_stage[stage] += _compared(stage, trace, oracle, oracles, floors[key], expected)
        coarse |= {f.setup.dtype for f in floors[key] if f.setup.dtype != (trace.run.dtype or trace.setup.dtype)}
        extra |= set(trace.tensors) - set(oracle.tensors) if oracle is not None else set()
    stages = [_judged(stage, by_stage[stage], promises, command, known) for stage in STAGES if stage in by_stage]
    unseen = f"{len(extra)} taps of {actual} have no counterpart: {', '.join(sorted(extra)[:8])}" if extra else ""
    other = f"the floor was recorded in {', '.join(sorted(coarse))}, not in the port's precision" if coarse else ""
    missing = "" if any(floors.values()) else "no floor was recorded: every value is held to half an ulp of the port"
    return build_results(
        stages,
        claimed={"traces": str(actual)},
        not_covered=[s for s in ("load and startup: traces hold neither", missing, other, unseen) if s],
        environment=Environment(digests={"checklists": promises.digest}),
        questions=promises.questions,
        partial=True,
        partial_reason="traces alone were compared",
        command=command,
        started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def propose_map(actual: Path, expected: Path) -> str:
    """Return the text of a mapping file for the first request that both folders hold. Raises TraceError."""
    oracles, _ = _answers(_comparable(expected))
    for trace in _comparable(actual):
        oracle = oracles.get(_asked(trace, oracles))
        if oracle is not None and not trace.run.level:
            placed, lost = propose(trace, oracle)
            if not placed:
                raise TraceError(f"none of {len(lost)} expected taps was found in {actual}; nothing can be proposed")
            return proposal_text(placed, lost, trace)
    raise TraceError(f"expected a request that was recorded in both {actual} and {expected}, found none")


def _check_checkpoint(actual: Sequence[Trace], expected: Sequence[Trace]) -> None:
    """Raise TraceError where both sides say which checkpoint they ran, and it is not the same one."""
    ours, theirs = ({d for t in traces if (d := t.provenance.get("checkpoint"))} for traces in (actual, expected))
    if ours and theirs and not ours & theirs:
        a, b = (", ".join(sorted(d[:12] for d in digests)) for digests in (ours, theirs))
        raise TraceError(f"expected traces of one checkpoint, found {a} and {b}; record both sides from the same one")


def _comparable(folder: Path) -> list[Trace]:
    found = [t for t in load_recordings(folder) if t.run.kind in _COMPARABLE and t.run.observe]
    if not found:
        raise TraceError(f"expected traces of forwards in {folder}, found none; name a folder that `day0` recorded")
    return found


def _compared(
    stage: str,
    trace: Trace,
    oracle: Trace | None,
    others: dict[str, Trace],
    floors: Sequence[Trace],
    expected: Path,
) -> list[Measurement]:
    """Measure one trace; one that is empty, or has no counterpart or another kind of values, as a named problem."""
    if oracle is not None and any(holds_statistics_alone(side) for side in (trace, oracle)):
        return triage(stage, trace, oracle, floors)
    if not trace.tensors or (oracle is not None and not oracle.tensors):
        who = "the port's" if not trace.tensors else "the expected"
        return _told(stage, trace, "empty", f"{who} trace {trace.run.id} holds no tensor")
    counterpart: Trace | Failure = _unpaired(trace, others, expected)
    problems: list[Measurement] = []
    if oracle is not None:
        counterpart, problems = _alike(stage, trace, oracle)
    found = compare_run(
        stage=stage,
        run=trace.run,
        oracle=counterpart,
        floors=[f for f in floors if _phased(f) == _phased(trace)] or floors,
        accel=trace,
        scope=Scope(),
        dtype=trace.run.dtype or trace.setup.dtype,
    )
    return [*found, *problems]


def _by_role(trace: Trace, oracle: Trace | None, floors: Sequence[Trace]) -> dict[tuple[str, str], Trace]:
    """Return a trace and what answers it by role and run, as diagnosis looks them up."""
    found = {("accel", trace.run.id): trace}
    if oracle is not None:
        found["oracle", trace.run.id] = oracle
    for floor in [f for f in floors if _phased(f) == _phased(trace)] or floors:
        found[f"floor {len(found)}", trace.run.id] = floor
    return found


def _told(stage: str, trace: Trace, problem: str, message: str, subject: str = "*") -> list[Measurement]:
    metric = "error_ratio" if trace.run.level else "accumulated_ratio"
    detail = {"message": message}
    return [measured(stage, trace.run, metric, None, subject=subject, problem=problem, detail=detail)]


def _alike(stage: str, trace: Trace, oracle: Trace) -> tuple[Trace, list[Measurement]]:
    """Return what can be compared of the oracle, and as problems what cannot.

    Taps that are whole numbers on one side alone, layers whose expected value says nothing, decisions that the port
    does not show: the comparison itself would call some of these a number.
    """
    problems: list[Measurement] = []
    left_out: set[str] = set()
    for name, tap in oracle.taps.items():
        theirs = oracle.tensors[name]
        ours = trace.tensors.get(name)
        if ours is None:
            if tap.kind in DECISION_KINDS:
                problems += _told(stage, trace, "missing", "the port did not record it", name)
        elif ours.is_floating_point() != theirs.is_floating_point() and tap.kind != "mask":
            left_out.add(name)
            message = f"expected values of {theirs.dtype}, found {ours.dtype}: not the same kind of tensor"
            problems += _told(stage, trace, "error", message, name)
        elif is_mandatory(tap) and tap.kind in ("hidden", "logits") and not theirs.any():
            problems += _told(stage, trace, "no_signal", "the expected value is zero everywhere", name)
    kept = [name for name in oracle.taps if name not in left_out]
    if not left_out:
        return oracle, problems
    taps, tensors = {n: oracle.taps[n] for n in kept}, {n: oracle.tensors[n] for n in kept}
    return dataclasses.replace(oracle, taps=taps, tensors=tensors), problems


def _unpaired(trace: Trace, others: dict[str, Trace], expected: Path) -> Failure:
    """Return why a trace has no counterpart, with the nearest thing that is there."""
    count = len(trace.run.case.token_ids or ()) if trace.run.case else 0
    there = sorted({len(o.run.case.token_ids or ()) for o in others.values() if o.run.case})
    lengths = ", ".join(map(str, there)) or "none"
    message = (
        f"no trace in {expected} answers the same input ({count} tokens, replay level {trace.run.level}); there are "
        f"requests of {lengths} tokens"
    )
    return Failure(run=trace.run.id, kind="refused", message=message)


def _asked(trace: Trace, oracles: dict[str, Trace]) -> str:
    """Return what a port's trace answers: in its own precision, where that was recorded, or the declared."""
    own = _question(trace, trace.run.dtype or trace.setup.dtype)
    return own if own in oracles else _question(trace, trace.run.dtype)


def _question(trace: Trace, dtype: str) -> str:
    """Return what a trace answers: the input itself, the replay level, whether decisions were given, the precision."""
    run, case = trace.run, trace.run.case
    asked: list[Any] = [run.level, run.pin_decisions, dtype]
    if case is not None:
        asked += [case.token_ids, case.prompt, case.messages, case.image_at, [i.rgb for i in case.images]]
    return digest_of(asked)


def _phased(trace: Trace) -> Any:
    return (trace.run.steps, trace.run.before) if trace.run.kind == "steps" else None


def _answers(traces: Iterable[Trace]) -> tuple[dict[str, Trace], dict[str, list[Trace]]]:
    """Return the oracle and the floors by question. Where no trace says `oracle`, every trace stands for one.

    Of two answers to one question the one with more taps stands.
    """
    traces = list(traces)
    named = any(t.setup.role == "oracle" for t in traces)
    oracles: dict[str, Trace] = {}
    floors: dict[str, list[Trace]] = defaultdict(list)
    for trace in traces:
        key = _question(trace, trace.run.dtype)
        if trace.setup.role == "floor":
            floors[key].append(trace)
        elif trace.setup.role == "oracle" or not named:
            known = oracles.get(key)
            if known is None or len(trace.tensors) > len(known.tensors):
                oracles[key] = trace
    return oracles, floors


def _judged(
    stage: str,
    measurements: Sequence[Measurement],
    promises: Any,
    reproduce: str,
    known: Mapping[tuple[str, str], Trace],
) -> StageResult:
    criteria = [c for c in promises.by_stage[stage] if any(gate.covers(c, m) for m in measurements)]
    verdicts, unjudged = gate.judge(
        criteria=criteria, measurements=measurements, in_scope=lambda _: "", today=datetime.date.today()
    )
    verdicts = [dataclasses.replace(v, reproduce=reproduce) for v in verdicts]
    status, reason = gate.stage_status(verdicts)
    findings = diagnose(
        gate.breaking(verdicts, measurements), lambda role, run: known.get((role, run)),
        floors=sorted({role for role, _ in known} - {"accel", "oracle"}), modules={}, reproduce=reproduce,
        measured=measurements,
    )  # fmt: skip
    return StageResult(
        name=stage,
        status=status,
        reason=reason,
        verdicts=tuple(verdicts),
        findings=tuple(findings),
        unjudged=tuple(unjudged),
    )
