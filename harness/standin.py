"""A recorded reference in place of one that does not run here. Knows plans and goldens; must not know limits."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.config import Config
from harness.errors import SpecError, TraceError, UsageError
from harness.golden import Carried, checkpoint_digest, choose_carried, load_carried, save_carried
from harness.plan import Plan, code_digest, goldens_folder, reference_wanted, refused
from harness.record import Session
from harness.schedule import Job
from harness.types import Failure, Setup


def carried_references(config: Config) -> list[Carried]:
    """Return the references that --goldens holds. Raises UsageError for one that cannot be used."""
    if config.run.goldens is None:
        return []
    try:
        return load_carried(goldens_folder(config))
    except TraceError as error:
        raise UsageError(f"--goldens: {error}") from error


def reference_or_why(
    config: Config, session: Session, setups: Mapping[str, Setup], carried: Sequence[Carried]
) -> tuple[Mapping[str, Any], str]:
    """Return what the reference says of itself (nothing, or that it failed), and why a recorded one must stand in."""
    if not reference_wanted(config, carried):
        return {}, "no reference was named"
    try:
        answer = session.describe(setups["oracle"])
        if carried and not isinstance(answer, Failure) and not _is_recorded(config, answer, carried):
            opened = session.open(setups["oracle"])
            answer = opened if isinstance(opened, Failure) else answer
    except SpecError as error:
        if not carried:
            raise
        return {}, str(error).splitlines()[0]
    why = f"{config.reference.spec}: {answer.message}" if carried and isinstance(answer, Failure) else ""
    return refused(answer, "reference"), why


def _is_recorded(config: Config, answer: Mapping[str, Any], carried: Sequence[Carried]) -> bool:
    """Say whether the reference on this machine is one that was recorded: then it need not be opened to be used."""
    here = code_digest(config.reference.spec), answer.get("versions")
    return any((c.digests["reference"], c.described.get("versions")) == here for c in carried)


def chosen_reference(carried: Sequence[Carried], checkpoint: Path, dtype: str, precision: Mapping[str, str]) -> Carried:
    """Return the recorded reference for a port of a checkpoint. Raises UsageError saying what is there instead."""
    own = any(checkpoint == c.checkpoint for c in carried)
    try:
        digest = "" if own else checkpoint_digest(checkpoint)
        return choose_carried(carried, checkpoint=digest, dtype=dtype, precision=precision)
    except TraceError as error:
        raise UsageError(f"--goldens: {error}") from error


def carry(plan: Plan, folder: Path) -> None:
    """Leave beside goldens what a machine that cannot run the reference must know of it."""
    told = plan.described["reference"]
    if "failure" in told:
        return
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    carried = Carried(
        spec=plan.config.reference.spec,
        described=told,
        setups={role: plan.setups[role] for role in ("oracle", "floor")},
        digests={name: plan.digests[name] for name in ("checkpoint", "reference")},
        made={"time": now, "profile": plan.config.run.profile, "stages": sorted(plan.stages)},
        folder=folder,
    )
    save_carried(carried, plan.checkpoint)


def write_requests(plan: Plan, path: Path) -> None:
    """Write the token ids of the text stage's requests by name, for an engine that is to be recorded on the same."""
    runs = [run for run in plan.runs("text") if run.kind == "forward" and run.case is not None]
    ids = {run.case.id: list(run.case.token_ids or ()) for run in runs if run.case is not None and not run.case.images}
    path.write_text(json.dumps(ids, indent=1))


def not_carried(plan: Plan, job: Job) -> Failure:
    """Return why a question has no answer where the reference is only recorded."""
    if not plan.scope.replay:
        why = "a port that cannot be replayed is judged by running the reference on its values"
    else:
        why = "the goldens hold no answer to this question; record it with the port's own scope in [scope]"
    length = len(job.run.case.token_ids or ()) if job.run.case else 0
    asked = f"{job.run.kind} of {length} tokens" if length else job.run.kind
    message = f"{why} ({asked}; the reference does not run here: {plan.stand_in})"
    return Failure(run=job.run.id, kind="refused", message=message)
