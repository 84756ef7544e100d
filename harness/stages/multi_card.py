"""Does the port say the same on several cards as on one? Knows runs, traces and facts; must not know limits.

Communication first: every collective must be exact before anything that was computed with it is worth a look. Splits
simulated in one process need none and stand by themselves; then real ranks: every rank's taps are held against the one
oracle of a single card, and replicated values against each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.cases import text_case
from harness.compare import compare_run, execution_order, is_mandatory
from harness.metrics.collectives import merge_shards, unequal_elements
from harness.stages import FLOORS, StageContext, StageView, loss, measured
from harness.stages.image import two_pictures
from harness.taps import matches
from harness.types import Failure, Layout, Measurement, Run, Trace

NAME = "multi_card"
NEEDS: tuple[str, ...] = ("multi_card",)

_LENGTH_TOKENS = 19
_NEW_TOKENS = 4
SIMULATED_LEVELS, RANK_LEVELS = (0, 1, 3), (0, 1)


def plan(context: StageContext) -> list[Run]:
    """Return the runs: each claimed layout simulated; then, in one world, collectives and each rank of each layout."""
    layouts = [layout for layout in context.scope.layouts if layout.world_size > 1]
    world = max((layout.world_size for layout in layouts), default=0)
    length = max(2, min(_LENGTH_TOKENS, context.scope.max_length_tokens - _NEW_TOKENS))
    case = text_case(context.info, length, seed=3)
    runs: list[Run] = []
    levels = SIMULATED_LEVELS if context.scope.replay else (0, 1)
    for layout in layouts:
        base = Run(id=f"{NAME}/simulated-{layout}", stage=NAME, kind="simulate", case=case, layout=layout)
        runs += [_replayed(base, level) for level in levels]
        if context.scope.image:
            # a tower is split as well; the request is the image stage's, so its goldens are there
            picture = replace(base, id=f"{NAME}/simulated-pictures-{layout}", case=two_pictures(context.info))
            runs += [_replayed(picture, level) for level in (0, 1)]
    runs += [
        Run(id=f"{NAME}/collectives-r{rank}", stage=NAME, kind="collectives", options={"rank": rank})
        for rank in range(world)
    ]
    for layout in layouts:
        for rank in range(layout.world_size):
            base = Run(
                id=f"{NAME}/ranks-{layout}-r{rank}",
                stage=NAME,
                kind="ranks",
                case=case,
                layout=layout,
                options={"rank": rank, "new_tokens": _NEW_TOKENS},
            )
            runs += [_replayed(base, level) for level in RANK_LEVELS]
    return runs


def _replayed(run: Run, level: int) -> Run:
    return replace(run, id=f"{run.id}-L{level}", level=level, pin=run.id) if level else run


def measure(view: StageView) -> list[Measurement]:
    """Measure collectives, simulated splits and ranks; after a wrong collective the ranks count as not measured."""
    found = list(_collectives(view))
    wrong = next((m for m in found if m.problem or m.value != 0), None)
    for run in view.runs:
        if run.kind == "simulate":
            found += _compared(view, run, view.trace("oracle", run.id), view.trace("accel", run.id), {"rank": "all"})
    groups: dict[tuple[Layout, int], list[Run]] = {}
    for run in view.runs:
        if run.kind == "ranks":
            groups.setdefault((run.layout, run.level), []).append(run)
    for runs in groups.values():
        found += _ranks(view, runs, wrong)
    return found


def _collectives(view: StageView) -> Iterator[Measurement]:
    """Return the wrong elements of every collective on every rank."""
    for run in view.runs:
        if run.kind != "collectives":
            continue
        rank, trace = run.options["rank"], view.trace("accel", run.id)
        if not isinstance(trace, Trace):
            yield _lost(run, trace, "collective_wrong_elements", "collectives")
            continue
        checks = trace.facts["checks"]
        if not checks:
            detail = {"message": "the backend supports none of the collectives", **trace.facts["unsupported"]}
            yield _measured(run, "collective_wrong_elements", None, "collectives", problem="empty", detail=detail)
        for check in checks:
            where = {"rank": rank, "dtype": check["dtype"], "count": check["count"]}
            detail = {"message": f"first wrong element: {check['first']}"} if "first" in check else {}
            yield _measured(
                run, "collective_wrong_elements", check["wrong"], f"collectives.{check['operation']}",
                n=check["elements"], where=where, detail=detail,
            )  # fmt: skip


def _ranks(view: StageView, runs: Sequence[Run], wrong: Measurement | None) -> list[Measurement]:
    """Compare the ranks of one layout at one level: each with the oracle, then with each other."""
    oracle = view.trace("oracle", runs[0].id)
    traces = {run.id: view.trace("accel", run.id) for run in runs}
    if wrong is not None:
        why = wrong.detail.get("message") or f"{wrong.value} wrong elements"
        message = f"not looked at: {wrong.subject} on rank {wrong.where.get('rank', '?')} is not right ({why})"
        traces = {run.id: Failure(run=run.id, kind="refused", message=message) for run in runs}
    present = {run.id: t for run in runs if isinstance(t := traces[run.id], Trace)}
    found: list[Measurement] = []
    if isinstance(oracle, Trace):
        present = _whole(runs, present, oracle)
    for run in runs:
        rank = {"rank": run.options["rank"]}
        trace: Trace | Failure | None = present.get(run.id) or traces[run.id]
        expected = oracle
        if isinstance(oracle, Trace) and isinstance(trace, Trace) and run.layout.pp > 1:
            expected = _only(oracle, [t for t in oracle.taps if t in trace.tensors])
        found += _compared(view, run, expected, trace, rank)
    if len(present) < len(runs):
        lost = next(run for run in runs if run.id not in present)
        found += [_lost(lost, traces[lost.id], metric, "*") for metric in ("rank_disagreements", "rank_missing")]
    elif isinstance(oracle, Trace):
        found += _disagreements(runs, present, execution_order(oracle, _places(view)))
        found.append(_missing(view, runs, present, oracle))
    return found


def _whole(runs: Sequence[Run], traces: Mapping[str, Trace], oracle: Trace) -> dict[str, Trace]:
    """Put tensors that each rank recorded in part together; every rank that holds a part gets the whole."""
    result = dict(traces)
    for name in oracle.taps:
        holders = [run.id for run in runs if run.id in traces and name in traces[run.id].tensors]
        size = oracle.tensors[name].numel()
        parts = [traces[i].tensors[name] for i in holders]
        if len(parts) < 2 or all(p.numel() == size for p in parts):
            continue
        whole = merge_shards(parts, shape=tuple(oracle.tensors[name].shape))
        if whole is not None:
            for i in holders:
                result[i] = replace(result[i], tensors={**result[i].tensors, name: whole})
    return result


def _only(trace: Trace, names: Sequence[str]) -> Trace:
    """Return the part of a trace that one pipeline stage can show."""
    return replace(trace, taps={n: trace.taps[n] for n in names}, tensors={n: trace.tensors[n] for n in names})


def _places(view: StageView) -> dict[str, int] | None:
    """Return one execution order for all runs of this stage, whatever taps each of them kept: the longest run's."""
    free = [run for run in view.runs if run.kind in ("simulate", "ranks") and not run.level]
    whole = [t for run in free if isinstance(t := view.trace("oracle", run.id), Trace)]
    return execution_order(max(whole, key=lambda t: len(t.taps))) if whole else None


