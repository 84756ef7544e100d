"""Count what a checkpoint holds, by part of the model and by stored dtype. Knows names and sizes; no content.

A part is told by the words of a name, never by an architecture.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.expected import LAYERS, main_stack
from harness.checkpoint.names import Family, families, number, text_config, tower

PARTS = (
    "attention", "experts", "shared experts", "dense mlp", "embeddings", "head", "norms", "router", "indexer", "vision",
    "audio", "mtp", "other",
)  # fmt: skip
_WORDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("indexer", re.compile(r"(^|[._])indexer([._]|$)")),
    ("shared experts", re.compile(r"(^|[._])shared_(expert|mlp)|experts?_shared|shared_transformer")),
    ("router", re.compile(r"(^|\.)(gate|router|classifier|wg)(\.(weight|bias)|\.\w*bias|\.wg|\.classifier|$)|router|"
                          r"e_score_correction_bias|expert_bias|per_expert_scale")),
    ("experts", re.compile(r"(^|[._])experts?([._#]|$)|block_sparse_moe\.(w|input|output)")),
    ("head", re.compile(r"(^|\.)(lm_head|embed_out|output_projection|score|cls)(\.|$)|^(output|head)\.weight$")),
    ("embeddings", re.compile(r"embed|(^|\.)(wte|wpe)(\.|$)")),
    ("norms", re.compile(r"norm|(^|[._])ln(_\w+)?(\.|$)|(^|\.)layer_?norm")),
    ("attention", re.compile(r"attn|attention|mixer|mamba|ssm|time_mix|(^|\.)(q|k|v|o|qkv|out|in)_proj(\.|$)|A_log|"
                             r"dt_b|conv|sinks|mem_")),
    ("dense mlp", re.compile(r"mlp|ffn|feed_?forward|(^|\.)(fc\d|fc_in|fc_out|w[123]|wi|wo|gate_proj|up_proj|down_proj|"
                             r"dense_h_to_4h|dense_4h_to_h|channel_mix)(\.|_|$)")),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slice:
    """The weights of one family in one layer (None: in no layer of the text stack), of one format."""

    family: Family
    part: str
    layer: int | None
    format: str
    count: int
    stored: int
    nbytes: int
    parameters: int


def part_of(template: str) -> str:
    """Return the part of the model that a name or template belongs to."""
    place = tower(template)
    if place != "text":
        return place
    leaf = template.split("#.", 1)[1] if "#." in template else template
    return next((part for part, pattern in _WORDS if pattern.search(leaf)), "other")


def slices(checkpoint: Checkpoint) -> Sequence[Slice]:
    """Return every weight, gathered by family and layer of the text stack; worked out once."""
    if "slices" not in checkpoint.known:
        checkpoint.known["slices"] = tuple(_slices(checkpoint))
    found: Sequence[Slice] = checkpoint.known["slices"]
    return found


def text_stack(checkpoint: Checkpoint) -> str:
    """Return the stack of the text model's layers."""
    stacks: dict[str, list[Family]] = defaultdict(list)
    for family in families(checkpoint):
        if family.stack:
            stacks[family.stack].append(family)
    return main_stack(stacks)


def _slices(checkpoint: Checkpoint) -> list[Slice]:
    stack, tensors = text_stack(checkpoint), checkpoint.tensors
    said = number(text_config(checkpoint.config), *LAYERS)
    found = []
    for family in families(checkpoint):
        part, in_stack = part_of(family.template), bool(stack) and family.stack == stack
        sums: dict[tuple[int | None, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        for numbers, logical in family.members.items():
            sum_ = sums[numbers[0] if in_stack else None, logical.format]
            sum_[0] += 1
            for name in (*logical.parts.values(), *logical.extra):
                ref = tensors[name]
                sum_[1] += 1
                sum_[2] += ref.end - ref.begin
            sum_[3] += logical.numel
        for (layer, kind), (count, stored, nbytes, parameters) in sums.items():
            here = "mtp" if layer is not None and said is not None and layer >= said else part
            found.append(Slice(family, here, layer, kind, count, stored, nbytes, parameters))
    return found


def parts(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """Return tensors, parameters and bytes by part of the model; parts that are not there are left out."""
    found = {part: {"tensors": 0, "parameters": 0, "bytes": 0} for part in PARTS}
    for piece in slices(checkpoint):
        row = found[piece.part]
        row["tensors"] += piece.stored
        row["parameters"] += piece.parameters
        row["bytes"] += piece.nbytes
    return {part: row for part, row in found.items() if row["tensors"]}


def formats(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Return weights, parameters, bytes and the parts they lie in by format, most bytes first."""
    found: dict[str, dict[str, Any]] = {}
    for piece in slices(checkpoint):
        row = found.setdefault(piece.format, {"weights": 0, "parameters": 0, "bytes": 0, "parts": {}})
        row["weights"] += piece.count
        row["parameters"] += piece.parameters
        row["bytes"] += piece.nbytes
        row["parts"][piece.part] = None
    for row in found.values():
        row["parts"] = list(row["parts"])
    return dict(sorted(found.items(), key=lambda item: -item[1]["bytes"]))


def dtypes(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the bytes of each stored dtype, most first."""
    count: Counter[str] = Counter()
    for ref in checkpoint.tensors.values():
        count[ref.dtype] += ref.end - ref.begin
    return dict(count.most_common())


def biggest(checkpoint: Checkpoint, n: int = 8) -> list[dict[str, Any]]:
    """Return the largest stored tensors."""
    refs = heapq.nlargest(n, checkpoint.tensors.values(), key=lambda r: r.end - r.begin)
    return [
        {"tensor": r.name, "dtype": r.dtype, "shape": list(r.shape), "bytes": r.nbytes, "file": r.file} for r in refs
    ]
