"""How long a pass over a checkpoint should take, from a short look at each format in it. Must not know stages."""

from __future__ import annotations

import time
from collections.abc import Sequence

from harness.checkpoint.container import Checkpoint, open_shard
from harness.checkpoint.header import TensorRef
from harness.checkpoint.scan.shard import Job, Reading, Short
from harness.checkpoint.scan.stream import processors, scan_bytes, weight_roles
from harness.errors import CheckpointError

SAMPLE_BYTES = 1 << 26
"""Bytes of a weight that is timed, at most."""


def expected_seconds(checkpoint: Checkpoint, *, algorithms: Sequence[str] = ("blake3",), values: bool = True) -> float:
    """Return how long a whole pass should take: one weight of each format is read, and stands for all of its format.

    Computing is shared by the processors; waiting for the disk is not, which answers two no faster than one. 0 where
    there is nothing to time.
    """
    roles = weight_roles(checkpoint)
    job = Job(checkpoint=checkpoint, roles=roles, algorithms=tuple(algorithms), values=values)
    samples, nbytes = dict[str, TensorRef](), dict[str, int]()
    for name, ref in checkpoint.tensors.items():
        logical, role = roles.get(name, (None, ""))
        if logical is None or role != "weight" or not ref.nbytes:
            continue
        kind = f"{logical.format} {ref.dtype}"
        nbytes[kind] = nbytes.get(kind, 0) + ref.nbytes
        best = samples.get(kind)
        if ref.nbytes <= SAMPLE_BYTES and (best is None or ref.nbytes > best.nbytes):
            samples[kind] = ref
    computing = waiting = counted = 0.0
    for kind, ref in samples.items():
        took = _timed(job, ref)
        if took is not None:
            share = nbytes[kind] / ref.nbytes
            computing, waiting, counted = computing + took[0] * share, waiting + took[1] * share, counted + nbytes[kind]
    if not counted:
        return 0.0
    return (computing / processors() + waiting) * scan_bytes(checkpoint) / counted


def _timed(job: Job, ref: TensorRef) -> tuple[float, float] | None:
    """Return seconds of computing and of waiting for one tensor, or None where it cannot be read."""
    try:
        with open_shard(job.checkpoint.path / ref.file) as stream:
            stream.seek(ref.begin)
            begin, working = time.perf_counter(), time.thread_time()
            Reading(job, ref.file, stream).tensor(ref)
            worked = time.thread_time() - working
            return worked, max(0.0, time.perf_counter() - begin - worked)
    except (OSError, Short, CheckpointError):
        return None
