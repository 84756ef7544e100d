"""Does memory hold what the checkpoint says? Knows runs and facts; must not know limits, files or how an audit is done.

Three things are measured: the checkpoint by itself and the memory of the load, every byte read once (`content`), and
the weights that the port holds (`weights`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.checkpoint import checkpoint_facts
from harness.metrics.memory import peak_over_plan
from harness.precision.scheme import parse_precision
from harness.stages import StageContext, StageView, loss, measured
from harness.stages.content import CONTENT_METRICS, content_of, told
from harness.stages.conversion import CONVERSION_METRICS, conversion_of
from harness.stages.tables import tables_of
from harness.stages.weights import WEIGHT_METRICS, or_none_found, weights_of
from harness.types import Failure, Measurement, Run, Trace

NAME = "load"
NEEDS: tuple[str, ...] = ()
LOAD, CONTENT, WEIGHTS, CONVERSION = "load/load", "load/content", "load/weights", "load/conversion"

_PORT_METRICS = ("load_peak_over_plan",)


def plan(context: StageContext) -> list[Run]:
    """Return one load, one pass over the files, one over the weights that a port shows, one of loads that convert."""
    runs = [Run(id=LOAD, stage=NAME, kind="load"), Run(id=CONTENT, stage=NAME, kind="content")]
    if "weights" in context.capabilities:
        runs.append(Run(id=WEIGHTS, stage=NAME, kind="weights"))
    if "converts" in context.capabilities:
        runs.append(Run(id=CONVERSION, stage=NAME, kind="conversion"))
    return runs


def measure(view: StageView) -> list[Measurement]:
    """Measure the checkpoint, the memory of the load, and every weight. Each metric has at least one measurement."""
    found: list[Measurement] = []
    for run in view.runs:
        accel = view.trace("accel", run.id)
        if not isinstance(accel, Trace):
            found += _lost(run, accel, Path(view.context.info.path))
        elif run.kind == "load":
            found += _load(run, accel)
        elif run.kind == "content":
            found += content_of(run, accel.facts)
        elif run.kind == "conversion":
            found += conversion_of(run, accel.facts)
        else:
            oracle = view.trace("oracle", run.id)
            expected = oracle.facts.get("audit") if isinstance(oracle, Trace) else None
            scope = view.context.scope
            beside = parse_precision(scope.precision)
            loaded = view.trace("accel", LOAD)
            said = loaded.facts if isinstance(loaded, Trace) else None
            found += weights_of(run, accel.facts["audit"], expected, image=scope.image, beside=beside, said=said)
            found += tables_of(run, accel.facts, oracle.facts if isinstance(oracle, Trace) else {})
    return found


def _lost(run: Run, side: Failure | Trace | None, checkpoint: Path) -> list[Measurement]:
    """Measure what needs no port: a shard that is short explains more than a port that could not read it."""
    assert not isinstance(side, Trace)
    who = "the pass over the checkpoint's files" if run.kind == "content" else "the port"
    message = f"{who}: {side.kind}: {side.message}" if side is not None else "the port has no trace of this run"
    own = {"load": _PORT_METRICS, "content": CONTENT_METRICS, "conversion": CONVERSION_METRICS}
    metrics = own.get(run.kind, WEIGHT_METRICS)
    found = _headers(run, checkpoint_facts(checkpoint)) if run.kind == "load" else []
    detail = {"message": message, **loss(side)}
    return [*found, *(measured(NAME, run, m, None, "*", problem="error", detail=detail) for m in metrics)]


# --- the checkpoint and the load ---


def _load(run: Run, trace: Trace) -> list[Measurement]:
    return [*_headers(run, trace.facts["checkpoint"]), _memory(run, trace)]


def _headers(run: Run, facts: Mapping[str, Any]) -> list[Measurement]:
    strays = [p for p in facts["problems"] if p["kind"] == "stray_shard"]
    wrong = [p for p in facts["problems"] if p["kind"] != "stray_shard"]
    result = []
    for metric, problems in (
        ("index_problems", wrong),
        ("stray_shards", strays),
        ("undecodable_tensors", facts.get("undecodable", ())),
    ):
        found = [
            measured(NAME, run, metric, 1.0, p["name"] or p["file"], where={"kind": p["kind"]}, detail=told(p))
            for p in problems
        ]
        result += or_none_found(run, metric, found, max(1, facts["tensors"]))
    return result


def _memory(run: Run, trace: Trace) -> Measurement:
    """Hold the peak of the load against the plan made from headers: a port does not set its own limit.

    One that says that its weights pass through a window is held to the plan of that window, which is the smaller one.
    """
    peak = trace.facts.get("peak_bytes")
    planned = trace.facts["checkpoint"].get("planned_bytes", {}).get(trace.setup.dtype)
    window = trace.facts.get("window_bytes")
    planned = min(planned, window) if planned and isinstance(window, int) and window > 0 else planned
    detail = {"peak_bytes": peak, "planned_bytes": planned, "ports_own_plan_bytes": trace.facts.get("planned_bytes")}
    if peak is None or not planned:
        message = f"expected the peak of the load and a plan for {trace.setup.dtype}, found {peak} and {planned} bytes"
        detail["message"] = message
        return measured(NAME, run, "load_peak_over_plan", None, "load", problem="missing", detail=detail)
    ratio = peak_over_plan(peak_bytes=peak, planned_bytes=planned) if peak else 0.0
    return measured(NAME, run, "load_peak_over_plan", ratio, "load", detail=detail)
