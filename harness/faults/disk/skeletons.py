"""Small models as checkpoints name them: tensors, their shapes, the configuration. Knows no bytes.

None is square where a transposition could hide, none a multiple of 128 where blocks may be partial. Sizes are those of
real families made small: grouped queries, latent attention with an indexer, merged and numbered experts, routers with
and without a correction bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

LAYERS, EXPERTS, HIDDEN, INNER, EXPERT_INNER, VOCAB = 6, 4, 160, 320, 96, 272
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 48
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "rope_theta": 10000.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One weight of a model. `kind`: linear, expert, embedding, head, norm, router, bias, kept (float32), sinks."""

    name: str
    shape: tuple[int, ...]
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A model without values."""

    config: dict[str, Any]
    tensors: tuple[Tensor, ...]


def _all(kind: str, at: str, **shapes: tuple[int, ...]) -> Iterator[Tensor]:
    for name, shape in shapes.items():
        yield Tensor(name=f"{at}.{name}.weight", shape=shape, kind=kind)


def _outer(embedding: str = "model.embed_tokens", norm: str = "model.norm", head: str = "lm_head") -> list[Tensor]:
    return [
        Tensor(name=f"{embedding}.weight", shape=(VOCAB, HIDDEN), kind="embedding"),
        Tensor(name=f"{norm}.weight", shape=(HIDDEN,), kind="norm"),
        Tensor(name=f"{head}.weight", shape=(VOCAB, HIDDEN), kind="head"),
    ]


def _grouped(at: str, *, normed: bool = True) -> Iterator[Tensor]:
    q, kv = (HEADS * HEAD_DIM, HIDDEN), (KV_HEADS * HEAD_DIM, HIDDEN)
    yield from _all("linear", f"{at}.self_attn", q_proj=q, k_proj=kv, v_proj=kv, o_proj=q[::-1])
    if normed:
        yield from _all("norm", f"{at}.self_attn", q_norm=(HEAD_DIM,), k_norm=(HEAD_DIM,))
    yield from _all("norm", at, input_layernorm=(HIDDEN,), post_attention_layernorm=(HIDDEN,))


def _gated(at: str, inner: int, kind: str = "linear") -> Iterator[Tensor]:
    up = (inner, HIDDEN)
    yield from _all(kind, at, gate_proj=up, up_proj=up, down_proj=up[::-1])


def llama() -> Skeleton:
    """A dense decoder."""
    found = _outer()
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found += [*_grouped(at, normed=False), *_gated(f"{at}.mlp", INNER)]
    config = {
        **_BASE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "intermediate_size": INNER, "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    return Skeleton(config=config, tensors=tuple(found))


def qwen3_moe() -> Skeleton:
    """A dense layer, then numbered experts."""
    found = _outer()
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found += _grouped(at)
        if layer == 0:
            found += _gated(f"{at}.mlp", INNER)
            continue
        found.append(Tensor(name=f"{at}.mlp.gate.weight", shape=(EXPERTS, HIDDEN), kind="router"))
        for expert in range(EXPERTS):
            found += _gated(f"{at}.mlp.experts.{expert}", EXPERT_INNER, "expert")
    config = {
        **_BASE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "intermediate_size": INNER, "moe_intermediate_size": EXPERT_INNER,
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "mlp_only_layers": [0], "decoder_sparse_step": 1,
        "norm_topk_prob": True, "attention_bias": False,
    }  # fmt: skip
    return Skeleton(config=config, tensors=tuple(found))


Q_RANK, KV_RANK, NOPE, ROPE, V_DIM, INDEX_HEADS, INDEX_DIM = 96, 128, 32, 16, 40, 4, 32


def deepseek_v32() -> Skeleton:
    """Latent attention with an indexer; experts with a shared one and a correction bias."""
    found = _outer()
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        attention = f"{at}.self_attn"
        found += _all(
            "linear", attention, q_a_proj=(Q_RANK, HIDDEN), q_b_proj=(HEADS * (NOPE + ROPE), Q_RANK),
            kv_a_proj_with_mqa=(KV_RANK + ROPE, HIDDEN), kv_b_proj=(HEADS * (NOPE + V_DIM), KV_RANK),
            o_proj=(HIDDEN, HEADS * V_DIM),
        )  # fmt: skip
        found += _all("norm", attention, q_a_layernorm=(Q_RANK,), kv_a_layernorm=(KV_RANK,))
        found += _all("linear", f"{attention}.indexer", wq_b=(INDEX_HEADS * INDEX_DIM, Q_RANK), wk=(INDEX_DIM, HIDDEN))
        found += _all("norm", f"{attention}.indexer", k_norm=(INDEX_DIM,))
        found.append(Tensor(name=f"{attention}.indexer.k_norm.bias", shape=(INDEX_DIM,), kind="bias"))
        found += _all("router", f"{attention}.indexer", weights_proj=(INDEX_HEADS, HIDDEN))
        found += _all("norm", at, input_layernorm=(HIDDEN,), post_attention_layernorm=(HIDDEN,))
        if layer == 0:
            found += _gated(f"{at}.mlp", INNER)
            continue
        found += _all("router", f"{at}.mlp", gate=(EXPERTS, HIDDEN))
        found.append(Tensor(name=f"{at}.mlp.gate.e_score_correction_bias", shape=(EXPERTS,), kind="kept"))
        found += _gated(f"{at}.mlp.shared_experts", EXPERT_INNER)
        for expert in range(EXPERTS):
            found += _gated(f"{at}.mlp.experts.{expert}", EXPERT_INNER, "expert")
    config = {
        **_BASE, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
        "num_key_value_heads": HEADS, "q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK, "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE, "v_head_dim": V_DIM, "index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_DIM,
        "index_topk": 8, "intermediate_size": INNER, "moe_intermediate_size": EXPERT_INNER,
        "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "attention_bias": False, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    return Skeleton(config=config, tensors=tuple(found))


def gpt_oss() -> Skeleton:
    """Merged experts whose gate and up rows take turns, biases everywhere, sinks."""
    found = _outer()
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found += _all("router", f"{at}.self_attn", q_proj=(q, HIDDEN), k_proj=(kv, HIDDEN), v_proj=(kv, HIDDEN),
                      o_proj=(HIDDEN, q))  # fmt: skip
        for name, size in (("q_proj", q), ("k_proj", kv), ("v_proj", kv), ("o_proj", HIDDEN)):
            found.append(Tensor(name=f"{at}.self_attn.{name}.bias", shape=(size,), kind="bias"))
        found.append(Tensor(name=f"{at}.self_attn.sinks", shape=(HEADS,), kind="sinks"))
        found += _all("norm", at, input_layernorm=(HIDDEN,), post_attention_layernorm=(HIDDEN,))
        found.append(Tensor(name=f"{at}.mlp.router.weight", shape=(EXPERTS, HIDDEN), kind="router"))
        found.append(Tensor(name=f"{at}.mlp.router.bias", shape=(EXPERTS,), kind="bias"))
        for name, rows, columns in (("gate_up_proj", 2 * EXPERT_INNER, HIDDEN), ("down_proj", HIDDEN, EXPERT_INNER)):
            own = f"{at}.mlp.experts.{name}"
            found.append(Tensor(name=own, shape=(EXPERTS, rows, columns), kind="expert"))
            found.append(Tensor(name=f"{own}_bias", shape=(EXPERTS, rows), kind="bias"))
    config = {
        **_BASE, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "intermediate_size": EXPERT_INNER, "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2, "sliding_window": 8, "swiglu_limit": 7.0, "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    }  # fmt: skip
    return Skeleton(config=config, tensors=tuple(found))


def deepseek_v4() -> Skeleton:
    """Shared keys and values of one head, experts w1 w2 w3, names of the publisher's own code."""
    found = _outer("embed", "norm", "head")
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        found += _all(
            "linear", f"{at}.attn", wq_a=(Q_RANK, HIDDEN), wq_b=(HEADS * HEAD_DIM, Q_RANK), wkv=(HEAD_DIM, HIDDEN),
            wo_a=(64, HEADS * HEAD_DIM // 2), wo_b=(HIDDEN, 64),
        )  # fmt: skip
        found += _all("norm", f"{at}.attn", q_norm=(Q_RANK,), kv_norm=(HEAD_DIM,))
        found.append(Tensor(name=f"{at}.attn.attn_sink", shape=(HEADS,), kind="kept"))
        found += _all("norm", at, attn_norm=(HIDDEN,), ffn_norm=(HIDDEN,))
        found += _all("router", f"{at}.ffn", gate=(EXPERTS, HIDDEN))
        found.append(Tensor(name=f"{at}.ffn.gate.bias", shape=(EXPERTS,), kind="kept"))
        for own, kind in [("shared_experts", "linear"), *((f"experts.{e}", "expert") for e in range(EXPERTS))]:
            up = (EXPERT_INNER, HIDDEN)
            found += _all(kind, f"{at}.ffn.{own}", w1=up, w2=up[::-1], w3=up)
    config = {
        **_BASE, "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "num_key_value_heads": 1,
        "head_dim": HEAD_DIM, "q_lora_rank": Q_RANK, "o_groups": 2, "o_lora_rank": 32,
        "moe_intermediate_size": EXPERT_INNER, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5,
        "expert_dtype": "fp4",
    }  # fmt: skip
    return Skeleton(config=config, tensors=tuple(found))
