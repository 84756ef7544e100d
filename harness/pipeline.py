"""The order of everything: describe, plan, run the campaign, render. Knows every room below; no numerics."""

from __future__ import annotations

import datetime
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness.campaign import Campaign, reproduce, schedule_of
from harness.checklist import load_checklists
from harness.config import Config
from harness.errors import UsageError
from harness.evidence import environment, exercised, not_covered, practice_evidence
from harness.golden import Carried
from harness.plan import (
    Plan,
    declared,
    make_plan,
    make_sessions,
    make_setups,
    out_of_scope,
    refused,
    widest_port,
)
from harness.portion import prepared
from harness.record import Session, close_all
from harness.report.render import render
from harness.report.results import Results, build_results
from harness.report.terminal import Display
from harness.standin import carried_references, chosen_reference, reference_or_why, write_requests
from harness.types import STAGES, Scope, StageResult, Status, as_json, from_json


def verify(config: Config, display: Display, *, command: str = "") -> Results:
    """Take the port through the asked stages and write RUN/. Returns the results; raises UsageError and the like."""
    checklists = load_checklists(config.run.checklists)
    started, begin = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), time.perf_counter()
    out = _made(config.run.out)
    config = prepared(config, display.note)
    carried = carried_references(config)
    checkpoint, sessions = make_sessions(config, out / "sessions", carried)
    try:
        plan = _described_plan(config, checkpoint, sessions, carried)
        campaign = Campaign(plan, sessions, checklists, display, out)
        campaign.check_goldens()
        stages = campaign.all()
    finally:
        close_all(sessions.values())
    reasons = _unmet(config, plan, stages)
    results = build_results(
        stages,
        claimed=plan.scope,
        exercised=exercised(plan, stages, campaign.view),
        not_covered=[*campaign.partial, *campaign.unread, *not_covered(plan, stages)],
        environment=environment(plan, checklists.digest),
        required=[r for r in config.run.require if r in STAGES],
        problems=[f"--require {word}: {why}" for word, why in reasons.items()] + campaign.problems,
        questions=checklists.questions,
        practices=checklists.practices,
        practice_evidence=practice_evidence(plan, campaign.schedule),
        partial=bool(campaign.partial),
        partial_reason="; ".join(campaign.partial),
        profile=config.run.profile,
        command=command or reproduce(config),
        started=started,
        wall_s=time.perf_counter() - begin,
        cut={**as_json(plan.cut), "sentence": plan.cut.sentence} if plan.cut is not None else {},
        measurements={s.name: f"measurements/{s.name}.jsonl" for s in stages if s.name in plan.stages and s.verdicts},
    )
    render(results, out)
    return results


def _unmet(config: Config, plan: Plan, stages: Sequence[StageResult]) -> dict[str, str]:
    """Return why each word of --require was not met, for those that were not."""
    found = {}
    ran = {s.name: s for s in stages}
    for word in config.run.require:
        if word not in STAGES:
            found[word] = out_of_scope(word, plan.scope, plan.context.capabilities)
        elif word not in ran:
            found[word] = "it was not among the stages of this run; name it in --stage"
        elif ran[word].status is Status.SKIPPED:
            found[word] = ran[word].reason
    return {word: why for word, why in found.items() if why}


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: expected a folder that can be written at {folder}, found: {error}") from error
    return folder.resolve()


def dry_run(config: Config, say: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Return what would run, one row per stage, role and run, without loading anything; say what would be written."""
    load_checklists(config.run.checklists)
    out = config.run.out.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        config = prepared(config, say, scratch=Path(scratch))
        carried = carried_references(config)
        checkpoint, sessions = make_sessions(config, out / "sessions", carried)
        try:
            plan = _described_plan(config, checkpoint, sessions, carried)
        finally:
            close_all(sessions.values())
    schedule = schedule_of(plan, out)
    job_of = {job.folder: job for job in reversed(schedule.jobs)}
    stage_of = {run.id: run.stage for run in plan.runs(*STAGES)}
    forwards = {"forward": 1, "steps": 2, "generate": 16, "latency": 64, "simulate": 2, "ranks": 4, "concurrent": 32}
    rows: list[dict[str, Any]] = [{"stage": s, "skipped": why} for s, why in plan.skipped.items()]
    for (role, run_id), folder in schedule.folders.items():
        job = job_of[folder]
        tokens = len(job.run.case.token_ids or ()) if job.run.case else 0
        known = role != "accel" and (folder / "manifest.json").is_file()
        rows.append({
            "stage": stage_of[run_id], "role": role, "run": run_id, "kind": job.run.kind, "tokens": tokens,
            "forwards": 0 if known else forwards.get(job.run.kind, 0), "golden": "reused" if known else "",
        })  # fmt: skip
    return rows


def record(config: Config, out: Path, display: Display) -> tuple[int, list[str]]:
    """Record the goldens of all stages in scope into `out`; return how many runs were recorded, and what failed.

    Without a port they are for any port of the reference: every phase and length that the reference itself has.
    """
    port_named = "spec" in config.accel.model_fields_set
    words: dict[str, Any] = {"run": config.run.model_copy(update={"goldens": out})}
    if not port_named:
        own = {"spec": config.reference.spec, "options": config.reference.options}
        words["accel"] = config.accel.model_copy(update=own)
    config = prepared(config.model_copy(update=words), display.note)
    checkpoint, sessions = make_sessions(config, out / ".sessions")
    try:
        plan = _described_plan(config, checkpoint, sessions, any_port=not port_named)
        campaign = Campaign(plan, sessions, load_checklists(config.run.checklists), display, out)
        count = campaign.record_goldens()
        write_requests(campaign.plan, out / "requests.json")
        return count, campaign.lost_goldens()
    finally:
        close_all(sessions.values())


def _described_plan(
    config: Config,
    checkpoint: Path,
    sessions: Mapping[str, Session],
    carried: Sequence[Carried] = (),
    *,
    any_port: bool = False,
) -> Plan:
    setups = make_setups(config)
    described: dict[str, Mapping[str, Any]] = {}
    with ThreadPoolExecutor(1) as pool:  # both sides import what they need at once; the reference is told first
        asked = pool.submit(sessions["accel"].describe, setups["accel"])
        answer, stand_in = reference_or_why(config, sessions["reference"], setups, carried)
        port = refused(asked.result(), "accel")
    chosen = None
    if stand_in:
        try:
            precision = declared(from_json(Scope, port["scope"]), config.accel.precision).precision
            chosen = chosen_reference(carried, checkpoint, setups["accel"].dtype, precision)
            answer = chosen.described
        except UsageError:
            if "failure" not in answer:
                raise
            stand_in = ""  # the named reference failed, and no recorded one is of this checkpoint: that is the finding
    described["accel"] = widest_port(port) if any_port else port
    described["reference"] = answer
    return make_plan(config, checkpoint, described, carried=chosen, stand_in=stand_in)
