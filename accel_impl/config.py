"""The model's configuration as the port needs it. Knows `config.json` only; must not know weights or devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from harness.errors import CheckpointError

MODEL_TYPE = "day0_seed"
RECURRENT, SPARSE = "recurrent_attention", "sparse_attention"
POLICIES = ("importance", "block", "random")


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
    deepstack_visual_indexes: tuple[int, ...]
    min_pixels: int
    max_pixels: int
    rope_theta: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    layer_norm_eps: float

    @property
    def merged_features(self) -> int:
        """Features of one merge block, concatenated."""
        return self.hidden_size * self.spatial_merge_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How far positions turn (YaRN). Field names as in `rope_parameters`."""

    rope_theta: float
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale_all_dim: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The decoder. Field names as in `config.json`."""

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
    page_tokens: int
    logit_softcap: float
    image_token_id: int
    bos_token_id: int
    eos_token_id: tuple[int, ...]
    block: tuple[int, int]
    rope: RopeConfig
    vision: VisionConfig | None

    @property
    def head_dim(self) -> int:
        """Width of a head's query and key in sparse attention."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_size(self) -> int:
        """Width of the shared expert."""
        return self.moe_intermediate_size * self.n_shared_experts

    @property
    def further(self) -> int | None:
        """Number of the layer that predicts one more token, if there is one."""
        return self.num_hidden_layers if self.num_nextn_predict_layers else None

    def is_dense(self, layer: int) -> bool:
        """Say whether a layer has a plain MLP."""
        return layer < self.first_k_dense_replace

    def is_recurrent(self, layer: int) -> bool:
        """Say whether a layer has recurrent attention; the others attend sparsely."""
        return layer < self.num_hidden_layers and self.layer_types[layer] == RECURRENT

    def policy(self, layer: int) -> str:
        """Return how a sparse layer chooses its keys."""
        if layer >= self.num_hidden_layers:
            return POLICIES[0]
        return self.index_policies[layer] or POLICIES[0]

    def ends_a_block(self, layer: int) -> bool:
        """Say whether the stream so far is put by, and begun anew, within this layer."""
        return layer % self.residual_block_layers == 0


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
    rope = _pick(RopeConfig, data.get("rope_parameters") or {}, path)
    given = {**data, "block": quant.get("weight_block_size"), "vision": None, "rope": RopeConfig(**rope)}
    if data.get("vision_config"):
        given["vision"] = VisionConfig(**_pick(VisionConfig, data["vision_config"], path))
    config = Config(**_pick(Config, given, path))
    _check(config, path)
    return config


def _check(config: Config, path: Path) -> None:
    """Raise CheckpointError for kinds of layers, policies or groups that the port does not know."""
    kinds, policies = config.layer_types, config.index_policies
    fit = len(kinds) == len(policies) == config.num_hidden_layers and {*kinds} <= {RECURRENT, SPARSE}
    if not fit or any((p in POLICIES) != (k == SPARSE) for k, p in zip(kinds, policies, strict=True)):
        raise CheckpointError(
            f"expected {config.num_hidden_layers} layer_types of {RECURRENT}, {SPARSE} and as many index_policies of "
            f"{', '.join(POLICIES)} (null where a layer is recurrent) in {path}, found {config.layer_types}, "
            f"{config.index_policies}"
        )
    if config.n_routed_experts % config.n_group or config.num_nextn_predict_layers > 1:
        raise CheckpointError(
            f"expected groups of equal size and at most one layer for further tokens in {path}, found "
            f"{config.n_routed_experts} experts in {config.n_group} groups, {config.num_nextn_predict_layers} layers"
        )


def _pick(kind: type, data: Mapping[str, Any], path: Path) -> dict[str, Any]:
    names = [f.name for f in fields(kind)]
    missing = [name for name in names if name not in data]
    if missing:
        raise CheckpointError(f"expected {', '.join(missing)} in {path}, found none of them")
    return {name: tuple(v) if isinstance(v := data[name], list) else v for name in names}
