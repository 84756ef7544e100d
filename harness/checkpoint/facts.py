"""The two things a worker asks of a checkpoint, as plain JSON. Must not know stages or ports."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from harness.checkpoint.audit import Weights, audit_weights
from harness.checkpoint.container import Checkpoint, open_checkpoint
from harness.checkpoint.formats import format_problems, logical_tensors
from harness.checkpoint.header import Problem
from harness.checkpoint.plan import planned_bytes
from harness.checkpoint.problems import promise_problems
from harness.checkpoint.summary import is_head
from harness.errors import CheckpointError
from harness.precision.scheme import Precision
from harness.types import as_json


def checkpoint_facts(path: Path | str) -> dict[str, Any]:
    """Describe a checkpoint from its headers: problems, tensors, bytes, formats, and planned peak bytes by precision.

    `problems` are errors and stray files, `notes` what is odd or worth knowing and does not make it wrong. A folder
    that is no checkpoint at all is one problem of kind `not_a_checkpoint`.
    """
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        problem = {"kind": "not_a_checkpoint", "name": "", "file": str(path), "expected": "a checkpoint"}
        return {"problems": [{**problem, "found": str(error)}], "undecodable": [], "tensors": 0, "bytes": 0}
    logicals = logical_tensors(checkpoint)
    found = [*checkpoint.problems, *promise_problems(checkpoint)]
    return {
        "problems": [as_json(p) for p in found if _counts(p)],
        "notes": [as_json(p) for p in found if not _counts(p)],
        "undecodable": [as_json(p) for p in format_problems(checkpoint)],
        "tensors": len(checkpoint.tensors),
        "logical": len(logicals),
        "shards": len(checkpoint.headers),
        "bytes": checkpoint.nbytes,
        "formats": dict(Counter(x.format for x in logicals)),
        "planned_bytes": {d: planned_bytes(checkpoint, d) for d in ("bfloat16", "float16", "float32", "float64")},
    }


def _counts(problem: Problem) -> bool:
    return problem.severity == "error" or problem.kind == "stray_shard"


def audit_facts(
    path: Path | str, weights: Weights, dtype: torch.dtype | str, declared: Precision | None = None
) -> dict[str, Any]:
    """Audit the weights that a port holds against the checkpoint at `path` (see `audit.audit_weights`).

    Raises:
        CheckpointError: there is no checkpoint to hold them against.
    """
    checkpoint = open_checkpoint(path)
    return audit_weights(checkpoint, weights, tied=is_tied(checkpoint), dtype=dtype, declared=declared)


def is_tied(checkpoint: Checkpoint) -> bool:
    """Say whether the output head is the embedding: by the configuration, else because no head is stored."""
    config = checkpoint.config
    text = config.get("text_config")
    for owner in (text if isinstance(text, dict) else {}, config):
        if isinstance(owner.get("tie_word_embeddings"), bool):
            return bool(owner["tie_word_embeddings"])
    return not any(is_head(name) for name in checkpoint.tensors)
