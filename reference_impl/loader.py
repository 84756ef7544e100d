"""Reads the sharded checkpoint. Knows shards and formats; must not know the model's code or how the files were made.

The decoders work on bits and share nothing with `encoders.py`, which wrote them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from harness.errors import CheckpointError
from reference_impl.config import Config

LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
INDEX, ONE_FILE = "model.safetensors.index.json", "model.safetensors"
FP8 = (
    *(f".linear_attn.{p}" for p in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f".self_attn.{p}" for p in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
    *(f".mlp.{p}" for p in ("gate_proj", "up_proj", "down_proj")),
)
"""Ends of the names of linears that are stored in FP8, `.weight` left out."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def load_weights(checkpoint: Path, config: Config) -> tuple[dict[str, Tensor], list[str]]:
    """Read and decode every parameter of the model; quantised ones come as `X.weight` in float32.

    Also returns the tensors that no layer uses: an indexer's where keys are chosen at random, a mix of the first layer.
    Raises CheckpointError if a shard or a tensor is missing, left over, or of another shape.
    """
    stored = _read_shards(checkpoint)
    weights: dict[str, Tensor] = {}
    wanted: set[str] = set()
    for name, shape in parameter_shapes(config).items():
        sources = _sources(name, config)
        wanted |= set(sources)
        missing = [s for s in sources if s not in stored]
        if missing:
            raise CheckpointError(
                f"expected the tensor {missing[0]} in {checkpoint}, found none; the checkpoint is incomplete"
            )
        weight = _decode([stored[s] for s in sources], config)
        if tuple(weight.shape) != shape:
            raise CheckpointError(f"expected {name} of shape {shape} in {checkpoint}, found {tuple(weight.shape)}")
        weights[name] = weight
    unused = sorted(set(stored) - wanted)
    beyond = [name for name in unused if not _spare(name, config)]
    if beyond:
        raise CheckpointError(f"expected no tensors beyond the model's in {checkpoint}, found {', '.join(beyond[:5])}")
    return weights, unused


def _spare(name: str, config: Config) -> bool:
    """Say whether a tensor is of an indexer that chooses nothing, or mixes for a layer that has become the first."""
    layers = [n for n, policy in enumerate(config.index_policies) if policy == "random"]
    indexers = tuple(f"model.layers.{n}.self_attn.indexer." for n in layers)
    return name.startswith(indexers) or name == "model.layers.0.attn_res.query"


def source_name(name: str, config: Config) -> str:
    """Return the checkpoint's name of the tensor that holds a parameter's values."""
    return _sources(name, config)[0]


def _read_shards(checkpoint: Path) -> dict[str, Tensor]:
    """Read every tensor that the index names, each from the shard that it names; of one file without index, all."""
    from safetensors import SafetensorError, safe_open

    index = checkpoint / INDEX
    if not index.exists() and (checkpoint / ONE_FILE).exists():
        try:
            with safe_open(checkpoint / ONE_FILE, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (the reader is no mapping)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"expected a whole safetensors file at {checkpoint / ONE_FILE}, found: {error}"
            ) from error
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"expected an index with a weight_map at {index}, found: {error!r}") from error
    names_by_shard: dict[str, list[str]] = defaultdict(list)
    for name, shard in weight_map.items():
        if Path(shard).name != shard:
            raise CheckpointError(f"expected plain file names in {index}, found {shard!r} for {name}")
        names_by_shard[shard].append(name)
    stored: dict[str, Tensor] = {}
    for shard, names in sorted(names_by_shard.items()):
        try:
            with safe_open(checkpoint / shard, framework="pt") as file:
                held: set[str] = set(file.keys())
                if held != set(names):
                    odd = sorted(held ^ set(names))[0]
                    raise CheckpointError(f"expected {shard} to hold what {INDEX} says; they differ on {odd}")
                stored |= {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"expected a whole safetensors file at {checkpoint / shard}, found: {error}"
            ) from error
    return stored


