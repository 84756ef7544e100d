"""Plan what each rank of a layout holds, and where cuts fall. Knows shapes, blocks and heads; must not know engines.

The usual way to cut is assumed and said: projections into heads or hidden units by rows, those back by columns,
experts whole over expert-parallel ranks, vocabularies by rows, layers in runs over pipeline stages, the sequence (and
its cache) over sequence-parallel ranks; norms, routers, indexers, latent projections and vision are held by every rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness import types
from harness.checkpoint.cache import LayerCache
from harness.checkpoint.container import Checkpoint
from harness.checkpoint.decoders import MX_BLOCK, NVFP4_BLOCK
from harness.checkpoint.expected import LAYERS, expert_count
from harness.checkpoint.header import Problem
from harness.checkpoint.names import number, text_config
from harness.checkpoint.parts import Slice, slices
from harness.checkpoint.recognise import Logical
from harness.errors import UsageError

MAX_RANKS = 65_536
_ROWS = re.compile(
    r"(^|[._])(q|k|v|qkv|gate|up|gate_up|q_b|kv_b|w1|w3|fc1|c_fc|c_attn|query|key|value|query_key_value|Wqkv|wi|wi_\d|"
    r"dense_h_to_4h|in_proj_\w+)(_proj)?(\.weight|\.bias|_bias)?$"
)
_COLUMNS = re.compile(r"(^|[._])(o|out|down|w2|fc2|wo|dense|dense_4h_to_h|c_proj|output)(_proj)?(\.weight)?$")
_KV = re.compile(r"(^|[._])(k|v|key|value)(_proj)?(\.weight|\.bias)?$")
_BY_HEAD = re.compile(r"(^|[._])(q|q_b|kv_b|query|o|out|wo)(_proj)?(\.weight|\.bias)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(types.Layout):
    """A layout that can be planned: expert ranks are the tensor ranks, or more."""

    def __post_init__(self) -> None:
        """Refuse what is no layout.

        Raises:
            UsageError: a degree is not positive, neither of tp and ep divides the other, or there are too many ranks.
        """
        if min(self.tp, self.ep, self.pp, self.sp) < 1:
            raise UsageError("expected degrees of at least 1 for --tp --ep --pp --sp")
        if self.tp % self.ep and self.ep % self.tp:
            raise UsageError(f"expected one of --tp {self.tp} and --ep {self.ep} to divide the other")
        if self.world_size > MAX_RANKS:
            raise UsageError(f"expected at most {MAX_RANKS} ranks, found {self.world_size}")

    @property
    def in_stage(self) -> int:
        """Ranks of one pipeline stage and one part of the sequence."""
        return max(self.tp, self.ep)


def runs(count: int, ranks: int) -> list[range]:
    """Divide `count` things in order over `ranks`; the first hold one more where it is not even."""
    each, more, start, found = count // ranks, count % ranks, 0, []
    for rank in range(ranks):
        size = each + (rank < more)
        found.append(range(start, start + size))
        start += size
    return found


@dataclass(frozen=True, slots=True)
class Cut:
    """How a weight is cut over tensor ranks. `axis` -1 is the input, -2 the output; `unit` is what must stay whole."""

    axis: int
    size: int
    unit: int
    block: int
    heads: int

    def share(self, rank: int, ranks: int) -> float:
        """Return the share of the weight that a rank holds, in whole units."""
        units = -(-self.size // self.unit)
        if self.heads and units < ranks:  # fewer heads than ranks: heads are repeated
            return 1 / units
        part = runs(units, ranks)[rank]
        return (min(self.size, part.stop * self.unit) - min(self.size, part.start * self.unit)) / max(1, self.size)


def cut_of(piece: Slice, config: Mapping[str, Any]) -> Cut | None:
    """Return how the weights of a family are cut, None where every rank holds them whole."""
    logical, name = piece.family.first, piece.family.template
    shape = logical.shape
    if piece.part in ("embeddings", "head") and len(shape) == 2:
        return Cut(-2, shape[0], 1, 1, 0) if shape[0] >= max(1, shape[1]) else None
    if piece.part not in ("attention", "dense mlp", "shared experts", "experts") or not shape or "_a_proj" in name:
        return None
    axis = -2 if _ROWS.search(name) else -1 if _COLUMNS.search(name) and len(shape) >= 2 else 0
    if not axis or not logical.numel or (axis == -2 and len(shape) == 1 and not name.endswith("bias")):
        return None
    size = shape[axis] if len(shape) >= 2 else shape[0]
    heads = _heads(name, config) if piece.part == "attention" else 0
    heads = heads if heads and size % heads == 0 else 0
    block = block_of(logical, axis) if len(shape) >= 2 else 1
    unit = math.lcm(size // heads, block) if heads else block
    return Cut(axis, size, unit if unit <= size else size, block, heads)


def _heads(name: str, config: Mapping[str, Any]) -> int:
    heads = number(config, "num_attention_heads", "n_head", "num_heads", "n_heads") or 0
    if _KV.search(name):
        return number(config, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads
    return heads if _BY_HEAD.search(name) else 0


def block_of(logical: Logical, axis: int) -> int:
    """Return how many elements along the output (-2) or the input (-1) share a scale or a stored word."""
    kind, options = logical.format, logical.options
    if kind == "fp8_block" and options.get("block"):
        return int(options["block"][axis])
    if axis == -2:
        return 8 if kind == "awq" else 1
    if kind in ("mxfp4", "mxfp4_blocks", "mxfp8"):
        return MX_BLOCK
    if kind.startswith("nvfp4"):
        return NVFP4_BLOCK
    return int(options.get("group") or 1) if kind in ("int4_packed", "awq", "gptq_v1", "gptq_v2") else 1


def cut_problems(checkpoint: Checkpoint, layout: Layout) -> list[Problem]:
    """List the cuts of a layout that an even division puts through a block or a head; one for each kind of weight."""
    config, found, seen = text_config(checkpoint.config), [], set()
    ranks = layout.tp
    for piece in slices(checkpoint):
        within = layout.tp // layout.ep if piece.part == "experts" and layout.ep > 1 else ranks
        key = (piece.family.template, within)
        if within <= 1 or key in seen:
            continue
        seen.add(key)
        cut = cut_of(piece, config)
        if cut is not None:
            found += list(_through(checkpoint, piece, cut, within))
    experts = expert_count(config)
    if experts and experts % layout.ep:
        words = f"{experts} experts over {layout.ep} ranks: {-(-experts // layout.ep)} on the first"
        found.append(_cut_problem("uneven_experts", "", "as many experts on each rank", words, "note"))
    return found


def _cut_problem(kind: str, name: str, expected: str, found: str, severity: str = "warning", **place: Any) -> Problem:
    place.setdefault("file", "")
    return Problem(kind=kind, name=name, expected=expected, found=found, severity=severity, **place)


def _through(checkpoint: Checkpoint, piece: Slice, cut: Cut, ranks: int) -> Iterator[Problem]:
    logical = piece.family.first
    ref = checkpoint.tensors[logical.parts["weight"]]
    what = ("rows", "output") if cut.axis == -2 else ("columns", "input")
    at = -(-cut.size // ranks)
    more = f" (and {len(piece.family.members) - 1} like it)" if len(piece.family.members) > 1 else ""
    place: dict[str, Any] = {"file": ref.file, "offset": ref.begin}
    if cut.heads and cut.heads % ranks and ranks % cut.heads:
        each = cut.size // cut.heads
        expected = f"tp {ranks} to divide {cut.heads} heads"
        found = f"{cut.size} {what[0]} cut at {at}, inside a head of {each}{more}"
        yield _cut_problem("cut_through_head", logical.name, expected, found, **place)
    repeated = cut.heads and cut.heads < ranks
    if cut.block > 1 and at % cut.block and not repeated and cut.size > cut.block:
        expected = f"cuts of the {what[1]} at multiples of the block of {cut.block}"
        found = f"tp {ranks} cuts {cut.size} {what[0]} at {at}, which is {at / cut.block:g} blocks{more}"
        yield _cut_problem("cut_through_block", logical.name, expected, found, **place)
    elif cut.block > 1 and cut.size <= cut.block and ranks > 1:
        expected = f"blocks of {cut.block} along the {what[1]} to be cut"
        found = f"{cut.size} {what[0]}, which is one block for {ranks} ranks{more}"
        yield _cut_problem("cut_through_block", logical.name, expected, found, **place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What one rank of a layout holds. Bytes are of stored weights; `cache_bytes` of one request at the context."""

    rank: int
    pp: int
    tp: int
    ep: int
    sp: int
    layers: tuple[int, int]
    weight_bytes: int
    cache_bytes: int


