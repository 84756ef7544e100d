"""Which jobs of a streamed side go along in one pass over its weights, and doing them. Must not know limits.

A job that replays another one's values, or follows its tokens, comes a pass later; a pass takes as many walks over the
layers as its longest job. Jobs of one precision of the port go together: more would widen the window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.record import Asked, Session
from harness.schedule import Job
from harness.types import Failure

WALKING = frozenset({"forward", "steps", "generate", "concurrent", "search"})
"""Kinds of runs whose forwards may wait for each other; of the others, some are timed and some read the files."""


def passes(jobs: Sequence[Job]) -> tuple[list[Job], list[list[Job]]]:
    """Return the jobs that go alone, in order, and those of each pass."""
    walking = [job for job in jobs if job.run.kind in WALKING and not job.run.options.get("alone")]
    alone = [job for job in jobs if job not in walking]
    found = []
    for dtype in dict.fromkeys(job.run.dtype for job in walking):
        left = [job for job in walking if job.run.dtype == dtype]
        while left:
            found.append(_next(left))
            left = [job for job in left if job not in found[-1]]
    return alone, found


def _next(left: Sequence[Job]) -> list[Job]:
    """Return the jobs that go now: all that can, or the shortest alone where others that they hold up would be as long.

    A free run is one walk, its replay in single steps as many as what is generated: both can share theirs.
    """
    missing = {job.folder for job in left}
    ready = [job for job in left if missing.isdisjoint({job.pins, job.expected} - {job.folder})] or list(left)
    least = min(walks(job) for job in ready)
    short = [job for job in ready if walks(job) == least]
    freed = {job.folder for job in short}
    waiting = [job for job in left if job not in ready and not freed.isdisjoint({job.pins, job.expected})]
    return short if any(walks(job) > least for job in ready) and any(walks(job) > least for job in waiting) else ready


def walks(job: Job) -> int:
    """Return how often a job goes through all layers, about."""
    run = job.run
    count = run.case.max_new_tokens if run.case else 1
    many = {"steps": len(run.steps) + bool(run.before), "generate": count + 1, "concurrent": 4 * count, "search": count}
    return many.get(run.kind, 1) if job.role != "floor" or run.kind != "generate" else 1


def record_pass(session: Session, jobs: Sequence[Job], pin_dtype: Callable[[Job], str]) -> list[Failure | None]:
    """Do jobs in one pass; their traces, or failures, then lie in their folders."""
    return session.run_together(
        [
            Asked(run=j.run, setup=j.setup, out=j.folder, pins=j.pins, pin_dtype=pin_dtype(j), expected=j.expected)
            for j in jobs
        ]
    )
