"""The seed model's configuration. Knows `config.json`; must not know tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from harness.errors import CheckpointError

MODEL_TYPE = "day0_seed"


LAYER_TYPES = ("recurrent_attention", "sparse_attention")
INDEX_POLICIES = ("importance", "block", "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The vision tower. Sizes in pixels (patch, areas) or patches (merge, grid)."""

    patch_size: int
    spatial_merge_size: int
    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    pos_embed_grid: tuple[int, int]
    deepstack_visual_indexes: tuple[int, ...]
    min_pixels: int
    max_pixels: int
    rope_theta: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    layer_norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary frequencies and their YaRN scaling. Lengths in tokens."""

    rope_theta: float
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale_all_dim: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The decoder, its vision tower and how its weights are stored. `index_policies`: None for a recurrent layer."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    residual_block_layers: int
    num_attention_heads: int
    linear_num_heads: int
    linear_head_dim: int
    linear_conv_kernel_dim: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    index_policies: tuple[str | None, ...]
    index_topk: int
    index_window: int
    index_block: int
    index_n_heads: int
    index_head_dim: int
    index_rope_dim: int
    first_k_dense_replace: int
    intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    moe_intermediate_size: int
    n_shared_experts: int
    routed_scaling_factor: float
    num_nextn_predict_layers: int
    deepstack_layers: tuple[int, ...]
    max_position_embeddings: int
    logit_softcap: float
    image_token_id: int
    bos_token_id: int
    eos_token_id: tuple[int, ...]
    rope: RopeConfig
    vision: VisionConfig
    weight_block_size: tuple[int, int]

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key in a sparse layer."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def linear_width(self) -> int:
        """Width of all heads' queries, keys or values in a recurrent layer."""
        return self.linear_num_heads * self.linear_head_dim

    def is_dense(self, layer: int) -> bool:
        """Say whether a layer has one dense feed-forward block instead of experts."""
        return layer < self.first_k_dense_replace

    def is_sparse(self, layer: int) -> bool:
        """Say whether a layer has sparse attention; what predicts further tokens has it too."""
        return layer >= self.num_hidden_layers or self.layer_types[layer] == "sparse_attention"

    def index_policy(self, layer: int) -> str:
        """Return how a sparse layer chooses its keys."""
        policy = "importance" if layer >= self.num_hidden_layers else self.index_policies[layer]
        assert policy is not None  # as _check found it for every sparse layer
        return policy


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
        parts = {
            "rope": RopeConfig(**_take(RopeConfig, data["rope_parameters"])),
            "vision": VisionConfig(**_take(VisionConfig, data["vision_config"])),
            "weight_block_size": data["quantization_config"]["weight_block_size"],
        }
        config = Config(**_take(Config, {**data, **parts}))
    except KeyError as error:
        raise CheckpointError(f"expected the key {error} in {path}; the file is incomplete") from error
    _check(config, path)
    return config


def _check(config: Config, path: Path) -> None:
    """Raise CheckpointError where a layer has no kind, or a sparse one no policy, that this model knows."""
    layers, kinds, policies = config.num_hidden_layers, config.layer_types, config.index_policies
    if len(kinds) != layers or not set(kinds) <= set(LAYER_TYPES):
        raise CheckpointError(f"expected {layers} layer_types of {', '.join(LAYER_TYPES)} in {path}, found {kinds}")
    known = [p in INDEX_POLICIES if config.is_sparse(n) else p is None for n, p in enumerate(policies)]
    if len(policies) != layers or not all(known):
        words = ", ".join(INDEX_POLICIES)
        raise CheckpointError(
            f"expected {layers} index_policies, {words} where a layer is sparse, else null, in {path}, found {policies}"
        )


def _take(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    """Pick a dataclass's fields; lists become tuples."""
    values = {f.name: data[f.name] for f in fields(kind)}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
