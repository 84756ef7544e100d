"""Every part of a layer and of the tower, worked out again in float64 from the taps before it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from harness.cases import image_case, read_model_info
from harness.recorder import TraceRecorder

T, LAYER = 21, 2
Taps = dict[str, Tensor]


@pytest.fixture(scope="module")
def weights(load) -> Taps:
    return {w.name: w.tensor for w in load("float64").weights()}


@pytest.fixture(scope="module")
def taps(load, checkpoint) -> Taps:
    port, recorder = load("float64"), TraceRecorder()
    case = image_case(read_model_info(checkpoint), [(32, 48), (48, 32)], length=T - 12)
    inputs = port.prepare(case, recorder)
    assert inputs.token_ids.shape[1] == T
    recorder.span(0, T)
    port.forward(inputs, recorder)
    return {name: tensor[0] if tensor.shape[0] == 1 else tensor for name, tensor in recorder.tensors().items()}


@pytest.fixture
def layer(taps, weights) -> tuple[Taps, Taps]:
    """Taps and weights of one layer, by the rest of their names."""
    parts = []
    for values, prefix in ((taps, f"layers.{LAYER}."), (weights, f"model.layers.{LAYER}.")):
        parts.append({k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)})
    return parts[0], parts[1]


def same(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual.double(), expected.double(), rtol=1e-9, atol=1e-10)


def turned(pairs: Tensor) -> Tensor:
    """Rotate complex pairs [T, ..., n] by position * 50000^(-i/n)."""
    n = pairs.shape[-1]
    angles = torch.arange(T).double()[:, None] * torch.tensor(
        [50000.0 ** (-i / n) for i in range(n)], dtype=torch.float64
    )
    angles = angles.view(T, *[1] * (pairs.dim() - 2), n)
    return pairs * torch.complex(angles.cos(), angles.sin())


def interleaved(x: Tensor) -> Tensor:
    return torch.view_as_real(turned(torch.complex(x[..., 0::2], x[..., 1::2]))).flatten(-2)


def half_split(x: Tensor) -> Tensor:
    y = turned(torch.complex(x[..., :8], x[..., 8:16]))
    return torch.cat([y.real, y.imag, x[..., 16:]], dim=-1)


def rms(x: Tensor, w: Tensor) -> Tensor:
    return w * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def normed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return w * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() + b


def test_queries_and_latents(layer):
    """Queries turn in interleaved pairs after the nope part; the latent is normed and the rope key is not."""
    t, w = layer
    x = t["input_norm"]
    assert same(t["attn.q_a"], x @ w["self_attn.q_a_proj.weight"].T)
    assert same(t["attn.q_norm"], rms(t["attn.q_a"], w["self_attn.q_a_layernorm.weight"]))
    q = (t["attn.q_norm"] @ w["self_attn.q_b_proj.weight"].T).view(T, 5, 40)
    assert same(t["attn.q"], torch.cat([q[..., :24], interleaved(q[..., 24:])], dim=-1))
    kv = x @ w["self_attn.kv_a_proj_with_mqa.weight"].T
    assert same(t["attn.kv_latent"], rms(kv[:, :40], w["self_attn.kv_a_layernorm.weight"]))
    assert same(t["attn.k_rope"], interleaved(kv[:, 40:]))


def test_indexer(layer):
    """Indexer queries and keys turn in half-split pairs of their first 16 features; keys are layer-normed with bias."""
    t, w = layer
    q = (t["attn.q_norm"] @ w["self_attn.indexer.wq_b.weight"].T).view(T, 16, 32)
    assert same(t["attn.indexer.q"], half_split(q))
    k = t["input_norm"] @ w["self_attn.indexer.wk.weight"].T
    k = normed(k, w["self_attn.indexer.k_norm.weight"], w["self_attn.indexer.k_norm.bias"])
    assert same(t["attn.indexer.k"], half_split(k))
    assert same(t["attn.indexer.weights"], t["input_norm"] @ w["self_attn.indexer.weights_proj.weight"].T)


def test_core_and_output(layer):
    """Every query's core is the softmax over its selected keys and the sink, and o_proj follows."""
    t, w = layer
    kv = (t["attn.kv_latent"] @ w["self_attn.kv_b_proj.weight"].T).view(T, 5, 48)
    for query in range(T):
        keys = [k for k in t["attn.indexer.topk"][query].tolist() if k >= 0]
        for head in range(5):
            score = kv[keys, head, :24] @ t["attn.q"][query, head, :24]
            score = (score + t["attn.k_rope"][keys] @ t["attn.q"][query, head, 24:]) / math.sqrt(40)
            share = score.exp() / (score.exp().sum() + w["self_attn.sinks"][head].exp())
            assert same(t["attn.core"][query, head], share @ kv[keys, head, 24:])
    assert same(t["attn"], t["attn.core"].flatten(1) @ w["self_attn.o_proj.weight"].T)
    assert same(t["post_attn_norm"], rms(t["mid"], w["post_attention_layernorm.weight"]))


