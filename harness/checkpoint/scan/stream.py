"""Stream every shard of a checkpoint once, several at a time; reuse what an earlier pass learned of unchanged files.

Knows files of state and threads; must not know models, ports or limits. Memory is bounded by pieces of tensors and
their scales, by thread. Where there are fewer shards than processors, the rest of these help with decoding.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.formats import Logical, logical_tensors
from harness.checkpoint.scan.body import Helpers
from harness.checkpoint.scan.shard import Job, Progress, ShardScan, read_shard, stands
from harness.types import as_json, from_json


def scan(
    checkpoint: Checkpoint,
    *,
    algorithms: Sequence[str] = ("blake3",),
    values: bool = True,
    workers: int = 0,
    state: Path | None = None,
    known: Mapping[str, ShardScan] | None = None,
    progress: Progress = lambda _: None,
) -> Iterator[ShardScan]:
    """Yield what one pass over each shard shows, in the order of the shards.

    `values` False leaves out the decoded pass. `workers`: threads (0: one for each processor).
    `state` is a file of finished shards (JSON lines): those that did not change since are taken from it (or from
    `known`, where that is given), and each new one is added as soon as it is done.
    """
    known, roles = finished(state) if known is None else known, weight_roles(checkpoint)
    workers = workers or processors()
    readers = min(len(checkpoint.headers), workers) or 1
    with ExitStack() as stack:
        helpers = Helpers()
        if values and readers < workers:
            helping = ThreadPoolExecutor(workers, thread_name_prefix="decode")
            helpers = Helpers(executor=stack.enter_context(helping), count=workers)
        job = Job(
            checkpoint=checkpoint, roles=roles, algorithms=tuple(algorithms), values=values, progress=progress,
            helpers=helpers,
        )  # fmt: skip
        pool = stack.enter_context(ThreadPoolExecutor(readers, thread_name_prefix="scan"))
        asked = [pool.submit(partial(_one, job, file, known.get(file), state)) for file in checkpoint.headers]
        try:
            for future in asked:
                yield future.result()
        finally:
            for future in asked:
                future.cancel()


def _one(job: Job, file: str, known: ShardScan | None, state: Path | None) -> ShardScan:
    """Read one shard, and keep what was found at once, whatever the shards before it take."""
    found = read_shard(job, file, known)
    if state is not None and found.key and not found.reused:
        _keep(state, found)
    return found


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def scan_bytes(checkpoint: Checkpoint) -> int:
    """Return how many bytes a whole pass reads."""
    return sum(h.file_bytes for h in checkpoint.headers.values())


def weight_roles(checkpoint: Checkpoint) -> dict[str, tuple[Logical, str]]:
    """Return the weight and the role of each stored tensor."""
    return {part: (x, role) for x in logical_tensors(checkpoint) for role, part in x.parts.items()}


def finished(state: Path | None) -> dict[str, ShardScan]:
    """Return the shards that a file of state holds; the last word on each counts."""
    if state is None or not state.is_file():
        return {}
    found = {}
    for line in state.read_text(errors="replace").splitlines():
        try:
            shard = from_json(ShardScan, json.loads(line))
        except (ValueError, TypeError, AttributeError):
            continue  # a line cut off by a kill: that shard is read again
        found[shard.file] = shard
    return found


def unchanged(
    checkpoint: Checkpoint, known: Mapping[str, ShardScan], *, algorithms: Sequence[str], values: bool
) -> dict[str, ShardScan]:
    """Return those of the finished shards whose files are what they were, and that show all that is asked for."""
    job = Job(checkpoint=checkpoint, roles={}, algorithms=tuple(algorithms), values=values)
    return {file: shard for file, shard in known.items() if file in checkpoint.headers and stands(job, file, shard)}


def _keep(state: Path, shard: ShardScan) -> None:
    """Add a line in one write, which another process that adds lines cannot come between."""
    state.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(as_json(shard)) + "\n").encode()
    number = os.open(state, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(number, line)
    finally:
        os.close(number)
