"""One architecture in one process: goldens once, then ports recorded, judged and explained. Knows stages and the gate.

What each role does is decided by `harness.schedule`, what it records by `harness.runs`, as in a worker. Must not know
which injection a port carries.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import gate
from harness.adapter import Adapter, capabilities
from harness.cases import read_model_info
from harness.checklist import Checklists
from harness.diagnose import diagnose
from harness.errors import PortError
from harness.faults.catalogue import NoPlace
from harness.plan import declared, out_of_judgement, out_of_scope
from harness.plugins import open_adapter, parse_spec
from harness.recorder import Pins
from harness.runs import Bench, execute, opened
from harness.schedule import ORACLE_OF, Job, Schedule, make_schedule, resolved
from harness.stages import FLOORS, StageContext, StageView, stage_module
from harness.types import Failure, Finding, Measurement, Run, Setup, Status, Tap, Trace, Verdict

STAGES = ("load", "text", "image", "long_context")
"""What is proved in one process on one card, in the order of a verification."""
UNTIMED = ("latency",)
"""Kinds of runs whose numbers are the machine's."""
TIMED = ("decode_latency_", "decode_jitter_", "load_peak_")
"""Metrics of such runs, and of a load whose module was there before."""

Traces = dict[Path, Trace | Failure]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is proved on: a checkpoint, who is believed, and the SPEC of an unbroken port of it.

    `precision` is what the port declares beside its dtype.
    """

    name: str
    checkpoint: Path
    reference: str
    accel: str
    dtype: str = "bfloat16"
    precision: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One gated stage of one port."""

    stage: str
    status: Status
    reason: str
    verdicts: tuple[Verdict, ...]
    findings: tuple[Finding, ...]

    @property
    def accepted(self) -> bool:
        """Say whether the stage was accepted."""
        return self.status is Status.PASSED

    def broken(self) -> list[str]:
        """Return the ids of the blocking criteria that were not passed."""
        bad = [v for v in self.verdicts if v.criterion.blocking and v.status not in (Status.PASSED, Status.SKIPPED)]
        return [v.criterion.id for v in bad]


Ports = Callable[[Setup], Bench]
"""Gives the loaded port of a setup, the same one each time: a stage may ask for more than one precision."""


@dataclass(slots=True)
class Lab:
    """The goldens of one subject, and what is needed to hold a port against them. `setup` is the port's."""

    subject: Subject
    checklists: Checklists
    context: StageContext
    setup: Setup
    runs: Mapping[str, tuple[Run, ...]]
    schedule: Schedule
    goldens: Traces = field(default_factory=dict)
    benches: dict[str, Bench] = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)

    # --- goldens ---

    def record_goldens(self, stage: str) -> None:
        """Record oracle and floors of one stage, once."""
        if stage in self.recorded:
            return
        ids = {run.id for run in self.runs[stage]}
        wanted = {folder for (role, run), folder in self.schedule.folders.items() if run in ids and role != "accel"}
        for role in ("oracle", "floor"):
            for job in self.schedule.jobs:
                if job.role.partition("_")[0] == role and job.folder in wanted and job.folder not in self.goldens:
                    self._do(self._reference(job.setup), job, self.goldens)
        self.recorded.add(stage)

    def _reference(self, setup: Setup) -> Bench:
        key = f"{setup.role} {setup.dtype}"
        if key not in self.benches:
            adapter = open_adapter(parse_spec(self.subject.reference), self.subject.checkpoint, setup)
            self.benches[key] = loaded(adapter, self.subject.checkpoint, setup)
        return self.benches[key]

    def taps(self) -> dict[str, Tap]:
        """Return the places of the model: what the oracle's free runs of text and pictures show."""
        found: dict[str, Tap] = {}
        for stage in ("text", "image"):
            if stage in self.runs:
                self.record_goldens(stage)
                trace = self.goldens[self.schedule.folders["oracle", f"{stage}/free"]]
                found |= trace.taps if isinstance(trace, Trace) else {}
        return found

    # --- a port ---

    def record(self, ports: Ports, stage: str, into: Traces, only: str = "") -> None:
        """Record what a stage (or one run of it) asks of a port; what it raises becomes a Failure."""
        self.record_goldens(stage)
        ids = {run.id for run in self.runs[stage]}
        for job in self.schedule.of("accel"):
            if job.run.id in ids and (not only or job.run.id == only) and job.run.kind not in UNTIMED:
                self._do(ports(job.setup), job, into)

    def _do(self, bench: Bench, job: Job, into: Traces) -> None:
        known = {**self.goldens, **into}
        pins = known.get(job.pins) if job.pins is not None else None
        expected = known.get(job.expected) if job.expected is not None else None
        told = expected if isinstance(expected, Trace) else None
        dtype = job.run.dtype or self.context.dtype
        into[job.folder] = found = recorded(bench, job.run, pins_of(job.run, pins, dtype), told)
        if isinstance(found, Failure) and job.role != "accel":
            raise PortError(f"{self.subject.name}: the {job.role} cannot do {found.run}: {found.message}")

    def trace(self, traces: Traces) -> Callable[[str, str], Trace | Failure | None]:
        """Return how a stage looks up the traces of a port and of the reference."""

        def look(role: str, run: str) -> Trace | Failure | None:
            folder = self.schedule.folders.get((role, run))
            return None if folder is None else traces.get(folder, self.goldens.get(folder))

        return look

    def judge(self, stage: str, traces: Traces) -> Judged:
        """Measure and gate one stage of a port, and explain what failed."""
        runs = [run for run in self.runs[stage] if run.kind not in UNTIMED]
        view = StageView(context=self.context, runs=runs, trace=self.trace(traces))
        measurements: list[Measurement] = list(stage_module(stage).measure(view))
        criteria = [c for c in self.checklists.by_stage[stage] if not c.metric.startswith(TIMED)]
        verdicts, _ = gate.judge(
            criteria=criteria,
            measurements=measurements,
            in_scope=lambda word: self._out_of_scope(word, view),
            today=datetime.date.today(),
        )
        status, reason = gate.stage_status(verdicts)
        findings = diagnose(
            gate.breaking(verdicts, measurements), view.trace, floors=FLOORS, info=self.context.info, modules={},
            reproduce="", measured=measurements,
        )  # fmt: skip
        return Judged(
            stage=stage, status=status, reason=reason, verdicts=tuple(verdicts), findings=tuple(findings)
        )  # fmt: skip

    def _out_of_scope(self, word: str, view: StageView) -> str:
        context = self.context
        oracles = [t for run in view.runs if isinstance(t := view.trace("oracle", run.id), Trace)]
        return out_of_judgement(word, context.info, context.scope, context.capabilities, oracles=oracles)

    def close(self) -> None:
        """Let the reference go."""
        for bench in self.benches.values():
            bench.adapter.close()
        self.benches.clear()


