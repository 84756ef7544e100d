"""The recipe of the built-in checkpoint: configuration and tensors. Knows names, formats and distributions; must not
know files or the model's code.

Everything is drawn with the frozen legacy generator of numpy, each tensor from a seed of its own, and only by additions
and products, so that the bytes are the same on every machine.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from reference_impl import encoders
from reference_impl.encoders import Floats

SEED = 24
OUTLIERS = (3.5, 0.1, -1.8)
"""Values of the three channels of every norm that are far from 1."""
QK_GAIN, LM_HEAD_GAIN, GATE_GAIN, ROUTER_GAIN, RESIDUAL_GAIN = 1.4, 6.0, 1.4, 3.0, 0.25
"""Gains over N(0, 1/fan_in): of query and key sides, lm_head, the dense gate and up, the router, what a layer adds."""

Stored = dict[str, tuple[str, npt.NDArray[Any]]]
"""Tensors as the file holds them: safetensors dtype and raw array by name."""

CONFIG: dict[str, Any] = {
    "architectures": ["Day0SeedForCausalLM"],
    "model_type": "day0_seed",
    "vocab_size": 263,
    "hidden_size": 160,
    "num_hidden_layers": 5,
    "num_attention_heads": 5,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "rope_theta": 50000.0,
    "rms_norm_eps": 1e-5,
    "index_topk": 6,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_rope_dim": 16,
    "first_k_dense_replace": 1,
    "intermediate_size": 224,
    "n_routed_experts": 7,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 1024,
    "page_tokens": 4,
    "logit_softcap": 20.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 256,
    "eos_token_id": [257, 261],
    "pad_token_id": 262,
    "image_token_id": 258,
    "vision_config": {
        "patch_size": 8,
        "spatial_merge_size": 2,
        "depth": 2,
        "hidden_size": 48,
        "num_heads": 3,
        "intermediate_size": 112,
        "pos_embed_grid": [6, 5],
        "mean": [0.48, 0.46, 0.41],
        "std": [0.27, 0.26, 0.28],
        "layer_norm_eps": 1e-6,
    },
    "quantization_config": {
        "quant_method": "day0",
        "weight_block_size": [128, 128],
        "experts": "mxfp4",
        "linears": "fp8",
    },
}


class _Recipe:
    """Draws tensors by name and stores them in their format."""

    def __init__(self) -> None:
        self.stored: Stored = {}

    def _draw(self, name: str) -> np.random.RandomState:
        return np.random.RandomState(zlib.crc32(f"{SEED}:{name}".encode()))

    def normal(self, name: str, *shape: int) -> Floats:
        """Draw values of mean 0 and variance 1: twelve uniform draws summed, so that no libm is involved."""
        total: Floats = self._draw(name).random_sample((12, *shape)).sum(axis=0)
        return total - 6.0

    def uniform(self, name: str, *shape: int) -> Floats:
        """Draw values from [0, 1)."""
        return self._draw(name).random_sample(shape)

    def spread(self, name: str, count: int) -> Floats:
        """Draw a permutation of evenly spaced values of mean 0 and variance 1: no value is far from the others."""
        even = np.arange(count) - (count - 1) / 2
        return self._draw(name).permutation(even / np.sqrt(np.mean(even**2)))

    def bf16(self, name: str, value: Floats) -> None:
        self.stored[name] = ("BF16", encoders.encode_bf16(value))

    def f32(self, name: str, value: Floats) -> None:
        self.stored[name] = ("F32", value.astype("<f4"))

    def matrix(self, name: str, rows: int, columns: int, gain: float = 1.0) -> Floats:
        return self.normal(name, rows, columns) * float(gain / np.sqrt(columns))

    def linear(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """Add a bfloat16 matrix and its bias."""
        self.bf16(f"{name}.weight", self.matrix(name, rows, columns, gain))
        self.bias(name, rows)

    def bias(self, name: str, size: int) -> None:
        self.bf16(f"{name}.bias", 0.1 * self.normal(f"{name}.bias", size))

    def norm(self, name: str, size: int) -> None:
        weight = 1 + 0.2 * self.normal(name, size)
        weight[self._draw(f"{name}.outliers").permutation(size)[: len(OUTLIERS)]] = OUTLIERS
        self.bf16(f"{name}.weight", weight)

    def fp8(self, name: str, value: Floats) -> None:
        block = CONFIG["quantization_config"]["weight_block_size"]
        codes, scale_inv = encoders.encode_fp8_block(value, (block[0], block[1]))
        self.stored[f"{name}.weight"] = ("F8_E4M3", codes)
        self.stored[f"{name}.weight_scale_inv"] = ("F32", scale_inv)

    def mxfp4(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """Add a matrix whose blocks of 32 differ in size by up to 2^3, with the variance of the whole kept."""
        choices = np.array([0.25, 0.5, 1.0, 2.0])
        gains = choices[self._draw(f"{name}.gains").randint(0, 4, (rows, columns // 32))] / np.sqrt(np.mean(choices**2))
        packed, scale = encoders.encode_mxfp4(self.matrix(name, rows, columns, gain) * np.repeat(gains, 32, axis=1))
        self.stored[f"{name}.weight_packed"] = ("U8", packed)
        self.stored[f"{name}.weight_scale"] = ("U8", scale)


def make_tensors() -> Stored:
    """Draw every tensor of the checkpoint. Deterministic."""
    r, hidden = _Recipe(), CONFIG["hidden_size"]
    r.bf16("model.embed_tokens.weight", r.normal("model.embed_tokens", CONFIG["vocab_size"], hidden))
    for n in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        r.norm(f"{layer}.input_layernorm", hidden)
        _attention(r, f"{layer}.self_attn")
        r.norm(f"{layer}.post_attention_layernorm", hidden)
        (_dense if n < CONFIG["first_k_dense_replace"] else _experts)(r, f"{layer}.mlp")
    r.norm("model.norm", hidden)
    r.bf16("lm_head.weight", r.matrix("lm_head", CONFIG["vocab_size"], hidden, LM_HEAD_GAIN))
    _vision(r)
    return r.stored


def _attention(r: _Recipe, at: str) -> None:
    c = CONFIG
    hidden, heads, q_rank, kv_rank = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
    nope, rope, v_dim = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    r.fp8(f"{at}.q_a_proj", r.matrix(f"{at}.q_a_proj", q_rank, hidden))
    r.norm(f"{at}.q_a_layernorm", q_rank)
    r.fp8(f"{at}.q_b_proj", r.matrix(f"{at}.q_b_proj", heads * (nope + rope), q_rank, QK_GAIN))
    kv_a = r.matrix(f"{at}.kv_a_proj_with_mqa", kv_rank + rope, hidden)
    kv_a[kv_rank:] *= QK_GAIN
    r.fp8(f"{at}.kv_a_proj_with_mqa", kv_a)
    r.norm(f"{at}.kv_a_layernorm", kv_rank)
    kv_b = r.matrix(f"{at}.kv_b_proj", heads * (nope + v_dim), kv_rank).reshape(heads, nope + v_dim, kv_rank)
    kv_b[:, :nope] *= QK_GAIN
    r.fp8(f"{at}.kv_b_proj", kv_b.reshape(-1, kv_rank))
    r.fp8(f"{at}.o_proj", r.matrix(f"{at}.o_proj", hidden, heads * v_dim, RESIDUAL_GAIN))
    r.f32(f"{at}.sinks", r.uniform(f"{at}.sinks", heads) * 4 - 1)
    indexer, i_heads, i_dim = f"{at}.indexer", c["index_n_heads"], c["index_head_dim"]
    r.bf16(f"{indexer}.wq_b.weight", r.matrix(f"{indexer}.wq_b", i_heads * i_dim, q_rank, QK_GAIN))
    r.bf16(f"{indexer}.wk.weight", r.matrix(f"{indexer}.wk", i_dim, hidden, QK_GAIN))
    r.norm(f"{indexer}.k_norm", i_dim)
    r.bias(f"{indexer}.k_norm", i_dim)
    r.bf16(f"{indexer}.weights_proj.weight", r.matrix(f"{indexer}.weights_proj", i_heads, hidden))


def _dense(r: _Recipe, at: str) -> None:
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    r.fp8(f"{at}.gate_proj", r.matrix(f"{at}.gate_proj", inner, hidden, GATE_GAIN))
    r.fp8(f"{at}.up_proj", r.matrix(f"{at}.up_proj", inner, hidden, GATE_GAIN))
    r.fp8(f"{at}.down_proj", r.matrix(f"{at}.down_proj", hidden, inner, RESIDUAL_GAIN))


def _experts(r: _Recipe, at: str) -> None:
    hidden, inner, experts = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"], CONFIG["n_routed_experts"]
    r.bf16(f"{at}.gate.weight", r.matrix(f"{at}.gate", experts, hidden, ROUTER_GAIN))
    r.f32(f"{at}.gate.e_score_correction_bias", 7 + 0.25 * r.spread(f"{at}.gate.bias", experts))
    for e in range(experts):
        r.mxfp4(f"{at}.experts.{e}.gate_proj", inner, hidden)
        r.mxfp4(f"{at}.experts.{e}.up_proj", inner, hidden)
        r.mxfp4(f"{at}.experts.{e}.down_proj", hidden, inner, RESIDUAL_GAIN)
    shared, shared_inner = f"{at}.shared_experts", inner * CONFIG["n_shared_experts"]
    r.bf16(f"{shared}.gate_proj.weight", r.matrix(f"{shared}.gate_proj", shared_inner, hidden))
    r.bf16(f"{shared}.up_proj.weight", r.matrix(f"{shared}.up_proj", shared_inner, hidden))
    r.bf16(f"{shared}.down_proj.weight", r.matrix(f"{shared}.down_proj", hidden, shared_inner, RESIDUAL_GAIN))


def _vision(r: _Recipe) -> None:
    v, text = CONFIG["vision_config"], CONFIG["hidden_size"]
    hidden, inner, merged = v["hidden_size"], v["intermediate_size"], v["hidden_size"] * v["spatial_merge_size"] ** 2
    r.linear("visual.patch_embed", hidden, 3 * v["patch_size"] ** 2)
    r.bf16("visual.pos_embed", 0.7 * r.normal("visual.pos_embed", *v["pos_embed_grid"], hidden))
    for n in range(v["depth"]):
        block = f"visual.blocks.{n}"
        for norm in ("norm1", "norm2"):
            r.norm(f"{block}.{norm}", hidden)
            r.bias(f"{block}.{norm}", hidden)
        qkv = r.matrix(f"{block}.attn.qkv", 3 * hidden, hidden)
        qkv[: 2 * hidden] *= QK_GAIN
        r.bf16(f"{block}.attn.qkv.weight", qkv)
        r.bias(f"{block}.attn.qkv", 3 * hidden)
        r.linear(f"{block}.attn.proj", hidden, hidden)
        r.linear(f"{block}.mlp.fc1", inner, hidden)
        r.linear(f"{block}.mlp.fc2", hidden, inner)
    r.norm("visual.norm", hidden)
    r.bias("visual.norm", hidden)
    r.linear("visual.merger.fc1", merged, merged)
    r.linear("visual.merger.fc2", text, merged)
