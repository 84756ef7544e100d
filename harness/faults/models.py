"""Small random models of real architectures, roughened so that faults are visible. Knows transformers; no port.

Default initialisation hides faults; `harness.unreleased.rough` says what is put in its place.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from harness.unreleased.rough import rough

_BASE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
_MOE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "intermediate_size": 96,
}
_DSV3 = {**_BASE, **_MLA, **_MOE, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_INDEX = {"index_topk": 8, "index_head_dim": 32, "index_n_heads": 16}
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "intermediate_size": 48,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_BASE, "num_key_value_heads": 2, "intermediate_size": 96},
    "qwen3_moe": {
        **_BASE,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 16,
    },
    "gpt_oss": {
        **_BASE,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "num_local_experts": 8,
        "head_dim": 16,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "truncate": False,
        },
    },
    "deepseek_v3": _DSV3,
    "deepseek_v32": {**_DSV3, **_INDEX},
    "glm_moe_dsa": {**_DSV3, **_INDEX},
    "kimi_linear": {
        **_BASE,
        **_MLA,
        "q_lora_rank": None,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "qwen3_next": {
        **_BASE,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_conv_kernel_dim": 4,
    },
    "glm5_next": {
        "text_config": {
            **_BASE,
            **_MLA,
            **_MOE,
            **_INDEX,
            "qk_rope_head_dim": 0,
            "num_key_value_heads": 4,
            "n_group": 2,
            "topk_group": 1,
            "index_kpool": 4,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "hc_mult": 3,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
            "indexer_types": ["full", "full", "full", "full"],
        },
        "vision_config": {**_VISION, "out_hidden_size": 64, "projection_intermediate_size": 48},
        "image_token_id": 250,
        "video_token_id": 251,
        "image_start_token_id": 252,
        "image_end_token_id": 253,
        "video_start_token_id": 254,
        "video_end_token_id": 255,
    },
    "inkling2": {
        "text_config": {
            **_BASE,
            "unpadded_vocab_size": 240,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 16,
            "sliding_window_size": 8,
            "d_rel": 4,
            "rel_extent": 16,
            "log_scaling_n_floor": 8,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "route_scale": 2.0,
            "n_layers_per_attn_res_block": 2,
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
        },
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 14,
            "projection_hidden_dim": 48,
            "text_hidden_size": 64,
            "posemb_grid_size": 6,
        },
        "image_token_id": 239,
    },
    "qwen3_vl_moe": {
        "text_config": {
            **_BASE,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 96,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        },
        "vision_config": {
            **_VISION,
            "out_hidden_size": 64,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 1],
        },
        "image_token_id": 250,
        "video_token_id": 251,
        "vision_start_token_id": 252,
        "vision_end_token_id": 253,
    },
}
"""Constructor arguments of `AutoConfig.for_model(name, ...)`."""


def build(name: str, folder: Path, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Path:
    """Save a small roughened model of an architecture into `folder`, sharded, unless it is there; return the folder.

    `overrides` replace configuration keys (of `text_config` where there is one).
    """
    if (folder / "config.json").is_file():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    arguments = {k: dict(v) if isinstance(v, dict) else v for k, v in CONFIGS[name].items()}
    arguments.get("text_config", arguments).update(overrides)
    config = AutoConfig.for_model(name, **arguments)
    auto = AutoModelForImageTextToText if "vision_config" in arguments else AutoModelForCausalLM
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32)
        roughen(model, seed=seed)
    finally:
        torch.random.set_rng_state(state)
    folder.mkdir(parents=True, exist_ok=True)
    keep = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if dtype != "float32":
        for key, parameter in model.named_parameters():
            if not any(re.search(rf"(^|\.){re.escape(part)}(\.|$)", key) for part in keep):
                parameter.data = parameter.data.to(getattr(torch, dtype))
        model.config.dtype = getattr(torch, dtype)
    model.save_pretrained(folder, max_shard_size="60KB")
    return folder


def roughen(model: Any, *, seed: int) -> None:
    """Give every parameter and router bias a value that is not neutral, deterministically in `seed`."""
    import torch

    draw = torch.Generator().manual_seed(seed + 20)
    named = [*model.named_parameters(), *((k, b) for k, b in model.named_buffers() if k.endswith("correction_bias"))]
    for key, value in named:
        noise = torch.randn(value.shape, generator=draw)
        with torch.no_grad():
            value.copy_(rough(key, noise))