def _compared(
    view: StageView,
    run: Run,
    oracle: Trace | Failure | None,
    accel: Trace | Failure | None,
    where: Mapping[str, Any],
) -> list[Measurement]:
    floors = [t for role in FLOORS if isinstance(t := view.trace(role, run.id), Trace)]
    found = compare_run(
        stage=NAME,
        run=run,
        oracle=oracle,
        floors=floors,
        accel=accel,
        scope=view.context.scope,
        dtype=view.context.dtype,
        places=_places(view),
        heads=view.context.info.heads,
    )
    return [replace(m, where={**m.where, **where, "split": run.kind}) for m in found]


def _disagreements(
    runs: Sequence[Run], traces: Mapping[str, Trace], places: Mapping[str, int]
) -> Iterator[Measurement]:
    """Count the elements in which a rank's copy of a tensor differs from the first rank's copy, bit for bit."""
    for name, order in places.items():
        holders = [run for run in runs if name in traces[run.id].tensors]
        copies = [(run, traces[run.id].tensors[name]) for run in holders]
        first = copies[0][1] if copies else None
        if first is None or len(copies) < 2:
            continue
        counts = {run.options["rank"]: unequal_elements(actual=t, expected=first) for run, t in copies[1:]}
        rank = max(counts, key=lambda r: counts[r])
        yield _measured(
            runs[0], "rank_disagreements", counts[rank], name, order=order, n=first.numel(), where={"rank": rank}
        )
    tokens = {str(run.options["rank"]): traces[run.id].facts.get("token_ids") for run in runs}
    if any(ids is not None for ids in tokens.values()):
        differing = [rank for rank, ids in tokens.items() if ids != tokens[str(runs[0].options["rank"])]]
        yield _measured(
            runs[0], "rank_disagreements", len(differing), "generate", order=1 + max(places.values(), default=0),
            where={"rank": differing[0] if differing else 0}, detail={"token_ids": tokens},
        )  # fmt: skip


def _missing(view: StageView, runs: Sequence[Run], traces: Mapping[str, Trace], oracle: Trace) -> Measurement:
    """Count the promised taps that no rank recorded, and without pipeline stages those that some rank left out."""
    promised = [
        name
        for name, tap in oracle.taps.items()
        if is_mandatory(tap)
        and not (view.context.scope.unobservable and matches(name, view.context.scope.unobservable))
    ]
    split = runs[0].layout.pp > 1
    lost = []
    for name in promised:
        absent = [run.options["rank"] for run in runs if name not in traces[run.id].tensors]
        if absent and (not split or len(absent) == len(runs)):
            lost.append(f"{name} on rank {', '.join(map(str, absent))}")
    detail = {"message": "; ".join(lost[:20])} if lost else {}
    return _measured(runs[0], "rank_missing", len(lost), "*", n=len(promised), detail=detail)


def _lost(run: Run, side: Trace | Failure | None, metric: str, subject: str) -> Measurement:
    """Return a promised number that could not be taken, because a run did not end."""
    assert not isinstance(side, Trace)
    message = f"{side.kind}: {side.message}" if side is not None else "there is no trace of this run"
    detail = {"message": message, **loss(side)}
    where = {"rank": run.options["rank"]}
    return _measured(run, metric, None, subject, problem="error", where=where, detail=detail)


def _measured(
    run: Run, metric: str, value: float | None, subject: str, *, where: Mapping[str, Any] | None = None, **rest: Any
) -> Measurement:
    place = {"layout": str(run.layout), "level": run.level, "split": run.kind, **(where or {})}
    return measured(NAME, run, metric, value, subject, where=place, **rest)