def plan_ranks(checkpoint: Checkpoint, layout: Layout, caches: list[LayerCache], context: int) -> list[Rank]:
    """Return what each rank holds, in order of pipeline stage, sequence part and rank within the stage."""
    config = text_config(checkpoint.config)
    held = [p.layer for p in slices(checkpoint) if p.layer is not None and p.part != "mtp"]
    total = number(config, *LAYERS)
    total = total if total is not None and total <= 100_000 else max(held, default=-1) + 1
    stages, experts = runs(total, layout.pp), expert_count(config) or 0
    found: list[Rank] = []
    for stage, layers in enumerate(stages):
        pieces = [p for p in slices(checkpoint) if _stage(p, stages, layout.pp) == stage]
        weights = [_held(pieces, layout, config, experts, place) for place in range(layout.in_stage)]
        tokens = -(-context // layout.sp)
        cache = sum(caches[n].bytes(tokens, tp=layout.tp) for n in layers if n < len(caches))
        for sp in range(layout.sp):
            for place in range(layout.in_stage):
                found.append(
                    Rank(
                        rank=len(found), pp=stage, tp=place % layout.tp, ep=place % layout.ep, sp=sp,
                        layers=(layers.start, layers.stop), weight_bytes=weights[place], cache_bytes=cache,
                    )
                )  # fmt: skip
    return found


def _stage(piece: Slice, stages: list[range], pp: int) -> int:
    if piece.layer is not None and piece.part != "mtp":
        return next((i for i, layers in enumerate(stages) if piece.layer in layers), pp - 1)
    first = piece.part in ("embeddings", "vision", "audio")
    return 0 if first else pp - 1


def _held(pieces: list[Slice], layout: Layout, config: Mapping[str, Any], experts: int, place: int) -> int:
    total = 0.0
    for piece in pieces:
        share = 1.0
        if piece.part == "experts":
            within = max(1, layout.tp // layout.ep) if layout.ep > 1 else layout.tp
            if layout.ep > 1:
                count = experts or layout.ep
                share = len(runs(count, layout.ep)[place % layout.ep]) / count
            cut = cut_of(piece, config) if within > 1 else None
            share *= cut.share(place // layout.ep % within if layout.ep > 1 else place, within) if cut else 1.0
        elif layout.tp > 1 and (cut := cut_of(piece, config)) is not None:
            share = cut.share(place % layout.tp, layout.tp)
        total += piece.nbytes * share
    return round(total)
