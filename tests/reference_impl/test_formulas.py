"""Every part of a layer, worked out again in float64 from the taps before it; the tower is held against upstream."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from harness.cases import image_case, read_model_info
from harness.recorder import TraceRecorder

T, RECURRENT, SPARSE, TEXT = 40, 2, 3, 28
Taps = dict[str, Tensor]


@pytest.fixture(scope="module")
def weights(load) -> Taps:
    return {w.name: w.tensor for w in load("float64").weights()}


@pytest.fixture(scope="module")
def taps(load, checkpoint) -> Taps:
    port, recorder = load("float64"), TraceRecorder()
    inputs = port.prepare(image_case(read_model_info(checkpoint), [(32, 48), (48, 32)], length=TEXT), recorder)
    assert inputs.token_ids.shape[1] == T
    recorder.span(0, T)
    port.forward(inputs, recorder)
    return {name: tensor[0] if tensor.shape[0] == 1 else tensor for name, tensor in recorder.tensors().items()}


def of_layer(taps: Taps, weights: Taps, n: int) -> tuple[Taps, Taps]:
    """Return taps and weights of one layer, by the rest of their names."""
    parts = []
    for values, prefix in ((taps, "mtp." if n == 8 else f"layers.{n}."), (weights, f"model.layers.{n}.")):
        parts.append({k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)})
    return parts[0], parts[1]


def same(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual.double(), expected.double(), rtol=1e-9, atol=1e-10)


def frequency(i: int) -> float:
    """Return the i-th frequency of 16 rotated features, from the numbers that YaRN's formula gives by hand.

    d(32) = 16 ln(4096 / 64 pi) / (2 ln 50000) = 2.2, d(1) = 4.8: from pair 2 on to pair 5 it is blended.
    """
    slow = (0, 0, 0, 1 / 3, 2 / 3, 1, 1, 1)[i]
    return 50000.0 ** (-i / 8) * (slow / 256 + 1 - slow)


def turned(pairs: Tensor) -> Tensor:
    """Rotate complex pairs [T, ..., 8] by position times frequency."""
    angles = torch.arange(T).double()[:, None] * torch.tensor([frequency(i) for i in range(8)], dtype=torch.float64)
    angles = angles.view(T, *[1] * (pairs.dim() - 2), 8)
    return pairs * torch.complex(angles.cos(), angles.sin())


def interleaved(x: Tensor) -> Tensor:
    return torch.view_as_real(turned(torch.complex(x[..., 0::2], x[..., 1::2]))).flatten(-2)


def half_split(x: Tensor) -> Tensor:
    y = turned(torch.complex(x[..., :8], x[..., 8:16]))
    return torch.cat([y.real, y.imag, x[..., 16:]], dim=-1)


def rms(x: Tensor, w: Tensor | float) -> Tensor:
    return w * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def normed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return w * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() + b


def mixed(query: Tensor, *streams: Tensor) -> Tensor:
    """Mix streams [T, D] token by token."""
    rows = []
    for token in range(T):
        level = [rms(s[token], 1.0) for s in streams]
        share = torch.stack([query @ s / math.sqrt(160) for s in level]).exp()
        rows.append(sum((p / share.sum() * s for p, s in zip(share, level, strict=True)), torch.zeros_like(level[0])))
    return torch.stack(rows)


def test_streams_and_mixes(taps, weights):
    """Within a block of three layers parts add up; every part's input is mixed from the ends of blocks and the sum."""
    t, w = taps, weights
    stream, ends = t["merged"], []
    rows = {1: "vision.deepstack.0", 3: "vision.deepstack.1"}
    for n in range(8):
        at, own = f"layers.{n}", f"model.layers.{n}"
        if n == 0:
            assert "layers.0.attn_mix" not in t
            x = stream
        else:
            x = t[f"{at}.attn_mix"]
            assert same(x, mixed(w[f"{own}.attn_res.query"], *ends, stream)), n
        assert same(t[f"{at}.input_norm"], rms(x, w[f"{own}.input_layernorm.weight"]))
        if n in (0, 3, 6):
            ends.append(stream)
            stream = torch.zeros_like(stream)
        stream = stream + t[f"{at}.attn"]
        assert same(t[f"{at}.mid"], stream), n
        assert same(t[f"{at}.mlp_mix"], mixed(w[f"{own}.mlp_res.query"], *ends, stream)), n
        assert same(t[f"{at}.post_attn_norm"], rms(t[f"{at}.mlp_mix"], w[f"{own}.post_attention_layernorm.weight"]))
        stream = stream + t[f"{at}.moe" if n else "layers.0.mlp"]
        if n in rows:
            stream = stream.clone()
            stream[t["inputs.token_ids"] == 258] += t[rows[n]]
        assert same(t[at], stream), n
    assert same(t["final_mix"], mixed(w["model.final_res.query"], *ends, stream))
    assert same(t["norm"], rms(t["final_mix"], w["model.norm.weight"]))
    assert same(t["logits"], 20 * (t["norm"] @ w["lm_head.weight"].T / 20).tanh())
    merged = w["model.embed_tokens.weight"][t["inputs.token_ids"]].clone()
    assert same(t["embed"], merged)
    merged[t["inputs.token_ids"] == 258] = t["vision.merger"]
    assert same(t["merged"], merged)


