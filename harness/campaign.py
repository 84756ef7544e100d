"""One verification under way: record goldens, then stage by stage record the port, measure, judge, explain.

Knows every room below; does no numerics itself. What a stage learned is on disk before the next one starts.
"""

from __future__ import annotations

import datetime
import functools
import json
import shlex
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from harness import gate
from harness.checklist import Checklists
from harness.checkpoint.cut import Cut
from harness.checkpoint.scan.manifest import MANIFEST, manifest_text
from harness.config import Config
from harness.diagnose import diagnose
from harness.errors import TraceError, UsageError
from harness.golden import load_failure, read_manifest, save_trace
from harness.passes import passes, record_pass
from harness.plan import Plan, cache_folder, goldens_folder, out_of_judgement
from harness.reading import Reading, state_file
from harness.record import Session, is_current, read_trace, reopened
from harness.record import refuse as refuse_run
from harness.report.results import write_measurements
from harness.report.terminal import Display
from harness.schedule import Job, Schedule, make_schedule, resolved
from harness.stages import FLOORS, StageView, stage_module
from harness.standin import carry, not_carried
from harness.types import (
    STAGES,
    Failure,
    Finding,
    Measurement,
    Setup,
    StageResult,
    Status,
    Trace,
    as_json,
    digest_of,
    from_json,
)
from harness.world import RankJob, run_ranks


def schedule_of(plan: Plan, out: Path) -> Schedule:
    """Return which role does what for a plan, with goldens addressed by the reference and its checkpoint."""
    base = digest_of(
        [plan.digests["checkpoint"], plan.digests["reference"], plan.described["reference"].get("versions")]
    )
    return make_schedule(
        plan.runs(*STAGES),
        setups=plan.setups,
        replay=plan.scope.replay,
        reference_phased="phases" in plan.context.reference_capabilities,
        goldens=goldens_folder(plan.config) / base,
        traces=out / "traces",
    )


def reproduce(config: Config, stage: str = "") -> str:
    """Return the command that repeats a run, or one stage of it."""
    words = ["day0", "verify", "--stage", stage or ",".join(config.run.stage)]
    words += ["--config", str(config.file)] if config.file else []
    words += config.words
    return shlex.join(words)