def _sources(name: str, config: Config) -> list[str]:
    """Return the stored tensors that a parameter is made of."""
    base = name.removesuffix(".weight")
    if ".mlp.experts." in name:
        return [f"{base}.weight_packed", f"{base}.weight_scale"]
    if base.endswith(FP8):
        return [name, f"{base}.weight_scale_inv"]
    return [name]


def _decode(parts: list[Tensor], config: Config) -> Tensor:
    """Decode by what is stored: one tensor is plain, bytes with bytes are MXFP4, FP8 with float32 is block FP8."""
    if len(parts) == 1:
        return parts[0].float()
    values, scale = parts
    if values.dtype == torch.uint8 and scale.dtype == torch.uint8:
        return decode_mxfp4(values, scale)
    if values.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32:
        return decode_fp8_block(values.view(torch.uint8), scale, config.weight_block_size)
    raise CheckpointError(f"expected U8 with U8 (MXFP4) or F8_E4M3 with F32, found {values.dtype} with {scale.dtype}")


def decode_fp8_block(codes: Tensor, scale_inv: Tensor, block: tuple[int, int]) -> Tensor:
    """Decode E4M3 bytes with one multiplier per block; edge blocks are partial.

    Shapes: codes [O, I] uint8, scale_inv [ceil(O / block[0]), ceil(I / block[1])] float32 -> [O, I] float32.
    Source: OCP 8-bit Floating Point Specification 1.0, table 1 (bias 7, no infinities, S.1111.111 is NaN).
    """
    bits = codes.int()
    sign = 1.0 - 2.0 * (bits >> 7)
    exponent, fraction = (bits >> 3) & 15, bits & 7
    magnitude = torch.where(
        exponent == 0, torch.ldexp(fraction.float(), torch.tensor(-9)), torch.ldexp(8.0 + fraction, exponent - 10)
    )
    magnitude[(bits & 127) == 127] = float("nan")
    rows, columns = codes.shape
    grid = scale_inv.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return sign * magnitude * grid


def decode_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Decode packed E2M1 (low nibble first) with one power of two per 32 inputs.

    Shapes: packed [O, I/2] uint8, scale [O, I/32] uint8 -> [O, I] float32.
    Source: OCP Microscaling Formats v1.0 (E2M1, E8M0 of bias 127, 255 is NaN).
    """
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    values = torch.tensor(E2M1)[codes.long()]
    factor = torch.ldexp(torch.ones(scale.shape), scale.int() - 127)
    factor[scale == 255] = float("nan")
    return values * factor.repeat_interleave(32, dim=-1)


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the model, decoded, by name."""
    c, hidden = config, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, hidden)}
    for n in range(c.num_hidden_layers + c.num_nextn_predict_layers):
        shapes |= {f"model.layers.{n}.{k}": v for k, v in _layer_shapes(c, n).items()}
    shapes |= {"model.final_res.query": (hidden,), "model.norm.weight": (hidden,)}
    shapes["lm_head.weight"] = (c.vocab_size, hidden)
    return shapes | {f"visual.{k}": v for k, v in _vision_shapes(c).items()}


def _layer_shapes(c: Config, n: int) -> dict[str, tuple[int, ...]]:
    hidden, further = c.hidden_size, n >= c.num_hidden_layers
    shapes: dict[str, tuple[int, ...]] = {f"{k}.weight": (hidden,) for k in LAYER_NORMS}
    if further:
        shapes |= {f"{k}.weight": (hidden,) for k in ("enorm", "hnorm", "shared_head.norm")}
        shapes["eh_proj.weight"] = (hidden, 2 * hidden)
    else:
        shapes |= {f"{k}.query": (hidden,) for k in (("attn_res", "mlp_res") if n else ("mlp_res",))}
    if not c.is_sparse(n):
        shapes |= {f"linear_attn.{k}": v for k, v in _recurrent_shapes(c).items()}
    else:
        shapes |= {f"self_attn.{k}": v for k, v in _sparse_shapes(c, pictures=not further).items()}
        if c.index_policy(n) == "random":
            shapes = {k: v for k, v in shapes.items() if ".indexer." not in k}
    if c.is_dense(n):
        return shapes | _gated("mlp", hidden, c.intermediate_size)
    shapes["mlp.gate.weight"] = (c.n_routed_experts, hidden)
    shapes["mlp.gate.e_score_correction_bias"] = (c.n_routed_experts,)
    for e in range(c.n_routed_experts):
        shapes |= _gated(f"mlp.experts.{e}", hidden, c.moe_intermediate_size)
    return shapes | _gated("mlp.shared_experts", hidden, c.moe_intermediate_size * c.n_shared_experts)


