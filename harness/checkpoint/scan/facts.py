"""What one pass over a whole checkpoint says, as plain JSON. Must not know stages or ports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.scan.convert import Conversion
from harness.checkpoint.scan.manifest import digest_problems, published
from harness.checkpoint.scan.stream import scan, scan_bytes
from harness.checkpoint.scan.suspicion import suspicions
from harness.types import as_json


def content_facts(
    checkpoint: Checkpoint,
    *,
    manifest: Path | None = None,
    values: bool = True,
    state: Path | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Read every shard once, compare it with what was published of it, and say what its content shows.

    `told` hears now and then how far it is, how fast, and what is left. Digests are BLAKE3, or BLAKE2b where there is
    no such package, and whatever was published.

    Returns:
        JSON facts: `problems`, `suspicions`, `digests` by file, `vouched` (files whose digest was published and is
        right), `conversion` (MXFP4 blocks, and how many FP8 cannot hold), `matrices` looked at, `bytes`, `seconds`.

    Raises:
        CheckpointError: the named manifest cannot be read.
    """
    known = published(checkpoint.path, checkpoint.headers, manifest)
    own = "blake3" if find_spec("blake3") is not None else "blake2b"
    asked = {own, *(name for digests in known.values() for name in digests)}
    algorithms = sorted(asked if own == "blake3" else asked - {"blake3"})
    begin = time.perf_counter()
    progress = Telling(scan_bytes(checkpoint), told)
    shards = list(scan(checkpoint, algorithms=algorithms, values=values, state=state, progress=progress))
    digests = {shard.file: dict(shard.digests) for shard in shards if shard.digests}
    wrong = digest_problems(digests, known)
    statistics = [s for shard in shards for s in shard.statistics]
    return {
        "problems": [as_json(p) for p in (*wrong, *(p for shard in shards for p in shard.problems))],
        "suspicions": [as_json(s) for s in suspicions(statistics)],
        "digests": digests,
        "vouched": sorted(set(known) & set(digests) - {p.file for p in wrong}),
        "conversion": _conversion([c for shard in shards for c in shard.conversions]),
        "matrices": len(statistics),
        "bytes": scan_bytes(checkpoint),
        "seconds": time.perf_counter() - begin,
    }


class Telling:
    """Says every second or so how far a pass is; called from several threads with the bytes that were read."""

    def __init__(self, total: int, told: Callable[[str], None]) -> None:
        self._total, self._told = total, told
        self._done, self._begin, self._last = 0, time.perf_counter(), 0.0
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        """Take note of some bytes."""
        with self._lock:
            self._done += count
            now = time.perf_counter()
            if now - self._last < 1.0:
                return
            self._last = now
            rate = self._done / max(now - self._begin, 1e-9)
            left = max(0, self._total - self._done) / max(rate, 1.0)
            self._told(
                f"read {self._done / 2**30:.1f} of {self._total / 2**30:.1f} GiB at {rate / 2**30:.2f} GiB/s, "
                f"{left:.0f} s left"
            )


def _conversion(found: list[Conversion]) -> dict[str, Any]:
    lossy = sorted((c for c in found if c.lossy), key=lambda c: -c.worst)
    return {
        "blocks": sum(c.blocks for c in found),
        "lossy_blocks": sum(c.lossy for c in lossy),
        "worst": lossy[0].worst if lossy else 0.0,
        "tensors": [c.name for c in lossy[:20]],
    }
