"""Runs and measurements that several stages share: a free run, its replays, phases. Must not know limits or files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.compare import compare_run, coverage, execution_order
from harness.stages import FLOORS, StageContext, StageView
from harness.types import Case, Measurement, Run, Trace

LAYERS_ONLY = (
    "inputs.*", "embed", "merged", "layers.[0-9]", "layers.[0-9][0-9]", "layers.[0-9][0-9][0-9]", "*.topk", "*.topk.*",
    "*mask", "norm", "logits",
)  # fmt: skip
"""Taps that a free run of a long prompt keeps, and its layer replays overwrite."""


def free_and_replays(context: StageContext, stage: str, case: Case, *, suffix: str = "", dtype: str = "") -> list[Run]:
    """Plan a free run of a case and its replays: layers, their children, the smallest units; in `dtype` if given.

    The layer and the leaf replay also pin decisions, so every token counts; the middle one does not, so that values are
    seen behind the port's own choices too.
    """
    free = f"{stage}/free{suffix}"
    runs = [Run(id=free, stage=stage, kind="forward", case=case, dtype=dtype)]
    for level, pinned in ((1, True), (2, False), (3, True)):
        runs.append(
            Run(
                id=f"{stage}/replay{level}{suffix}",
                stage=stage,
                kind="forward",
                case=case,
                level=level,
                pin=free,
                pin_role=pin_role(context),
                pin_decisions=pinned,
                dtype=dtype,
            )
        )
    return runs


def phase(
    context: StageContext,
    stage: str,
    name: str,
    case: Case,
    spans: Sequence[tuple[int, int]],
    *,
    suffix: str = "",
    before: tuple[int, ...] = (),
    compare_from: int = 0,
    dtype: str = "",
    walk: Mapping[str, Any] | None = None,
) -> Run:
    """Plan a request in steps over one cache, each layer replayed: the cache is built from pinned values as well."""
    return Run(
        id=f"{stage}/{name}{suffix}",
        stage=stage,
        kind="steps",
        case=case,
        steps=tuple(spans),
        level=1,
        pin=f"{stage}/free{suffix}",
        pin_role=pin_role(context),
        pin_decisions=True,
        before=before,
        dtype=dtype,
        options={"phase": name, "compare_from": compare_from, **(walk or {})},
    )


def pin_role(context: StageContext) -> str:
    """Return whose values are replayed: the oracle's, or the port's own where it cannot go on with foreign tensors."""
    return "oracle" if context.scope.replay else "accel"


def measure_runs(view: StageView, stage: str, runs: Iterable[Run]) -> list[Measurement]:
    """Compare observed runs of kinds forward and steps with the oracle, tap by tap."""
    found: list[Measurement] = []
    runs = list(runs)
    whole = [t for run in runs if run.kind == "forward" and isinstance(t := view.trace("oracle", run.id), Trace)]
    places = execution_order(max(whole, key=lambda t: len(t.taps))) if whole else None
    for run in runs:
        if run.kind in ("forward", "steps") and run.observe:
            floors = [t for key in FLOORS if isinstance(t := view.trace(key, run.id), Trace)]
            oracle = view.trace("oracle", run.id)
            if isinstance(oracle, Trace) and not run.level:
                found += coverage(stage, run, oracle)
            found += compare_run(
                stage=stage,
                run=run,
                oracle=oracle,
                floors=floors,
                accel=view.trace("accel", run.id),
                scope=view.context.scope,
                dtype=run.dtype or view.context.dtype,
                places=places,
                heads=view.context.info.heads,
            )
    return found


def spans_of(length: int, stops: Sequence[int]) -> list[tuple[int, int]]:
    """Return consecutive spans that end at `stops` and at `length`."""
    inner = [s for s in stops if 0 < s < length]
    return list(zip([0, *inner], [*inner, length], strict=True))