def make_lab(subject: Subject, checklists: Checklists) -> Lab:
    """Plan the runs of a subject as a verification would; nothing is recorded yet."""
    setups = {
        "oracle": _setup(subject, "reference", "oracle", ORACLE_OF[subject.dtype]),
        "floor": _setup(subject, "reference", "floor", subject.dtype),
        "accel": _setup(subject, "accel", "accel", subject.dtype),
    }
    reference = open_adapter(parse_spec(subject.reference), subject.checkpoint, setups["oracle"])
    port = open_adapter(parse_spec(subject.accel), subject.checkpoint, setups["accel"])
    capable = frozenset(capabilities(port))
    scope = declared(port.scope, subject.precision)
    context = StageContext(
        info=read_model_info(subject.checkpoint),
        scope=scope,
        capabilities=frozenset(c for c in capable if not out_of_scope(c, scope, capable)),
        reference_capabilities=frozenset(capabilities(reference)),
        profile="quick",
        dtype=subject.dtype,
    )
    runs = {
        name: tuple(replace(run, stage=name) for run in stage_module(name).plan(context))
        for name in STAGES
        if not any(out_of_scope(need, scope, capable) for need in stage_module(name).NEEDS)
    }
    lab = Lab(
        subject=subject,
        checklists=checklists,
        context=context,
        setup=setups["accel"],
        runs=runs,
        schedule=_schedule(context, setups, runs),
    )
    return _searched(lab, setups)


def _schedule(context: StageContext, setups: Mapping[str, Setup], runs: Mapping[str, tuple[Run, ...]]) -> Schedule:
    return make_schedule(
        [run for name in runs for run in runs[name]],
        setups=setups,
        replay=context.scope.replay,
        reference_phased="phases" in context.reference_capabilities,
        goldens=Path("goldens"),
        traces=Path("traces"),
    )


def _searched(lab: Lab, setups: Mapping[str, Setup]) -> Lab:
    """Let the reference search for the token ids of cases that say so; drop runs that have nothing new to show."""
    found: dict[str, tuple[int, ...]] = {}
    for stage in lab.runs:
        for run in lab.runs[stage]:
            if run.kind == "search":
                job = next(j for j in lab.schedule.jobs if j.folder == lab.schedule.folders["oracle", run.id])
                trace = execute(lab._reference(job.setup), job.run, pins=None, expected=None)
                found[f"search:{run.id}"] = tuple(trace.facts["token_ids"])
    runs = {name: resolved(planned, found) for name, planned in lab.runs.items()}
    return replace(lab, runs=runs, schedule=_schedule(lab.context, setups, runs))


def _setup(subject: Subject, side: str, role: str, dtype: str) -> Setup:
    spec = subject.reference if side == "reference" else subject.accel
    precision = {} if role == "oracle" else subject.precision
    options = dict(parse_spec(spec).options)
    return Setup(side=side, role=role, adapter=spec, dtype=dtype, precision=precision, options=options)


def loaded(adapter: Adapter, checkpoint: Path, setup: Setup) -> Bench:
    """Load an adapter."""
    facts = opened(adapter, checkpoint, setup)
    return Bench(adapter=adapter, setup=setup, checkpoint=checkpoint, load_facts=facts, beat=lambda _: None)


def pins_of(run: Run, source: Trace | Failure | None, dtype: str) -> Pins | None:
    """Return the values that a run replays, or None for a free one."""
    import torch

    if not run.level or not isinstance(source, Trace):
        return None
    return Pins(
        tensors=source.tensors, taps=source.taps, level=run.level, dtype=getattr(torch, dtype),
        decisions=run.pin_decisions, jitter=run.jitter,
    )  # fmt: skip


def recorded(bench: Bench, run: Run, pins: Pins | None, expected: Trace | None) -> Trace | Failure:
    """Do one run; whatever the port raises becomes a Failure that keeps the exception's name."""
    try:
        return execute(bench, run, pins=pins, expected=expected)
    except Exception as error:  # the side under test may raise anything
        return Failure(run=run.id, kind="raised", message=f"{type(error).__name__}: {error}")


def tried(inject: Callable[[Any], Any], place: Any) -> tuple[tuple[str, ...], str]:
    """Inject, and return the places that are named and what went wrong. Raises NoPlace."""
    try:
        return tuple(inject(place) or ()), ""
    except NoPlace:
        raise
    except Exception as error:  # the model under test may be built in any way
        return (), f"{type(error).__name__}: {error}"
