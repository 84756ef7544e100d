"""What one pass over a whole checkpoint says, as plain JSON. Must not know stages or ports."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.scan.convert import Conversion
from harness.checkpoint.scan.manifest import digest_problems, published
from harness.checkpoint.scan.stream import Progress, scan, scan_bytes
from harness.checkpoint.scan.suspicion import suspicions
from harness.types import as_json


def content_facts(
    checkpoint: Checkpoint,
    *,
    manifest: Path | None = None,
    values: bool = True,
    state: Path | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Read every shard once, compare it with what was published of it, and say what its content shows.

    Returns:
        JSON facts: `problems`, `suspicions`, `digests` by file, `vouched` (files whose digest was published and is
        right), `conversion` (MXFP4 blocks, and how many FP8 cannot hold), `matrices` looked at, `bytes`, `seconds`.

    Raises:
        CheckpointError: the named manifest cannot be read.
    """
    known = published(checkpoint.path, checkpoint.headers, manifest)
    algorithms = sorted({"blake3", *(name for digests in known.values() for name in digests)})
    begin = time.perf_counter()
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


def _conversion(found: list[Conversion]) -> dict[str, Any]:
    lossy = sorted((c for c in found if c.lossy), key=lambda c: -c.worst)
    return {
        "blocks": sum(c.blocks for c in found),
        "lossy_blocks": sum(c.lossy for c in lossy),
        "worst": lossy[0].worst if lossy else 0.0,
        "tensors": [c.name for c in lossy[:20]],
    }
