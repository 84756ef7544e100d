"""The model's configuration as the port needs it. Knows `config.json` only; must not know weights or devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from harness.errors import CheckpointError

MODEL_TYPE = "day0_seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The tower. Field names as in `config.json`."""

    patch_size: int
    spatial_merge_size: int
    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    pos_embed_grid: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    layer_norm_eps: float

    @property
    def patch_features(self) -> int:
        """Values of one flattened patch."""
        return 3 * self.patch_size**2

    @property
    def merged_features(self) -> int:
        """Features of one merge block, concatenated."""
        return self.hidden_size * self.spatial_merge_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The decoder. Field names as in `config.json`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float
    rms_norm_eps: float
    index_topk: int
    index_n_heads: int
    index_head_dim: int
    index_rope_dim: int
    first_k_dense_replace: int
    intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_shared_experts: int
    routed_scaling_factor: float
    max_position_embeddings: int
    page_tokens: int
    logit_softcap: float
    image_token_id: int
    bos_token_id: int
    eos_token_id: tuple[int, ...]
    block: tuple[int, int]
    vision: VisionConfig | None

    @property
    def head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_size(self) -> int:
        """Width of the shared expert."""
        return self.moe_intermediate_size * self.n_shared_experts

    def is_dense(self, layer: int) -> bool:
        """Say whether a layer has a plain MLP."""
        return layer < self.first_k_dense_replace


def read_config(checkpoint: Path) -> Config:
    """Read `config.json`. Raises CheckpointError naming every key that is missing."""
    path = checkpoint / "config.json"
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"expected a configuration at {path}, found: {error}; point at a checkpoint folder"
        ) from error
    if data.get("model_type") != MODEL_TYPE:
        raise CheckpointError(f"expected model_type {MODEL_TYPE!r} in {path}, found {data.get('model_type')!r}")
    quant = data.get("quantization_config") or {}
    if quant.get("experts") != "mxfp4" or quant.get("linears") != "fp8":
        raise CheckpointError(f"expected experts in mxfp4 and linears in fp8 in {path}, found {quant}")
    given = {**data, "block": quant.get("weight_block_size"), "vision": None}
    if data.get("vision_config"):
        given["vision"] = VisionConfig(**_pick(VisionConfig, data["vision_config"], path))
    return Config(**_pick(Config, given, path))


def _pick(kind: type, data: Mapping[str, Any], path: Path) -> dict[str, Any]:
    names = [f.name for f in fields(kind)]
    missing = [name for name in names if name not in data]
    if missing:
        raise CheckpointError(f"expected {', '.join(missing)} in {path}, found none of them")
    return {name: tuple(v) if isinstance(v := data[name], list) else v for name in names}
