"""What one pass over a whole checkpoint says, as plain JSON. Must not know stages or ports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.scan.convert import Conversion
from harness.checkpoint.scan.estimate import expected_seconds
from harness.checkpoint.scan.manifest import BESIDE, beside_digests, digest_problems, published
from harness.checkpoint.scan.shard import ShardScan
from harness.checkpoint.scan.stream import finished, scan, scan_bytes, unchanged
from harness.checkpoint.scan.suspicion import FALSE_ALARMS, suspicions
from harness.types import as_json

BEAT_S = 1.0
Told = Callable[[str], None]


def content_facts(
    checkpoint: Checkpoint,
    *,
    manifest: Path | None = None,
    values: bool = True,
    state: Path | None = None,
    again: bool = False,
    told: Told = lambda _: None,
    noted: Told = lambda _: None,
) -> dict[str, Any]:
    """Read every shard once, compare it with what was published of it, and say what its content shows.

    Files that `state` (see `scan`) knows and that did not change are not read again, unless `again`. `noted` hears what
    it will take before it starts; `told` every second or so how far it is, how fast, and what is left. Digests are
    BLAKE3, or BLAKE2b where there is no such package, and whatever was published.

    Returns:
        JSON facts: `problems`, `suspicions`, `false_alarms` (how often an honest checkpoint shows one, by kind),
        `digests` by file, `vouched` (files whose digest was published and is right), `conversion` (MXFP4 blocks, and
        how many FP8 cannot hold), `matrices` looked at, `bytes`, `read_bytes` of them in this pass, `reused` (by file,
        when it was read), `expected_s`, `seconds`.

    Raises:
        CheckpointError: the named manifest cannot be read.
    """
    known = published(checkpoint.path, (*checkpoint.headers, *BESIDE), manifest)
    own = "blake3" if find_spec("blake3") is not None else "blake2b"
    asked = {own, *(name for digests in known.values() for name in digests)}
    algorithms = sorted(asked if own == "blake3" else asked - {"blake3"})
    before = {} if again else unchanged(checkpoint, finished(state), algorithms=algorithms, values=values)
    left = scan_bytes(checkpoint) - sum(s.file_bytes for s in before.values())
    expected_s = _announce(checkpoint, left, before, algorithms, values, noted)
    begin = time.perf_counter()
    progress = Telling(left, told)
    shards = list(
        scan(checkpoint, algorithms=algorithms, values=values, state=state, known=before, progress=progress)
    )  # fmt: skip
    told("every file was read; looking at what they show together")
    digests = {shard.file: dict(shard.digests) for shard in shards if shard.digests}
    digests |= beside_digests(checkpoint.path, algorithms)
    wrong = digest_problems(digests, known)
    statistics = [s for shard in shards for s in shard.statistics]
    return {
        "problems": [as_json(p) for p in (*wrong, *(p for shard in shards for p in shard.problems))],
        "suspicions": [as_json(s) for s in suspicions(statistics)],
        "false_alarms": dict(FALSE_ALARMS),
        "digests": digests,
        "vouched": sorted(set(known) & set(digests) - {p.file for p in wrong}),
        "conversion": _conversion([c for shard in shards for c in shard.conversions]),
        "matrices": len(statistics),
        "bytes": scan_bytes(checkpoint),
        "read_bytes": sum(s.file_bytes for s in shards if not s.reused),
        "reused": {s.file: s.read_at for s in shards if s.reused},
        "expected_s": expected_s,
        "seconds": time.perf_counter() - begin,
    }


def _announce(
    checkpoint: Checkpoint,
    left: int,
    before: dict[str, ShardScan],
    algorithms: Sequence[str],
    values: bool,
    noted: Told,
) -> float:
    """Say what the pass will take, from a short sample of each format; return the seconds."""
    files, whole = len(checkpoint.headers), scan_bytes(checkpoint)
    words = f"{_size(left)} in {files - len(before)} files"
    if before:
        words += f" ({len(before)} others are unchanged since they were read)"
    if not left:
        noted(f"checkpoint: all {files} files are unchanged since they were read")
        return 0.0
    seconds = expected_seconds(checkpoint, algorithms=algorithms, values=values) * left / max(1, whole)
    noted(f"checkpoint: reading {words}, about {_duration(seconds)} by a sample of each format")
    return seconds


def _size(nbytes: float) -> str:
    """Return bytes as a person reads them, in powers of 1024."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _duration(seconds: float) -> str:
    """Return seconds as a person reads them: 42 s, 7 min, 3.2 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Telling:
    """Says every second or so how far a pass is; called from several threads with the bytes that were read."""

    def __init__(self, total: int, told: Told) -> None:
        self._total, self._told = total, told
        self._done, self._begin, self._last = 0, time.perf_counter(), 0.0
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        """Take note of some bytes."""
        with self._lock:
            self._done += count
            now = time.perf_counter()
            if now - self._last < BEAT_S:
                return
            self._last = now
            rate = self._done / max(now - self._begin, 1e-9)
            left = max(0, self._total - self._done) / max(rate, 1.0)
            self._told(f"read {_size(self._done)} of {_size(self._total)} at {_size(rate)}/s, {_duration(left)} left")


def _conversion(found: list[Conversion]) -> dict[str, Any]:
    lossy = sorted((c for c in found if c.lossy), key=lambda c: -c.worst)
    return {
        "blocks": sum(c.blocks for c in found),
        "lossy_blocks": sum(c.lossy for c in lossy),
        "worst": lossy[0].worst if lossy else 0.0,
        "tensors": [c.name for c in lossy[:20]],
    }
