"""Which tensors a rank holds, in which form, and what they will cost. Knows names and shapes; must not know values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from accel_impl.config import Config
from accel_impl.formats import EXPERT_BLOCK, MX_BLOCK
from accel_impl.parallel import Place

PLAIN, EXACT, FP8, MXFP4 = "plain", "exact", "fp8", "mxfp4"
"""Forms: in the port's dtype; float32 as stored; FP8 with block scales; MXFP4 at rest and FP8 in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One parameter. `name` is the checkpoint's, without the suffix of a quantised form; `shape` is that of all ranks.

    `rows` (one or more ranges) and `cols` are this rank's part.
    """

    name: str
    shape: tuple[int, ...]
    form: str
    rows: tuple[range, ...] = ()
    cols: range | None = None

    @property
    def stored(self) -> dict[str, tuple[int, ...]]:
        """Tensors of the checkpoint and their shapes, the main one first."""
        if self.form == MXFP4:
            rows, cols = self.shape
            return {f"{self.name}_packed": (rows, cols // 2), f"{self.name}_scale": (rows, cols // MX_BLOCK)}
        return {self.name: self.shape}

    @property
    def local(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        rows = sum(len(r) for r in self.rows) if self.rows else self.shape[0]
        if len(self.shape) == 1:
            return (rows,)
        return (rows, len(self.cols) if self.cols is not None else self.shape[1], *self.shape[2:])


AHEAD = 4
"""Parameters that are read before they are converted, at most; as many threads read them."""


def stored_names(param: Param) -> list[str]:
    """Return the tensors of the checkpoint that a parameter is made of, the main one first."""
    return [*param.stored, *([f"{param.name}_scale_inv"] if param.form == FP8 else [])]


def known_names(config: Config) -> set[str]:
    """Return every tensor that a checkpoint may have, those that this configuration does not use among them."""
    indexed = replace(config, index_policies=tuple("importance" for _ in config.index_policies))
    return {name for param in params(indexed, Place()) for name in stored_names(param)}


def params(config: Config, place: Place) -> Iterator[Param]:
    """Yield every parameter that this rank holds."""
    hidden, further = config.hidden_size, config.further
    if place.first or (place.last and further is not None):
        yield Param(name="model.embed_tokens.weight", shape=(config.vocab_size, hidden), form=PLAIN)
    if place.first:
        yield from _vision(config, place)
    for layer in place.layers(config.num_hidden_layers):
        yield from _layer(config, place, layer)
    if place.last and further is not None:
        yield from _further(config, place, further)
    if place.last:
        yield Param(name="model.final_res.query", shape=(hidden,), form=EXACT)
        yield Param(name="model.norm.weight", shape=(hidden,), form=PLAIN)
        rows = (place.cut(config.vocab_size),)
        yield Param(name="lm_head.weight", shape=(config.vocab_size, hidden), form=PLAIN, rows=rows)


def _layer(config: Config, place: Place, layer: int) -> Iterator[Param]:
    prefix, hidden = f"model.layers.{layer}", config.hidden_size
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield Param(name=f"{prefix}.{norm}.weight", shape=(hidden,), form=PLAIN)
    if layer < config.num_hidden_layers:
        for mix in ("attn_res", "mlp_res") if layer else ("mlp_res",):
            yield Param(name=f"{prefix}.{mix}.query", shape=(hidden,), form=EXACT)
    if config.is_recurrent(layer):
        yield from _recurrent(config, place, f"{prefix}.linear_attn")
    else:
        yield from _attention(config, place, f"{prefix}.self_attn")
        if config.policy(layer) != "random":
            yield from _indexer(config, f"{prefix}.self_attn.indexer")
        if config.vision is not None and layer < config.num_hidden_layers:
            latent = config.kv_lora_rank
            yield Param(name=f"{prefix}.self_attn.visual_kv_proj.weight", shape=(latent, hidden), form=PLAIN)
            yield Param(name=f"{prefix}.self_attn.visual_norm.weight", shape=(latent,), form=PLAIN)
    yield from _dense(config, place, prefix) if config.is_dense(layer) else _moe(config, place, prefix)


def _further(config: Config, place: Place, layer: int) -> Iterator[Param]:
    prefix, hidden = f"model.layers.{layer}", config.hidden_size
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield Param(name=f"{prefix}.{norm}.weight", shape=(hidden,), form=PLAIN)
    yield Param(name=f"{prefix}.eh_proj.weight", shape=(hidden, 2 * hidden), form=PLAIN)
    yield from _layer(config, place, layer)


def _recurrent(config: Config, place: Place, prefix: str) -> Iterator[Param]:
    hidden, heads, width = config.hidden_size, config.linear_num_heads, config.linear_head_dim
    heads_here = place.cut(heads)
    mine, whole = _times(heads_here, width), heads * width
    for name in ("q_proj", "k_proj", "v_proj"):
        yield Param(name=f"{prefix}.{name}.weight", shape=(whole, hidden), form=FP8, rows=(mine,))
    channels = tuple(range(part * whole + mine.start, part * whole + mine.stop) for part in range(3))
    taps = (3 * whole, 1, config.linear_conv_kernel_dim)
    yield Param(name=f"{prefix}.conv1d.weight", shape=taps, form=PLAIN, rows=channels)
    for name in ("f", "g"):
        yield Param(name=f"{prefix}.{name}_a_proj.weight", shape=(width, hidden), form=PLAIN)
        yield Param(name=f"{prefix}.{name}_b_proj.weight", shape=(whole, width), form=PLAIN, rows=(mine,))
    yield Param(name=f"{prefix}.b_proj.weight", shape=(heads, hidden), form=PLAIN, rows=(heads_here,))
    yield Param(name=f"{prefix}.A_log", shape=(heads,), form=EXACT, rows=(heads_here,))
    yield Param(name=f"{prefix}.dt_bias", shape=(whole,), form=EXACT, rows=(mine,))
    yield Param(name=f"{prefix}.o_norm.weight", shape=(width,), form=PLAIN)
    yield Param(name=f"{prefix}.o_proj.weight", shape=(hidden, whole), form=FP8, cols=mine)


def _attention(config: Config, place: Place, prefix: str) -> Iterator[Param]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    mine = place.cut(heads)
    q_out, kv_out, v = config.head_dim, config.qk_nope_head_dim + config.v_head_dim, config.v_head_dim
    kv_a = config.kv_lora_rank + config.qk_rope_head_dim
    yield Param(name=f"{prefix}.q_a_proj.weight", shape=(config.q_lora_rank, hidden), form=FP8)
    yield Param(name=f"{prefix}.q_a_layernorm.weight", shape=(config.q_lora_rank,), form=PLAIN)
    yield Param(
        name=f"{prefix}.q_b_proj.weight",
        shape=(heads * q_out, config.q_lora_rank),
        form=FP8,
        rows=(_times(mine, q_out),),
    )
    yield Param(name=f"{prefix}.kv_a_proj_with_mqa.weight", shape=(kv_a, hidden), form=FP8)
    yield Param(name=f"{prefix}.kv_a_layernorm.weight", shape=(config.kv_lora_rank,), form=PLAIN)
    yield Param(
        name=f"{prefix}.kv_b_proj.weight",
        shape=(heads * kv_out, config.kv_lora_rank),
        form=FP8,
        rows=(_times(mine, kv_out),),
    )
    yield Param(name=f"{prefix}.o_proj.weight", shape=(hidden, heads * v), form=FP8, cols=_times(mine, v))
    yield Param(name=f"{prefix}.sinks", shape=(heads,), form=EXACT, rows=(mine,))


def _indexer(config: Config, index: str) -> Iterator[Param]:
    hidden, width = config.hidden_size, config.index_head_dim
    yield Param(name=f"{index}.wq_b.weight", shape=(config.index_n_heads * width, config.q_lora_rank), form=PLAIN)
    yield Param(name=f"{index}.wk.weight", shape=(width, hidden), form=PLAIN)
    yield Param(name=f"{index}.k_norm.weight", shape=(width,), form=PLAIN)
    yield Param(name=f"{index}.k_norm.bias", shape=(width,), form=PLAIN)
    yield Param(name=f"{index}.weights_proj.weight", shape=(config.index_n_heads, hidden), form=PLAIN)


def _times(heads: range, width: int) -> range:
    return range(heads.start * width, heads.stop * width)


def _gated(prefix: str, hidden: int, width: int, form: str, mine: range) -> Iterator[Param]:
    for name in ("gate_proj", "up_proj"):
        yield Param(name=f"{prefix}.{name}.weight", shape=(width, hidden), form=form, rows=(mine,))
    yield Param(name=f"{prefix}.down_proj.weight", shape=(hidden, width), form=form, cols=mine)


def _dense(config: Config, place: Place, prefix: str) -> Iterator[Param]:
    width = config.intermediate_size
    mine = place.cut(width, unit=config.block[0]) if place.layout.tp > 1 else range(width)
    yield from _gated(f"{prefix}.mlp", config.hidden_size, width, FP8, mine)


def _moe(config: Config, place: Place, prefix: str) -> Iterator[Param]:
    hidden, experts, width = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size
    yield Param(name=f"{prefix}.mlp.gate.weight", shape=(experts, hidden), form=PLAIN)
    yield Param(name=f"{prefix}.mlp.gate.e_score_correction_bias", shape=(experts,), form=EXACT)
    mine = place.expert_cut(width, unit=MX_BLOCK)
    for expert in place.experts(experts):
        yield from _gated(f"{prefix}.mlp.experts.{expert}", hidden, width, MXFP4, mine)
    shared = config.shared_size
    yield from _gated(f"{prefix}.mlp.shared_experts", hidden, shared, PLAIN, place.cut(shared, unit=MX_BLOCK))


def _vision(config: Config, place: Place) -> Iterator[Param]:
    vision = config.vision
    if vision is None:
        return
    width, head = vision.hidden_size, vision.hidden_size // vision.num_heads
    heads, inner = _times(place.cut(vision.num_heads), head), place.cut(vision.intermediate_size)
    qkv = tuple(range(part * width + heads.start, part * width + heads.stop) for part in range(3))

    def linear(
        name: str, out: int, into: int, rows: tuple[range, ...] = (), cols: range | None = None
    ) -> Iterator[Param]:
        yield Param(name=f"visual.{name}.weight", shape=(out, into), form=PLAIN, rows=rows, cols=cols)
        yield Param(name=f"visual.{name}.bias", shape=(out,), form=PLAIN, rows=rows)

    def norm(name: str, size: int) -> Iterator[Param]:
        for part in ("weight", "bias"):
            yield Param(name=f"visual.{name}.{part}", shape=(size,), form=PLAIN)

    kernel = (width, 3, vision.patch_size, vision.patch_size)
    yield Param(name="visual.patch_embed.weight", shape=kernel, form=PLAIN)
    yield Param(name="visual.patch_embed.bias", shape=(width,), form=PLAIN)
    yield Param(name="visual.pos_embed", shape=(*vision.pos_embed_grid, width), form=PLAIN)
    for index in range(vision.depth):
        block = f"blocks.{index}"
        yield from norm(f"{block}.norm1", width)
        yield from norm(f"{block}.norm2", width)
        yield from linear(f"{block}.attn.qkv", 3 * width, width, rows=qkv)
        yield from linear(f"{block}.attn.proj", width, width, cols=heads)
        yield from linear(f"{block}.mlp.fc1", vision.intermediate_size, width, rows=(inner,))
        yield from linear(f"{block}.mlp.fc2", width, vision.intermediate_size, cols=inner)
    yield from norm("norm", width)
    merged, outlets = vision.merged_features, range(len(vision.deepstack_visual_indexes))
    for name in ("merger", *(f"deepstack.{index}" for index in outlets)):
        if name != "merger":
            yield from norm(f"{name}.norm", merged)
        yield from linear(f"{name}.fc1", merged, merged)
        yield from linear(f"{name}.fc2", config.hidden_size, merged)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes that loading will take: what stays, the conversion workspace, the largest tensors in flight."""

    resident_bytes: int
    workspace_bytes: int
    transient_bytes: int
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """Everything at once."""
        return self.resident_bytes + self.workspace_bytes + self.transient_bytes


