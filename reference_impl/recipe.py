"""The recipe of the built-in checkpoint: configuration and the decoder's tensors. Knows names and sizes; must not know
files or the model's code.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from reference_impl.drawing import FP8_BLOCK, Drawing, Stored
from reference_impl.encoders import Floats
from reference_impl.recipe_vision import VISION, add_vision

LM_HEAD_GAIN, GATE_GAIN, ROUTER_GAIN, RESIDUAL_GAIN, EXPERT_GAIN, SPARSE_GAIN = 6.0, 1.4, 3.0, 0.8, 0.25, 0.25
Q_GAIN, K_GAIN, INDEX_GAIN, CONV_GAIN, MIX_GAIN = 0.9, 1.2, 1.4, 1.5, 1.0
"""Gains over N(0, 1/fan_in): of lm_head, the dense gate and up, the router, what a part adds (less where rounding flips
choices: routed experts, sparse attention), queries, keys, the indexer, the short convolution, mixes of streams."""
COMMON, TOWARDS_EMBEDDING = 0.5, 0.2
"""Size of a direction that all embeddings share, and how far every mix looks for it: the exact stream keeps about half
of each mix, and an honest rounding stays small over eight layers."""
LARGE_SINK = 5.0

CONFIG: dict[str, Any] = {
    "architectures": ["Day0SeedForCausalLM"],
    "model_type": "day0_seed",
    "vocab_size": 263,
    "hidden_size": 160,
    "num_hidden_layers": 8,
    "layer_types": [*["recurrent_attention"] * 3, "sparse_attention", *["recurrent_attention"] * 3, "sparse_attention"],
    "residual_block_layers": 3,
    "num_attention_heads": 5,
    "linear_num_heads": 5,
    "linear_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 256.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 0.707,
    },
    "rms_norm_eps": 1e-5,
    "index_policies": [None, None, None, "importance", None, None, None, "block"],
    "index_topk": 8,
    "index_window": 5,
    "index_block": 4,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_rope_dim": 16,
    "first_k_dense_replace": 1,
    "intermediate_size": 224,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "moe_intermediate_size": 96,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "deepstack_layers": [1, 3],
    "max_position_embeddings": 1048576,
    "page_tokens": 4,
    "logit_softcap": 20.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 256,
    "eos_token_id": [257, 261],
    "pad_token_id": 262,
    "image_token_id": 258,
    "vision_config": VISION,
    "quantization_config": {
        "quant_method": "day0",
        "weight_block_size": list(FP8_BLOCK),
        "experts": "mxfp4",
        "linears": "fp8",
    },
}


def make_tensors() -> Stored:
    """Draw every tensor of the checkpoint. Deterministic."""
    d, hidden, layers = Drawing(), CONFIG["hidden_size"], CONFIG["num_hidden_layers"]
    embeddings = d.normal("model.embed_tokens", CONFIG["vocab_size"], hidden) + COMMON * _common(d, hidden)
    d.bf16("model.embed_tokens.weight", embeddings)
    for n in range(layers):
        layer = f"model.layers.{n}"
        if n:
            _mix(d, f"{layer}.attn_res")
        _mix(d, f"{layer}.mlp_res")
        d.norm(f"{layer}.input_layernorm", hidden)
        if CONFIG["layer_types"][n] == "recurrent_attention":
            _recurrent(d, f"{layer}.linear_attn")
        else:
            _sparse(d, f"{layer}.self_attn")
            d.bf16(f"{layer}.self_attn.visual_kv_proj.weight", d.matrix(f"{layer}.visual", *_visual_shape()))
            d.norm(f"{layer}.self_attn.visual_norm", CONFIG["kv_lora_rank"])
        d.norm(f"{layer}.post_attention_layernorm", hidden)
        (_dense if n < CONFIG["first_k_dense_replace"] else _experts)(d, f"{layer}.mlp")
    _mix(d, "model.final_res")
    d.norm("model.norm", hidden)
    d.bf16("lm_head.weight", d.matrix("lm_head", CONFIG["vocab_size"], hidden, LM_HEAD_GAIN))
    for n in range(layers, layers + CONFIG["num_nextn_predict_layers"]):
        _further_token(d, f"model.layers.{n}")
    add_vision(d, hidden)
    return d.stored


def _mix(d: Drawing, at: str) -> None:
    hidden = CONFIG["hidden_size"]
    d.f32(f"{at}.query", MIX_GAIN * d.normal(at, hidden) + TOWARDS_EMBEDDING * _common(d, hidden))


def _common(d: Drawing, hidden: int) -> Floats:
    """Return a direction of +-1 that every embedding has a part of, as trained ones do."""
    return np.where(d.uniform("model.embed_tokens.common", hidden) < 0.5, -1.0, 1.0)


def _visual_shape() -> tuple[int, int]:
    return CONFIG["kv_lora_rank"], CONFIG["hidden_size"]


def _recurrent(d: Drawing, at: str) -> None:
    """Add a recurrent attention. A step keeps from almost all of a channel (0.999) to almost nothing."""
    hidden, heads, head = CONFIG["hidden_size"], CONFIG["linear_num_heads"], CONFIG["linear_head_dim"]
    width, taps = heads * head, CONFIG["linear_conv_kernel_dim"]
    for name in ("q_proj", "k_proj", "v_proj"):
        d.fp8(f"{at}.{name}", d.matrix(f"{at}.{name}", width, hidden))
    d.bf16(f"{at}.conv1d.weight", d.matrix(f"{at}.conv1d", 3 * width, taps, CONV_GAIN)[:, None])
    for name in ("f", "g"):
        d.bf16(f"{at}.{name}_a_proj.weight", d.matrix(f"{at}.{name}_a_proj", head, hidden))
        d.bf16(f"{at}.{name}_b_proj.weight", d.matrix(f"{at}.{name}_b_proj", width, head))
    d.bf16(f"{at}.b_proj.weight", d.matrix(f"{at}.b_proj", heads, hidden, 1.4))
    d.f32(f"{at}.A_log", -0.5 + d.spread(f"{at}.A_log", heads))
    d.f32(f"{at}.dt_bias", d.uniform(f"{at}.dt_bias", width) * 6 - 5)
    d.norm(f"{at}.o_norm", head)
    d.fp8(f"{at}.o_proj", d.matrix(f"{at}.o_proj", hidden, width, RESIDUAL_GAIN))


def _sparse(d: Drawing, at: str) -> None:
    c = CONFIG
    hidden, heads, q_rank, kv_rank = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
    nope, rope, v_dim = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    d.fp8(f"{at}.q_a_proj", d.matrix(f"{at}.q_a_proj", q_rank, hidden))
    d.norm(f"{at}.q_a_layernorm", q_rank)
    d.fp8(f"{at}.q_b_proj", d.matrix(f"{at}.q_b_proj", heads * (nope + rope), q_rank, Q_GAIN))
    kv_a = d.matrix(f"{at}.kv_a_proj_with_mqa", kv_rank + rope, hidden)
    kv_a[kv_rank:] *= K_GAIN
    d.fp8(f"{at}.kv_a_proj_with_mqa", kv_a)
    d.norm(f"{at}.kv_a_layernorm", kv_rank)
    kv_b = d.matrix(f"{at}.kv_b_proj", heads * (nope + v_dim), kv_rank).reshape(heads, nope + v_dim, kv_rank)
    kv_b[:, :nope] *= K_GAIN
    d.fp8(f"{at}.kv_b_proj", kv_b.reshape(-1, kv_rank))
    d.fp8(f"{at}.o_proj", d.matrix(f"{at}.o_proj", hidden, heads * v_dim, SPARSE_GAIN))
    sinks = d.uniform(f"{at}.sinks", heads) * 4 - 1
    sinks[np.argmax(sinks)] = LARGE_SINK
    d.f32(f"{at}.sinks", sinks)
    indexer, i_heads, i_dim = f"{at}.indexer", c["index_n_heads"], c["index_head_dim"]
    d.bf16(f"{indexer}.wq_b.weight", d.matrix(f"{indexer}.wq_b", i_heads * i_dim, q_rank, INDEX_GAIN))
    d.bf16(f"{indexer}.wk.weight", d.matrix(f"{indexer}.wk", i_dim, hidden, INDEX_GAIN))
    d.layer_norm(f"{indexer}.k_norm", i_dim)
    d.bf16(f"{indexer}.weights_proj.weight", d.matrix(f"{indexer}.weights_proj", i_heads, hidden))


def _dense(d: Drawing, at: str) -> None:
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    d.fp8(f"{at}.gate_proj", d.matrix(f"{at}.gate_proj", inner, hidden, GATE_GAIN))
    d.fp8(f"{at}.up_proj", d.matrix(f"{at}.up_proj", inner, hidden, GATE_GAIN))
    d.fp8(f"{at}.down_proj", d.matrix(f"{at}.down_proj", hidden, inner, RESIDUAL_GAIN))


def _experts(d: Drawing, at: str) -> None:
    hidden, inner, experts = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"], CONFIG["n_routed_experts"]
    gate, common = d.matrix(f"{at}.gate", experts, hidden, ROUTER_GAIN), _common(d, hidden)
    shared = np.array([math.fsum(row) / hidden for row in gate * common])  # fsum: in any order the same
    d.bf16(f"{at}.gate.weight", gate - shared[:, None] * common)
    bias = d.dealt(f"{at}.gate.bias", CONFIG["n_group"], experts // CONFIG["n_group"])
    d.f32(f"{at}.gate.e_score_correction_bias", 7 + 0.25 * bias)
    for e in range(experts):
        d.mxfp4(f"{at}.experts.{e}.gate_proj", inner, hidden)
        d.mxfp4(f"{at}.experts.{e}.up_proj", inner, hidden)
        d.mxfp4(f"{at}.experts.{e}.down_proj", hidden, inner, EXPERT_GAIN)
    shared, shared_inner = f"{at}.shared_experts", inner * CONFIG["n_shared_experts"]
    d.bf16(f"{shared}.gate_proj.weight", d.matrix(f"{shared}.gate_proj", shared_inner, hidden))
    d.bf16(f"{shared}.up_proj.weight", d.matrix(f"{shared}.up_proj", shared_inner, hidden))
    d.bf16(f"{shared}.down_proj.weight", d.matrix(f"{shared}.down_proj", hidden, shared_inner, RESIDUAL_GAIN))


def _further_token(d: Drawing, at: str) -> None:
    """Add the layer that predicts one more token: of the sparse kind, with plain residuals and its own norms."""
    hidden = CONFIG["hidden_size"]
    for name in ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm"):
        d.norm(f"{at}.{name}", hidden)
    d.bf16(f"{at}.eh_proj.weight", d.matrix(f"{at}.eh_proj", hidden, 2 * hidden))
    _sparse(d, f"{at}.self_attn")
    _experts(d, f"{at}.mlp")