class Campaign:
    """One verification under way: sessions, schedule, and the stages done so far."""

    def __init__(
        self, plan: Plan, sessions: Mapping[str, Session], checklists: Checklists, display: Display, out: Path
    ) -> None:
        self.plan, self.sessions, self.checklists, self.display, self.out = plan, sessions, checklists, display, out
        self.schedule = schedule_of(plan, out)
        self.partial: list[str] = []
        self.problems: list[str] = []
        self.unread: list[str] = []
        self.lost: dict[Path, Failure] = {}
        self._reading: Reading | None = None
        for side, session in sessions.items():
            digest = plan.digests["port" if side == "accel" else "reference"]
            session.provenance = {"checkpoint": plan.digests["checkpoint"], "code": digest, "spec": session.spec}

    def all(self) -> list[StageResult]:
        """Run the asked stages in order; return a result for each, whatever happened."""
        self._reading = self._begin_reading()
        try:
            return self._all()
        finally:
            if self._reading is not None:
                self._reading.close()

    def _all(self) -> list[StageResult]:
        self.resolve()
        results: list[StageResult] = []
        stages = [name for name in STAGES if name in self.plan.stages or name in self.plan.skipped]
        after = self.plan.config.run.after
        standing = self._check_earlier(after) if after is not None else []
        left = [s for s in STAGES if s not in stages and s not in standing]
        if left:
            self.partial.append(f"stages not asked for: {', '.join(left)}")
        blocked = ""
        for name in stages:
            result = self._stage(name, blocked)
            results.append(result)
            self.display.stage_done(result)
            if not result.accepted and result.status is not Status.SKIPPED and not self.plan.config.run.keep_going:
                blocked = blocked or f"{name} was not accepted ({result.status.value})"
        return results

    def resolve(self) -> None:
        """Search for the token ids of cases that say so, and plan their runs anew; runs that found no more are dropped.

        What a search found is a golden like any other: it is not searched for again, and it travels.
        """
        searches = [j for j in self.schedule.of("oracle") if j.run.kind == "search"]
        if not searches:
            return
        names = {folder: run for (_, run), folder in self.schedule.folders.items()}
        self._record_reference(searches, keep=True)  # its worker goes on with the goldens
        found = {
            f"search:{names[j.folder]}": tuple(trace.facts["token_ids"])
            for j in searches
            if isinstance(trace := self.lost.get(j.folder) or read_trace(j.folder, j.run.id), Trace)
        }
        stages = {name: resolved(runs, found) for name, runs in self.plan.stages.items()}
        self.plan = replace(self.plan, stages=stages)
        self.schedule = schedule_of(self.plan, self.out)
        if not self.plan.scope.replay:
            self.sessions["reference"].close()

    def _check_earlier(self, earlier: Path) -> list[str]:
        """Return the stages that stand by the run named by --after; say of the others why they do not."""
        standing = []
        first = STAGES.index(self.plan.config.run.stage[0])
        for name in STAGES[:first]:
            kept = _read_kept(earlier, name)
            if kept is None:
                self.partial.append(f"{name}: {earlier} holds no result of it")
            elif kept["base"] != self._base_key():
                mine = self._base()
                other = [word for word in mine if kept.get("of", {}).get(word) != mine[word]]
                self.partial.append(
                    f"{name}: its result in {earlier} does not count, for another {' and another '.join(other)}"
                )
            elif (
                not from_json(StageResult, kept["result"]).accepted and kept["result"]["status"] != Status.SKIPPED.value
            ):
                self.problems.append(f"--after {earlier}: {name} was not accepted there")
            else:
                standing.append(name)
        return standing

    def _stage(self, name: str, blocked: str) -> StageResult:
        if name in self.plan.skipped:
            return StageResult(name=name, status=Status.SKIPPED, reason=self.plan.skipped[name])
        if blocked:
            return StageResult(name=name, status=Status.BLOCKED, reason=blocked)
        kept = self._kept(name)
        if kept is not None:
            self.display.note(f"{name}: taken from the run before")
            return from_json(StageResult, kept["result"])
        self.display.stage_started(name)
        begin = time.perf_counter()
        self.record_goldens()
        self._record_accel(name)
        self._end_reading(name)
        result = replace(self._judge(name), wall_s=time.perf_counter() - begin)
        path = self.out / "stages" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        words = {"key": self._key(name), "base": self._base_key(), "of": self._base(), "result": as_json(result)}
        path.write_text(json.dumps(words, indent=1))
        return result

    def _kept(self, name: str) -> dict[str, Any] | None:
        """Return the result of a run that was broken off, where it still counts."""
        kept = _read_kept(self.out, name) if self.plan.config.run.resume else None
        good = kept is not None and kept["key"] == self._key(name) and kept["result"]["status"] != Status.ERROR.value
        return kept if good else None

    def _content_jobs(self, name: str) -> list[Job]:
        ids = {run.id for run in self.plan.stages.get(name, ())}
        return [j for j in self.schedule.of("accel") if j.run.id in ids and j.run.kind == "content"]

    def _begin_reading(self) -> Reading | None:
        """Begin to read the checkpoint's files where the load stage will ask what they show."""
        if not self._content_jobs("load") or self._kept("load") is not None:
            return None
        checkpoint, run = self.sessions["accel"].checkpoint or self.plan.checkpoint, self.plan.config.run
        state = state_file(checkpoint, cache_folder("content"))
        return Reading(
            checkpoint, self.out / "sessions" / "reading", manifest=run.manifest, state=state, again=run.reread,
            told=self.display.progress, noted=self.display.note,
        )  # fmt: skip

    def _end_reading(self, name: str) -> None:
        """Wait for what the files show, and keep it where the stage looks for it: whatever became of the port."""
        for job in self._content_jobs(name):
            if self._reading is None:
                continue
            found = self._reading.wait(job.run.id, self.plan.config.watchdog.load_s)
            if isinstance(found, Failure):
                refuse_run(job.folder, found)
                continue
            save_trace(job.folder, Trace(setup=job.setup, run=job.run, taps={}, tensors={}, facts=found))
            (self.out / MANIFEST).write_text(manifest_text(found["digests"]))
            if found["reused"]:
                when = min(found["reused"].values())
                self.unread.append(
                    f"{name}: {len(found['reused'])} of {len(found['digests'])} files of the checkpoint were not read "
                    f"again: unchanged since they were read (the first at {when}); --reread reads them again"
                )

    def _base(self) -> dict[str, str]:
        """Return what a kept result must agree in to count, by name."""
        own = {"checklists": self.checklists.digest, "profile": self.plan.config.run.profile}
        return {**self.plan.digests, **own}

    def _base_key(self) -> str:
        return digest_of(self._base())

    def _key(self, name: str) -> str:
        return digest_of([self._base_key(), as_json(self.plan.stages[name])])

    def check_goldens(self) -> None:
        """Raise UsageError for a golden whose manifest cannot be read, before anything is loaded."""
        for job in self.schedule.jobs:
            if job.role != "accel" and (job.folder / "manifest.json").is_file():
                try:
                    read_manifest(job.folder)
                except TraceError as error:
                    raise UsageError(f"--goldens: {error}; delete {job.folder} and it is recorded anew") from error

    def record_goldens(self) -> int:
        """Record what of the oracle and the floors is not there yet, for all stages; return how many runs that were."""
        if not self.plan.scope.replay:
            return 0  # recorded stage by stage, on the port's own values
        done = self._record_reference([j for j in self.schedule.jobs if j.role != "accel"], keep=True)
        self.sessions["reference"].close()  # its memory is the port's now
        if done and self.plan.config.run.goldens is not None and self.plan.carried is None:
            folder = next(j.folder for j in self.schedule.jobs if j.role == "oracle").parent.parent
            carry(self.plan, folder)
        return done

    def lost_goldens(self) -> list[str]:
        """Return in sentences which goldens could not be recorded."""
        folders = {j.folder for j in self.schedule.jobs if j.role != "accel"}
        failures = [f for folder in sorted(folders) if (f := load_failure(folder)) is not None]
        counts = Counter(f"{f.kind}: {f.message}" for f in failures)
        return [f"{count} runs {text}" if count > 1 else text for text, count in counts.items()]

    def _record_reference(self, jobs: Sequence[Job], *, keep: bool) -> int:
        done = 0
        one_pass = (("oracle", ("oracle", *FLOORS)),)
        in_turn = (("oracle", ("oracle",)), ("floor", FLOORS))
        for role, roles in one_pass if self._streams("reference") else in_turn:
            wanted = Schedule(jobs=tuple(jobs), folders={}).of(*roles)
            wanted.sort(key=lambda j: (j.run.dtype != "", roles.index(j.role)))
            todo = [j for j in wanted if not (keep and is_current(j.folder, j.run, j.setup))]
            failure = self.plan.described["reference"].get("failure")
            if failure is not None:
                for job in todo:
                    refuse_run(job.folder, replace(failure, run=job.run.id))
                continue
            if self.plan.carried is not None:
                self.lost |= {job.folder: not_carried(self.plan, job) for job in todo}
                continue
            done += self._record(self.sessions["reference"], role, todo)
        return done

    def _record_accel(self, name: str) -> None:
        ids = {run.id for run in self.plan.stages[name]}
        jobs = [j for j in self.schedule.of("accel") if j.run.id in ids and j.run.kind != "content"]
        failure = self.plan.described["accel"].get("failure")
        if failure is not None:
            for job in jobs:
                refuse_run(job.folder, replace(failure, run=job.run.id))
            return
        self._record(self.sessions["accel"], "accel", jobs)
        if not self.plan.scope.replay:
            wanted = {
                self.schedule.folders[key] for key in self.schedule.folders if key[1] in ids and key[0] != "accel"
            }
            self._record_reference([j for j in self.schedule.jobs if j.folder in wanted], keep=False)

    def _record(self, session: Session, role: str, jobs: Sequence[Job]) -> int:
        """Do jobs in order. After a hang or a crash the rest of them is refused: each would cost a time-out again."""
        if self._streams("accel" if role == "accel" else "reference"):
            alone, groups = passes(jobs)
            self._record_passes(session, groups)
        else:
            alone = list(jobs)
        broken = ""
        worldly = [j for j in alone if j.run.kind in ("collectives", "ranks")]
        for number, job in enumerate(alone, start=1):
            self.display.run_started(job.role, job.run.id if role == "accel" else job.folder.name, number, len(alone))
            if broken:
                refuse_run(job.folder, Failure(run=job.run.id, kind="refused", message=f"not run: {broken}"))
                continue
            if job in worldly:
                if job is worldly[0]:
                    self._record_world(session, job.setup, worldly)
                continue
            dtype = job.run.dtype or self.plan.context.dtype
            failure = session.run(job.run, job.setup, job.folder, pins=job.pins, pin_dtype=dtype, expected=job.expected)
            if failure is not None and failure.kind in ("hang", "crash", "memory"):
                broken = f"{failure.run} ended in a {failure.kind} at {failure.last_tap or 'an unknown place'}"
        return len(jobs)

    def _streams(self, side: str) -> bool:
        return "streamed" in self.plan.described[side].get("capabilities", ())

    def _record_passes(self, session: Session, groups: Sequence[Sequence[Job]]) -> None:
        """Do jobs pass by pass, those of one pass together."""
        broken = ""
        for group in groups:
            for number, job in enumerate(group, start=1):
                self.display.run_started(job.role, job.run.id, number, len(group))
                if broken:
                    refuse_run(job.folder, Failure(run=job.run.id, kind="refused", message=f"not run: {broken}"))
            if broken:
                continue
            failures = record_pass(session, group, lambda job: job.run.dtype or self.plan.context.dtype)
            for failure in failures:
                if failure is not None and failure.kind in ("hang", "crash", "memory"):
                    broken = f"{failure.run} ended in a {failure.kind} at {failure.last_tap or 'an unknown place'}"

    def _record_world(self, session: Session, setup: Setup, jobs: Sequence[Job]) -> None:
        """Run every rank of every layout in one world; the single process gives its memory back first."""
        session.close()
        run_ranks(
            [RankJob(run=j.run, out=j.folder, pins=j.pins, pin_dtype=self.plan.context.dtype) for j in jobs],
            folder=self.out / "sessions" / "world",
            spec=session.spec,
            checkpoint=session.checkpoint or self.plan.checkpoint,
            setup=setup,
            timeout_s=self.plan.config.watchdog.run_s,
            startup_s=self.plan.config.watchdog.startup_s,
            python=session.python,
        )

    def view(self, name: str) -> StageView:
        """Return the traces of a stage."""
        folders = self.schedule.folders
        opened: dict[Path, Trace] = {}  # manifests are long, and a stage asks for a trace many times

        def trace(role: str, run_id: str) -> Trace | Failure | None:
            folder = folders.get((role, run_id))
            if folder is None:
                return None
            if folder not in opened:
                found = self.lost.get(folder) or read_trace(folder, run_id)
                if not isinstance(found, Trace):
                    return found
                opened[folder] = found
            return reopened(opened[folder])

        return StageView(context=self.plan.context, runs=self.plan.stages[name], trace=trace)

    def _judge(self, name: str) -> StageResult:
        view, module = self.view(name), stage_module(name)
        try:
            measurements: list[Measurement] = list(module.measure(view))
        except Exception as error:
            return self._unmeasured(name, error)
        write_measurements(measurements, self.out / "measurements" / f"{name}.jsonl")
        criteria = self.checklists.by_stage.get(name, ())
        verdicts, unjudged = gate.judge(
            criteria=criteria,
            measurements=measurements,
            in_scope=functools.cache(lambda word: self._out_of_scope(word, view)),
            waivers=self.checklists.waivers,
            today=datetime.date.today(),
        )
        again = reproduce(self.plan.config, name)
        verdicts = [replace(v, reproduce=again) if v.status is not Status.PASSED else v for v in verdicts]
        status, reason = gate.stage_status(verdicts)
        findings = diagnose(
            gate.breaking(verdicts, measurements), view.trace, floors=FLOORS, info=self.plan.info,
            modules=_modules(view), reproduce=again, measured=measurements,
        )  # fmt: skip
        if self.plan.cut is not None:
            findings = [_of_whole(f, self.plan.cut) for f in findings]
        return StageResult(
            name=name,
            status=status,
            reason=reason,
            verdicts=tuple(verdicts),
            findings=tuple(findings),
            unjudged=tuple(unjudged),
            facts={"failures": [as_json(f) for f in _failures(view)], **_told(module, view)},
            peak_bytes=max((int(t.facts.get("peak_bytes", 0)) for t in _traces(view)), default=0),
        )

    def _unmeasured(self, name: str, error: Exception) -> StageResult:
        """Return the result of a stage whose traces could not be read, or whose measuring failed."""
        unread = isinstance(error, TraceError)
        cause = "a recorded trace is damaged or of another version" if unread else "a mistake of the stage's own code"
        message = str(error) if unread else f"{type(error).__name__}: {error}"
        finding = Finding(
            tap="*", module="", op="", cause=f"nothing could be measured: {cause}", message=message,
            reproduce=reproduce(self.plan.config, name),
        )  # fmt: skip
        return StageResult(
            name=name,
            status=Status.ERROR,
            reason=f"measuring failed: {message}",
            findings=(finding,),
            facts={"traceback": "".join(traceback.format_exception(error))},
        )

    def _out_of_scope(self, word: str, view: StageView) -> str:
        plan = self.plan
        return out_of_judgement(
            word, plan.info, plan.scope, plan.context.capabilities, oracles=_traces(view, "oracle"),
            ports=_traces(view),
        )  # fmt: skip


def _traces(view: StageView, role: str = "accel") -> list[Trace]:
    return [t for run in view.runs if isinstance(t := view.trace(role, run.id), Trace)]


def _failures(view: StageView) -> list[Failure]:
    found = [
        f for run in view.runs for role in ("oracle", "accel") if isinstance(f := view.trace(role, run.id), Failure)
    ]
    return list({(f.run, f.message): f for f in found}.values())


def _of_whole(finding: Finding, cut: Cut) -> Finding:
    """Say of a finding in a cut model which layers of the whole model it means."""
    told = cut.told(finding.tap, finding.module)
    return (
        replace(finding, message=f"{finding.message} ({told})", evidence=(*finding.evidence, told)) if told else finding
    )


def _told(module: ModuleType, view: StageView) -> Mapping[str, Any]:
    """Return what a stage has to tell beside its measurements, such as a table."""
    return module.facts(view) if hasattr(module, "facts") else {}


def _modules(view: StageView) -> dict[str, str]:
    return {tap: path for t in _traces(view) for tap, path in t.facts.get("modules", {}).items()}


def _read_kept(run_dir: Path, name: str) -> dict[str, Any] | None:
    try:
        kept = json.loads((run_dir / "stages" / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None
    return dict(kept)