def test_recurrent_attention(taps, weights):
    """Convolution, decay, the delta rule as matrices, and the gated norm are the page's, head by head."""
    t, w = of_layer(taps, weights, RECURRENT)
    x = t["input_norm"]
    qkv = torch.cat([x @ w[f"linear_attn.{k}_proj.weight"].T for k in "qkv"], dim=-1)
    taps_4 = w["linear_attn.conv1d.weight"][:, 0]
    conv = torch.zeros_like(qkv)
    for token in range(T):
        for back in range(min(4, token + 1)):
            conv[token] += taps_4[:, 3 - back] * qkv[token - back]
    q, k, v = (part.reshape(T, 5, 24) for part in (conv * conv.sigmoid()).split(120, -1))
    assert same(t["attn.q"], q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() / math.sqrt(24))
    assert same(t["attn.k"], k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt())
    assert same(t["attn.v"], v)
    f = (x @ w["linear_attn.f_a_proj.weight"].T @ w["linear_attn.f_b_proj.weight"].T).view(T, 5, 24)
    step = (1 + (f + w["linear_attn.dt_bias"].view(5, 24)).exp()).log()
    assert same(t["attn.decay"], -w["linear_attn.A_log"].exp()[:, None] * step)
    assert same(t["attn.beta"], (x @ w["linear_attn.b_proj.weight"].T).sigmoid())
    for head in range(5):
        state = torch.zeros(24, 24, dtype=torch.float64)
        for token in range(T):
            q, k, v = (t[f"attn.{n}"][token, head] for n in "qkv")
            beta, kept = t["attn.beta"][token, head], t["attn.decay"][token, head].exp()
            erase = torch.eye(24, dtype=torch.float64) - beta * torch.outer(k, k)
            state = erase @ torch.diag(kept) @ state + beta * torch.outer(k, v)
            assert same(t["attn.core"][token, head], state.T @ q)
    gate = (x @ w["linear_attn.g_a_proj.weight"].T @ w["linear_attn.g_b_proj.weight"].T).view(T, 5, 24).sigmoid()
    assert same(t["attn.norm"], rms(t["attn.core"], w["linear_attn.o_norm.weight"]) * gate)
    assert same(t["attn"], t["attn.norm"].flatten(1) @ w["linear_attn.o_proj.weight"].T)


@pytest.mark.parametrize("n", [SPARSE, 7, 8])
def test_queries_and_latents(taps, weights, n):
    """Queries turn in interleaved pairs after the nope part; the latent is normed and the rope key is not."""
    t, w = of_layer(taps, weights, n)
    x = t["input_norm"]
    assert same(t["attn.q_a"], x @ w["self_attn.q_a_proj.weight"].T)
    assert same(t["attn.q_norm"], rms(t["attn.q_a"], w["self_attn.q_a_layernorm.weight"]))
    q = (t["attn.q_norm"] @ w["self_attn.q_b_proj.weight"].T).view(T, 5, 40)
    assert same(t["attn.q"], torch.cat([q[..., :24], interleaved(q[..., 24:])], dim=-1))
    kv = x @ w["self_attn.kv_a_proj_with_mqa.weight"].T
    assert same(t["attn.kv_latent"], rms(kv[:, :40], w["self_attn.kv_a_layernorm.weight"]))
    assert same(t["attn.k_rope"], interleaved(kv[:, 40:]))


@pytest.mark.parametrize("n", [SPARSE, 7, 8])
def test_indexer(taps, weights, n):
    """Indexer queries and keys turn in half-split pairs; candidates end before the window; the best eight are taken."""
    t, w = of_layer(taps, weights, n)
    q = (t["attn.q_norm"] @ w["self_attn.indexer.wq_b.weight"].T).view(T, 16, 32)
    assert same(t["attn.indexer.q"], half_split(q))
    k = t["input_norm"] @ w["self_attn.indexer.wk.weight"].T
    k = normed(k, w["self_attn.indexer.k_norm.weight"], w["self_attn.indexer.k_norm.bias"])
    assert same(t["attn.indexer.k"], half_split(k))
    assert same(t["attn.indexer.weights"], t["input_norm"] @ w["self_attn.indexer.weights_proj.weight"].T)
    for token in range(T):
        dots = (t["attn.indexer.k"][: max(token - 4, 0)] @ t["attn.indexer.q"][token].T).clamp(min=0)
        worth = (dots @ t["attn.indexer.weights"][token] / (4 * math.sqrt(32))).tolist()
        if n == 7:  # by block
            worth = [max(worth[s - s % 4 : s - s % 4 + 4]) for s in range(len(worth))]
        row = t["attn.indexer.topk.scores"][token]
        assert row[: len(worth)].tolist() == pytest.approx(worth, rel=1e-9, abs=1e-10)
        assert torch.isneginf(row[len(worth) :]).all()
        best = sorted(sorted(range(len(worth)), key=lambda s: -worth[s])[:8])
        assert t["attn.indexer.topk"][token].tolist() == best + [-1] * (8 - len(best))