def _gated(at: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}.gate_proj.weight": (inner, hidden),
        f"{at}.up_proj.weight": (inner, hidden),
        f"{at}.down_proj.weight": (hidden, inner),
    }


def _recurrent_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    hidden, width, head = c.hidden_size, c.linear_width, c.linear_head_dim
    return {
        **{f"{k}_proj.weight": (width, hidden) for k in ("q", "k", "v")},
        "conv1d.weight": (3 * width, 1, c.linear_conv_kernel_dim),
        **{f"{k}_a_proj.weight": (head, hidden) for k in ("f", "g")},
        **{f"{k}_b_proj.weight": (width, head) for k in ("f", "g")},
        "b_proj.weight": (c.linear_num_heads, hidden),
        "A_log": (c.linear_num_heads,),
        "dt_bias": (width,),
        "o_norm.weight": (head,),
        "o_proj.weight": (hidden, width),
    }


def _sparse_shapes(c: Config, *, pictures: bool) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = c.hidden_size, c.num_attention_heads, c.kv_lora_rank
    visual: dict[str, tuple[int, ...]] = {"visual_kv_proj.weight": (rank, hidden), "visual_norm.weight": (rank,)}
    return {
        **(visual if pictures else {}),
        "q_a_proj.weight": (c.q_lora_rank, hidden),
        "q_a_layernorm.weight": (c.q_lora_rank,),
        "q_b_proj.weight": (heads * c.qk_head_dim, c.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (c.kv_lora_rank + c.qk_rope_head_dim, hidden),
        "kv_a_layernorm.weight": (c.kv_lora_rank,),
        "kv_b_proj.weight": (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "o_proj.weight": (hidden, heads * c.v_head_dim),
        "sinks": (heads,),
        "indexer.wq_b.weight": (c.index_n_heads * c.index_head_dim, c.q_lora_rank),
        "indexer.wk.weight": (c.index_head_dim, hidden),
        "indexer.k_norm.weight": (c.index_head_dim,),
        "indexer.k_norm.bias": (c.index_head_dim,),
        "indexer.weights_proj.weight": (c.index_n_heads, hidden),
    }


def _vision_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    v = c.vision
    hidden, merged = v.hidden_size, v.hidden_size * v.spatial_merge_size**2
    kernel = (hidden, 3, v.patch_size, v.patch_size)
    sizes: dict[str, tuple[int, ...]] = {"patch_embed": kernel, "norm": (hidden,)}
    for n in range(v.depth):
        sizes |= {
            f"blocks.{n}.norm1": (hidden,),
            f"blocks.{n}.attn.qkv": (3 * hidden, hidden),
            f"blocks.{n}.attn.proj": (hidden, hidden),
            f"blocks.{n}.norm2": (hidden,),
            f"blocks.{n}.mlp.fc1": (v.intermediate_size, hidden),
            f"blocks.{n}.mlp.fc2": (hidden, v.intermediate_size),
        }
    sizes |= {"merger.fc1": (merged, merged), "merger.fc2": (c.hidden_size, merged)}
    for j in range(len(v.deepstack_visual_indexes)):
        at = f"deepstack.{j}"
        sizes |= {f"{at}.norm": (merged,), f"{at}.fc1": (merged, merged), f"{at}.fc2": (c.hidden_size, merged)}
    shapes: dict[str, tuple[int, ...]] = {"pos_embed": (*v.pos_embed_grid, hidden)}
    for name, size in sizes.items():
        shapes |= {f"{name}.weight": size, f"{name}.bias": size[:1]}
    return shapes
