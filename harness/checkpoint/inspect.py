"""Say what a checkpoint is, what is wrong with it and what it takes, from headers alone. Must not know ports or limits.

The result is plain JSON; how it looks is for a report to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.checkpoint.bulk import many_records
from harness.checkpoint.cache import CACHE_BYTES, layer_caches
from harness.checkpoint.container import Checkpoint, open_checkpoint
from harness.checkpoint.declared import declared
from harness.checkpoint.header import Problem
from harness.checkpoint.layout import Layout, Rank, cut_problems, plan_ranks
from harness.checkpoint.parts import biggest, dtypes, formats, parts, slices
from harness.checkpoint.problems import checkpoint_problems
from harness.types import as_json, from_json

RUNTIME_BYTES = 1 << 30
"""Allowance on a card for a context, libraries and buffers of collectives."""
ASSUMED = (
    "the cache is bfloat16, recurrent states float32; activations and graphs are not counted",
    "cut as usual: heads and hidden units over tp, whole experts over ep, runs of layers over pp, the sequence over sp",
    "held whole by every rank: norms, routers, indexers, latent projections, vision; heads are repeated when too few",
)


def inspect(
    path: Path | str,
    *,
    layout: Layout | None = None,
    context: int = 32_768,
    card_gib: float | None = None,
    read: Callable[[Checkpoint], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Inspect a checkpoint from its headers, and from what `read` says of its content (see `scan.content_facts`).

    Units: `context` in tokens, `card_gib` in GiB of one card.

    Returns:
        JSON: `checkpoint` `tensors` `shards` `bytes` `parameters` `quantisation` `formats` `dtypes` `parts` `biggest`
        `problems` (`severity` `kind` `tensor` `file` `offset` `message`), `plan`, and `content` if it was read.

    Raises:
        CheckpointError: there is no checkpoint.
        UsageError: the layout is none.
    """
    layout = layout or Layout()
    with many_records():
        checkpoint = open_checkpoint(path)
        problems = checkpoint_problems(checkpoint)
        plan = _plan(checkpoint, layout, context, card_gib)
        problems += cut_problems(checkpoint, layout)
        says, by_part = declared(checkpoint), parts(checkpoint)
        told = [_told(p) for p in problems]
        content = {} if read is None else {"content": read(checkpoint)}
        told += _content_problems(content.get("content", {}))
        return {
            "checkpoint": str(checkpoint.path),
            "tensors": len(checkpoint.tensors),
            "shards": len(checkpoint.headers),
            "bytes": checkpoint.nbytes,
            "parameters": sum(row["parameters"] for row in by_part.values()),
            "quantisation": {"method": says.method, "formats": list(says.formats), "source": says.source},
            "formats": formats(checkpoint),
            "dtypes": dtypes(checkpoint),
            "parts": by_part,
            "biggest": biggest(checkpoint),
            "problems": told,
            "plan": plan,
            **content,
        }


def _told(problem: Problem) -> dict[str, Any]:
    return {
        "severity": problem.severity,
        "kind": problem.kind,
        "tensor": problem.name,
        "file": problem.file,
        "offset": problem.offset,
        "message": problem.message,
    }


def _content_problems(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a pass over the content found as problems; suspicions are notes: they prove nothing."""
    found = [_told(from_json(Problem, p)) for p in content.get("problems", ())]
    rates = content.get("false_alarms", {})
    suspects = [
        {
            "severity": "note", "kind": f"suspicious_{s['kind']}", "tensor": s["name"], "file": s["file"],
            "offset": s["offset"], "message": f"{s['message']} ({rates.get(s['kind'], 'false alarms not known')})",
        }
        for s in content.get("suspicions", ())
    ]  # fmt: skip
    return found + suspects


def clean(inspection: dict[str, Any]) -> bool:
    """Say whether nothing worse than a note was found."""
    return not any(p["severity"] != "note" for p in inspection["problems"])


def _plan(checkpoint: Checkpoint, layout: Layout, context: int, card_gib: float | None) -> dict[str, Any]:
    caches, unknown = layer_caches(checkpoint)
    ranks = plan_ranks(checkpoint, layout, caches, context)
    workspace = _workspace(checkpoint)
    kinds = Counter(caches)
    return {
        "layout": as_json(layout),
        "context": context,
        "cache": {
            "bytes_per_token": sum(c.bytes_per_token for c in caches if not c.window),
            "bytes_per_request": sum(c.bytes(context) for c in caches),
            "layers": [{**as_json(kind), "count": count} for kind, count in kinds.items()],
            "element_bytes": CACHE_BYTES,
            "unknown": unknown,
        },
        "workspace": workspace,
        "ranks": _ranks(ranks, workspace, layout, card_gib),
        "card_gib": card_gib,
        "assumed": list(ASSUMED),
    }


def _workspace(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what converting takes: a weight decoded in float32 and its rounded copy, a layer of experts in FP8."""
    name, most, layers = "", 0, Counter[int | None]()
    for piece in slices(checkpoint):
        logical = piece.family.first
        if logical.quantised and logical.numel * 6 > most:
            name, most = logical.name, logical.numel * 6
        if logical.format in ("mxfp4", "mxfp4_blocks") and piece.layer is not None:
            layers[piece.layer] += piece.parameters
    return {"weight": name, "decode_bytes": most, "layer_fp8_bytes": max(layers.values(), default=0)}


def _ranks(
    ranks: Sequence[Rank], workspace: dict[str, Any], layout: Layout, card_gib: float | None
) -> list[dict[str, Any]]:
    share = max(layout.tp, layout.ep)
    convert = workspace["decode_bytes"] + -(-workspace["layer_fp8_bytes"] // share)
    result = []
    for rank in ranks:
        total = rank.weight_bytes + rank.cache_bytes + convert + RUNTIME_BYTES
        fits = None if card_gib is None else total <= card_gib * (1 << 30)
        result.append({**as_json(rank), "workspace_bytes": convert, "total_bytes": total, "fits": fits})
    return result
