"""The seed model's configuration. Knows `config.json`; must not know tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from harness.errors import CheckpointError

MODEL_TYPE = "day0_seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The vision tower. Sizes in pixels (patch) or patches (merge, grid)."""

    patch_size: int
    spatial_merge_size: int
    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    pos_embed_grid: tuple[int, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    layer_norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The decoder, its vision tower and how its weights are stored."""

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
    logit_softcap: float
    image_token_id: int
    bos_token_id: int
    eos_token_id: tuple[int, ...]
    vision: VisionConfig
    weight_block_size: tuple[int, int]

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_dense(self, layer: int) -> bool:
        """Say whether a layer has one dense feed-forward block instead of experts."""
        return layer < self.first_k_dense_replace


def read_config(checkpoint: Path) -> Config:
    """Read `config.json` of a checkpoint folder. Raises CheckpointError if it is unreadable or of another model."""
    path = checkpoint / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"expected the model's configuration at {path}, found: {error}") from error
    if not isinstance(data, dict) or data.get("model_type") != MODEL_TYPE:
        found = data.get("model_type") if isinstance(data, dict) else type(data).__name__
        raise CheckpointError(f"expected model_type {MODEL_TYPE!r} in {path}, found {found!r}; this port runs no other")
    try:
        vision = VisionConfig(**_take(VisionConfig, data["vision_config"]))
        own = {**data, "vision": vision, "weight_block_size": data["quantization_config"]["weight_block_size"]}
        return Config(**_take(Config, own))
    except KeyError as error:
        raise CheckpointError(f"expected the key {error} in {path}; the file is incomplete") from error


def _take(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    """Pick a dataclass's fields; lists become tuples."""
    values = {f.name: data[f.name] for f in fields(kind)}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