def memory_plan(config: Config, place: Place, dtype: torch.dtype) -> MemoryPlan:
    """Work out the cost of loading from shapes alone."""
    parts: dict[str, int] = dict.fromkeys((PLAIN, EXACT, FP8, MXFP4), 0)
    flying: list[int] = []
    workspace = 0
    for param in params(config, place):
        count, whole = math.prod(param.local), math.prod(param.shape)
        if param.form == PLAIN:
            parts[PLAIN] += count * dtype.itemsize
            flying.append(2 * whole)
        elif param.form == EXACT:
            parts[EXACT] += count * 4
            flying.append(4 * whole)
        elif param.form == FP8:
            parts[FP8] += count + 4 * _fp8_scales(param, config.block)
            grid = math.prod(-(-n // b) for n, b in zip(param.shape, config.block, strict=True))
            flying.append(whole + 4 * grid)
        else:
            rows, cols = param.local
            parts[MXFP4] += count + -(-rows // EXPERT_BLOCK[0]) * -(-cols // EXPERT_BLOCK[1])
            workspace = max(workspace, 4 * whole)
            flying.append(whole // 2 + whole // MX_BLOCK)
    return MemoryPlan(
        resident_bytes=sum(parts.values()),
        workspace_bytes=workspace,
        transient_bytes=max((sum(flying[n : n + AHEAD]) for n in range(len(flying))), default=0),
        parts=parts,
    )


def _fp8_scales(param: Param, block: tuple[int, int]) -> int:
    rows = param.rows[0] if param.rows else range(param.shape[0])
    cols = param.cols if param.cols is not None else range(param.shape[1])
    return math.prod((r.stop - 1) // b - r.start // b + 1 for r, b in zip((rows, cols), block, strict=True))
