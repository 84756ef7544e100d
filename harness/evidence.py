"""What a run can show for itself beside verdicts: environment, what was exercised, what was not covered, practices.

Knows plans, traces and results; must not know limits.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.plan import Plan
from harness.report.results import Environment
from harness.schedule import Schedule
from harness.stages import StageView
from harness.types import STAGES, StageResult, Status, Trace, Verdict


def environment(plan: Plan, checklist_digest: str) -> Environment:
    """Return versions, device and digests of everything a verdict may depend on."""
    sides = {
        side: {"name": told.get("name", ""), "spec": plan.setups[role].adapter, "versions": told.get("versions", {}),
               "device": _device(plan.setups[role].device, told)}
        for side, role, told in (
            ("reference", "oracle", plan.described["reference"]), ("accel", "accel", plan.described["accel"]),
        )
    }  # fmt: skip
    if plan.carried is not None:
        sides["reference"]["recorded"] = dict(plan.carried.made)
    sides["accel"]["dtype"] = plan.setups["accel"].dtype
    sides["reference"]["dtype"] = plan.setups["oracle"].dtype
    return Environment(
        versions=dict(plan.described["accel"].get("versions", {})),
        device=sides["accel"]["device"],
        sides=sides,
        digests={**plan.digests, "checklists": checklist_digest},
        facts={"machine": platform.machine(), "system": platform.system(), "cpus": os.cpu_count() or 0},
    )


def _device(asked: str, told: Mapping[str, Any]) -> str:
    """Return the device that a SPEC asked for; what is there, where it left that to the port."""
    return asked if asked != "cpu" else str(told.get("device", ""))


def exercised(plan: Plan, stages: Sequence[StageResult], view: Callable[[str], StageView]) -> dict[str, Any]:
    """Return what the cases of the stages that ran have reached: phases, layouts, lengths, images, replay."""
    ran = [s.name for s in stages if s.status not in (Status.SKIPPED, Status.BLOCKED)]
    reached: dict[str, set[Any]] = {k: set() for k in ("phases", "layouts", "images", "replay_levels", "stages")}
    longest = taps = 0
    for name in ran:
        stage_view = view(name)
        reached["stages"].add(name)
        for run in stage_view.runs:
            trace = stage_view.trace("accel", run.id)
            if not isinstance(trace, Trace):
                continue
            reached["phases"].add(
                str(run.options.get("phase", "prefill")) if run.kind in ("forward", "steps") else run.kind
            )
            reached["layouts"].add(str(run.layout))
            reached["replay_levels"].add(run.level)
            for image in run.case.images if run.case else ():
                reached["images"].add(f"{image.height}x{image.width}")
            longest = max(longest, int(trace.facts.get("length_tokens", 0)))
            taps = max(taps, len(trace.taps))
    lists = {k: sorted(v, key=STAGES.index if k == "stages" else None) for k, v in reached.items()}
    told = [
        f"{s.name}: {v.worst.detail['message']}" for s in stages for v in s.verdicts
        if v.criterion.metric == "unexercised" and v.status is Status.PASSED and v.worst is not None and v.worst.n
    ]  # fmt: skip
    return {**lists, "longest_tokens": longest, "taps": taps, "coverage": told}


def not_covered(plan: Plan, stages: Sequence[StageResult]) -> list[str]:
    """Return in sentences what this run therefore does not say."""
    if "failure" in plan.described["accel"]:
        return ["everything: the port could not be opened, so it claimed nothing"]
    off: dict[str, list[str]] = {}
    for feature, why in plan.scope.off.items():
        if feature not in plan.skipped:
            off.setdefault(why, []).append(feature)
    sentences = [f"{', '.join(features)}: {why}{_unjudged(features, stages)}" for why, features in off.items()]
    unobserved: dict[str, list[str]] = {}
    for glob, why in plan.scope.unobservable.items():
        unobserved.setdefault(why, []).append(glob)
    for why, globs in unobserved.items():
        more = f" and {len(globs) - 3} more patterns" if len(globs) > 3 else ""
        sentences.append(f"taps {', '.join(globs[:3])}{more} were not observed: {why}")
    if plan.scope.precision and not plan.setups["floor"].precision:
        sentences.append(
            f"precision: the floor is that of plain {plan.setups['floor'].dtype}, because this reference cannot "
            "compute as the port declares; what the declared formats cost reads as an error of the port"
        )
    if plan.cut is not None:
        sentences.append(f"the whole model: verified was {plan.cut.sentence}")
        sentences += plan.cut.notes
    if plan.carried is not None:
        there = f"recorded {plan.carried.made.get('time', '')} as {plan.carried.spec}"
        sentences.append(f"the reference did not run here ({plan.stand_in}): the port was held to goldens {there}")
    for stage in stages:
        skipped: dict[str, list[str]] = {}
        for verdict in stage.verdicts:
            if verdict.status is Status.SKIPPED and not any(_for(word, verdict) for word in plan.scope.off):
                skipped.setdefault(verdict.reason, []).append(verdict.criterion.id)
        sentences += [f"{stage.name}: {', '.join(ids)}: {why}" for why, ids in skipped.items()]
        sentences += [
            f"{stage.name}: {v.criterion.id}: {v.reason}"
            for v in stage.verdicts
            if v.status is Status.INCONCLUSIVE and not v.criterion.blocking
        ]
        if stage.status is Status.BLOCKED:
            sentences.append(f"{stage.name}: not run, {stage.reason}")
    return list(dict.fromkeys(sentences))


def _for(feature: str, verdict: Verdict) -> bool:
    """Say whether a criterion was skipped because a feature is switched off."""
    return verdict.status is Status.SKIPPED and verdict.reason.startswith(f"{feature} is switched off")


def _unjudged(features: Sequence[str], stages: Sequence[StageResult]) -> str:
    ids = [v.criterion.id for s in stages for v in s.verdicts if any(_for(f, v) for f in features)]
    more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
    return f" (so not judged: {', '.join(ids[:3])}{more})" if ids else ""


def practice_evidence(plan: Plan, schedule: Schedule) -> dict[str, str]:
    """Return a sentence by each fact that the practices of the checklists ask for and that this run shows."""
    goldens = {j.folder for j in schedule.jobs if j.role != "accel"}
    evidence = {}
    if plan.scope.replay and goldens and all((folder / "manifest.json").is_file() for folder in goldens):
        evidence["goldens_saved"] = f"{len(goldens)} golden traces of the reference, kept by digest"
    kind = plan.setups["oracle"].adapter.split(":")[0]
    if kind in ("hf", "builtin"):
        evidence["reference_upstream"] = f"the reference is {plan.setups['oracle'].adapter}, used as it is"
    if plan.scope.fallbacks:
        evidence["fallbacks"] = f"fallbacks named by the port: {', '.join(plan.scope.fallbacks)}"
    return evidence
