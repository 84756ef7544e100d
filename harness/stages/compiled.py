"""A compiled port against itself uncompiled: a pair of its own. Knows runs and traces; must not know limits."""

from __future__ import annotations

from dataclasses import replace

from harness.compare.pairs import compare_pair
from harness.compare.subject import measured
from harness.stages import FLOORS, StageContext, StageView
from harness.stages.replays import free_and_replays
from harness.types import Case, Failure, Measurement, Run, Trace

SUFFIX = "-eager"


def eager_runs(context: StageContext, stage: str, case: Case) -> list[Run]:
    """Plan the free run and the layer replay of a case once more, uncompiled; the reference's answers are the same."""
    free, layers, _, _ = free_and_replays(context, stage, case, suffix=SUFFIX)
    return [replace(run, options={"eager": True, "phase": "eager"}) for run in (free, layers)]


def compiled_pairs(view: StageView, stage: str) -> list[Measurement]:
    """Weigh what a compiled layer and the same one uncompiled differ by, given one input, against the floor."""
    found: list[Measurement] = []
    for run in (r for r in view.runs if r.options.get("eager") and r.level):
        oracle = view.trace("oracle", run.id)
        compiled, eager = (view.trace("accel", name) for name in (run.id.removesuffix(SUFFIX), run.id))
        if isinstance(oracle, Trace) and isinstance(compiled, Trace) and isinstance(eager, Trace):
            floors = [t for role in FLOORS if isinstance(t := view.trace(role, run.id), Trace)]
            found += compare_pair(
                stage=stage, run=run, oracle=oracle, floors=floors, compiled=compiled, eager=eager,
                dtype=view.context.dtype,
            )  # fmt: skip
            continue
        lost = next((s for s in (oracle, compiled, eager) if isinstance(s, Failure)), None)
        why = f"{lost.kind}: {lost.message}" if lost is not None else "not recorded"
        detail = {"message": f"compiled and uncompiled: {why}"}
        found.append(measured(stage, run, "compiled_ratio", None, subject="*", problem="error", detail=detail))
    return found