def gated(x: Tensor, w: Taps, at: str) -> Tensor:
    gate = x @ w[f"{at}.gate_proj.weight"].T
    return (gate * gate.sigmoid() * (x @ w[f"{at}.up_proj.weight"].T)) @ w[f"{at}.down_proj.weight"].T


def test_experts(layer):
    """Each token's routed sum is its two experts' outputs by its weights; the shared expert comes unscaled."""
    t, w = layer
    x = t["post_attn_norm"]
    p = (x @ w["mlp.gate.weight"].T).sigmoid()
    assert same(t["moe.router.topk.scores"], p + w["mlp.gate.e_score_correction_bias"])
    for token in range(T):
        best = sorted(t["moe.router.topk.scores"][token].topk(2).indices.tolist())
        assert t["moe.router.topk"][token].tolist() == best
        expected = torch.zeros(160, dtype=torch.float64)
        for e in best:
            at = f"mlp.experts.{e}"
            gate = (w[f"{at}.gate_proj.weight"] @ x[token]).clamp(max=7)
            up = (w[f"{at}.up_proj.weight"] @ x[token]).clamp(-7, 7)
            out = w[f"{at}.down_proj.weight"] @ (gate * (1.702 * gate).sigmoid() * (up + 1))
            expected += 2.5 * p[token, e] / p[token, best].sum() * out
        assert same(t["moe.experts"][token], expected)
    assert same(t["moe.shared_expert"], gated(x, w, "mlp.shared_experts"))
    assert same(t["moe"], t["moe.experts"] + t["moe.shared_expert"])


def test_stream(taps, weights):
    """Layers add to the stream; the first has a dense block; pictures replace the image rows; logits are capped."""
    ids = taps["inputs.token_ids"]
    merged = weights["model.embed_tokens.weight"][ids].clone()
    assert same(taps["embed"], merged)
    merged[ids == 258] = taps["vision.merger"]
    assert same(taps["merged"], merged)
    assert same(taps["layers.0.mid"], merged + taps["layers.0.attn"])
    assert same(taps["layers.0.mlp"], gated(taps["layers.0.post_attn_norm"], weights, "model.layers.0.mlp"))
    assert same(taps["layers.0"], taps["layers.0.mid"] + taps["layers.0.mlp"])
    assert same(taps["layers.2.mid"], taps["layers.1"] + taps["layers.2.attn"])
    assert same(taps["norm"], rms(taps["layers.4"], weights["model.norm.weight"]))
    assert same(taps["logits"], 20 * (taps["norm"] @ weights["lm_head.weight"].T / 20).tanh())


def test_tower(taps, weights):
    """A block is attention inside each picture and a tanh-GELU; the merger joins four patches and uses erf-GELU."""
    w = {k.removeprefix("visual."): v for k, v in weights.items() if k.startswith("visual.")}

    def linear(x: Tensor, at: str) -> Tensor:
        return x @ w[f"{at}.weight"].T + w[f"{at}.bias"]

    x = taps["vision.patch_embed"] + taps["vision.pos_embed"]
    assert same(taps["vision.patch_embed"], linear(taps["inputs.pixel_values"].double(), "patch_embed"))
    mixed = []
    for part in x.split([24, 24]):
        q, k, v = linear(normed(part, w["blocks.0.norm1.weight"], w["blocks.0.norm1.bias"]), "blocks.0.attn.qkv").split(
            48, -1
        )
        heads = [((q[:, h : h + 16] @ k[:, h : h + 16].T) / 4).softmax(-1) @ v[:, h : h + 16] for h in range(0, 48, 16)]
        mixed.append(linear(torch.cat(heads, dim=-1), "blocks.0.attn.proj"))
    x = x + torch.cat(mixed)
    inner = linear(normed(x, w["blocks.0.norm2.weight"], w["blocks.0.norm2.bias"]), "blocks.0.mlp.fc1")
    inner = 0.5 * inner * (1 + (math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)).tanh())
    assert same(taps["vision.blocks.0"], x + linear(inner, "blocks.0.mlp.fc2"))
    assert same(taps["vision.norm"], normed(taps["vision.blocks.1"], w["norm.weight"], w["norm.bias"]))
    inner = linear(taps["vision.norm"].reshape(-1, 192), "merger.fc1")
    inner = 0.5 * inner * (1 + (inner / math.sqrt(2)).erf())
    assert same(taps["vision.merger"], linear(inner, "merger.fc2"))