@pytest.mark.parametrize("n", [SPARSE, 7, 8])
def test_core_and_output(taps, weights, n):
    """Every query attends to its window, its choice and the rows of pictures before it, beside the sink."""
    t, w = of_layer(taps, weights, n)
    kv = (t["attn.kv_latent"] @ w["self_attn.kv_b_proj.weight"].T).view(T, 5, 48)
    places: list[int] = []
    if n < 8:
        places = (taps["inputs.token_ids"] == 258).nonzero()[:, 0].tolist()
        rows = taps["vision.merger"] @ w["self_attn.visual_kv_proj.weight"].T
        assert same(t["attn.visual_latent"], rms(rows, w["self_attn.visual_norm.weight"]))
        seen = (t["attn.visual_latent"] @ w["self_attn.kv_b_proj.weight"].T).view(-1, 5, 48)
    scale = (0.0707 * math.log(256) + 1) ** 2 / math.sqrt(40)
    for token in range(T):
        keys = sorted({*range(max(0, token - 4), token + 1), *t["attn.indexer.topk"][token].tolist()} - {-1})
        before = [r for r, place in enumerate(places) if place <= token]
        for head in range(5):
            q = t["attn.q"][token, head]
            score, value = kv[keys, head, :24] @ q[:24] + t["attn.k_rope"][keys] @ q[24:], kv[keys, head, 24:]
            if before:
                score = torch.cat([score, seen[before, head, :24] @ q[:24]])
                value = torch.cat([value, seen[before, head, 24:]])
            share = (score * scale).exp()
            share = share / (share.sum() + w["self_attn.sinks"][head].exp())
            assert same(t["attn.core"][token, head], share @ value)
    assert same(t["attn"], t["attn.core"].flatten(1) @ w["self_attn.o_proj.weight"].T)


def gated(x: Tensor, w: Taps, at: str) -> Tensor:
    gate = x @ w[f"{at}.gate_proj.weight"].T
    return (gate * gate.sigmoid() * (x @ w[f"{at}.up_proj.weight"].T)) @ w[f"{at}.down_proj.weight"].T


@pytest.mark.parametrize("n", [SPARSE, 8])
def test_experts(taps, weights, n):
    """Three experts of the two best groups by biased scores, weighed by the scores without; the shared one unscaled."""
    t, w = of_layer(taps, weights, n)
    x = t["post_attn_norm"]
    p = (x @ w["mlp.gate.weight"].T).sigmoid()
    for token in range(T):
        biased = (p[token] + w["mlp.gate.e_score_correction_bias"]).tolist()
        groups = [biased[i : i + 4] for i in (0, 4, 8)]
        worth = [sum(sorted(group)[-2:]) for group in groups]
        dropped = min(range(3), key=lambda g: worth[g])
        assert t["moe.router.groups.topk.scores"][token].tolist() == pytest.approx(worth, rel=1e-12)
        assert t["moe.router.groups.topk"][token].tolist() == sorted({0, 1, 2} - {dropped})
        scores = [-math.inf if e // 4 == dropped else biased[e] for e in range(12)]
        assert t["moe.router.topk.scores"][token].tolist() == pytest.approx(scores, rel=1e-12)
        best = sorted(sorted(range(12), key=lambda e: -scores[e])[:3])
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


def test_further_token(taps, weights):
    """Its input joins the token and the model's norm of the token before; residuals are plain; one head."""
    t, w = of_layer(taps, weights, 8)
    assert same(taps["layers.0.mlp"], gated(taps["layers.0.post_attn_norm"], weights, "model.layers.0.mlp"))
    before = torch.cat([torch.zeros(1, 160, dtype=torch.float64), taps["norm"][:-1]])
    both = torch.cat([rms(taps["embed"], w["enorm.weight"]), rms(before, w["hnorm.weight"])], dim=-1)
    assert same(t["in"], both @ w["eh_proj.weight"].T)
    assert same(t["input_norm"], rms(t["in"], w["input_layernorm.weight"]))
    assert same(t["mid"], t["in"] + t["attn"])
    assert same(t["post_attn_norm"], rms(t["mid"], w["post_attention_layernorm.weight"]))
    assert same(taps["mtp"], t["mid"] + t["moe"])
    assert same(t["norm"], rms(taps["mtp"], w["shared_head.norm.weight"]))
    assert same(t["logits"], 20 * (t["norm"] @ weights["lm_head.weight"].T / 20).tanh())
    assert "attn.visual_latent" not in t
