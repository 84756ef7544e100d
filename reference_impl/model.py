"""The decoder, as plainly as it can be written. Knows weights, a cache and taps; must not know files, text or requests.

    B batch (1)  T tokens of this call  S keys so far  L tokens of the whole request  D features  H heads  K head width
    I indexer heads  R latent width  E experts  C choices

Every `record(...)` returns what the model must go on with, so that a replay isolates each part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from harness.adapter import Recorder
from harness.taps import part_step
from reference_impl.config import Config
from reference_impl.layers import (
    layer_norm,
    linear,
    rms_norm,
    rotary_angles,
    rotate_half_split,
    rotate_interleaved,
    top_indices,
    wide,
    wide_linear,
)
from reference_impl.vision import tower

HIDDEN, HEADS = "batch token feature", "batch token head feature"
INDEXER_NORM_EPS = 1e-6
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702


@dataclass(slots=True)
class Cache:
    """What one request keeps of each layer: latent keys-values [B, S, R], rotary keys and indexer keys [B, S, K].

    `rounded` gives what is kept of new values, by name, where a port's cache is narrower than its dtype.
    """

    length_tokens: int = 0
    kept: dict[str, Tensor] = field(default_factory=dict)
    rounded: Callable[[str, Tensor], Tensor] | None = None

    def extend(self, name: str, new_BTK: Tensor) -> Tensor:
        """Append the keys of this call; return those of all tokens so far."""
        if self.rounded is not None:
            new_BTK = self.rounded(name, new_BTK)
        old = self.kept.get(name)
        self.kept[name] = new_BTK if old is None else torch.cat([old, new_BTK], dim=1)
        return self.kept[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call: where its tokens stand in the request, the request's length, the cache and the recorder."""

    positions_BT: Tensor
    start: int
    length_tokens: int
    cache: Cache
    record: Recorder


class Model:
    """The seed model. `weights` are decoded parameters by checkpoint name, in the precision to run in."""

    def __init__(self, config: Config, weights: Mapping[str, Tensor]) -> None:
        self.config, self.weights = config, weights
        self._parts: dict[str, dict[str, Tensor]] = {}

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Return the weights below a prefix, by the rest of their names."""
        if prefix not in self._parts:
            below = {k: v for k, v in self.weights.items() if k.startswith(f"{prefix}.")}
            self._parts[prefix] = {k.removeprefix(f"{prefix}."): v for k, v in below.items()}
        return self._parts[prefix]

    def forward(self, token_ids_BT: Tensor, features: Features | None, call: Call) -> Tensor:
        """Process tokens [start, start + T) of a request after those in the cache; return their logits [B, T, V].

        `features` are the rows of a request's pictures, None where it has none.
        """
        c, record = self.config, call.record
        h_BTD = record("embed", F.embedding(token_ids_BT, self.weights["model.embed_tokens.weight"]), dims=HIDDEN)
        if features is not None:
            h_BTD = record("merged", features.into(h_BTD, token_ids_BT), dims=HIDDEN)
        for n in range(c.num_hidden_layers):
            h_BTD = self.layer(n, h_BTD, call)
        call.cache.length_tokens += token_ids_BT.shape[1]
        h_BTD = record("norm", rms_norm(h_BTD, self.weights["model.norm.weight"], c.rms_norm_eps), dims=HIDDEN)
        logits = wide(linear(h_BTD, self.weights["lm_head.weight"]))
        logits = c.logit_softcap * torch.tanh(logits / c.logit_softcap)
        return record("logits", logits, dims="batch token vocab")

    def layer(self, n: int, h_BTD: Tensor, call: Call) -> Tensor:
        """Apply one decoder layer."""
        at, w, eps, record = f"layers.{n}", self.part(f"model.layers.{n}"), self.config.rms_norm_eps, call.record
        x_BTD = record(f"{at}.input_norm", rms_norm(h_BTD, w["input_layernorm.weight"], eps), dims=HIDDEN)
        h_BTD = record(f"{at}.mid", h_BTD + self.attention(n, x_BTD, call), dims=HIDDEN)
        x_BTD = record(f"{at}.post_attn_norm", rms_norm(h_BTD, w["post_attention_layernorm.weight"], eps), dims=HIDDEN)
        if self.config.is_dense(n):
            mixed_BTD = record(f"{at}.mlp", gated(self.part(f"model.layers.{n}.mlp"), x_BTD), dims=HIDDEN)
        else:
            mixed_BTD = self.experts(n, x_BTD, record)
        return record(at, h_BTD + mixed_BTD, dims=HIDDEN)

    def attention(self, n: int, x_BTD: Tensor, call: Call) -> Tensor:
        """Apply latent attention over the keys that the indexer selects."""
        c, at, record = self.config, f"layers.{n}.attn", call.record
        w = self.part(f"model.layers.{n}.self_attn")
        B, T, _ = x_BTD.shape
        H, nope, rank = c.num_attention_heads, c.qk_nope_head_dim, c.kv_lora_rank
        angles = rotary_angles(call.positions_BT, c.qk_rope_head_dim, c.rope_theta)

        q_a = record(f"{at}.q_a", linear(x_BTD, w["q_a_proj.weight"]), dims=HIDDEN)
        q_a = record(f"{at}.q_norm", rms_norm(q_a, w["q_a_layernorm.weight"], c.rms_norm_eps), dims=HIDDEN)
        q_BTHK = linear(q_a, w["q_b_proj.weight"]).view(B, T, H, c.qk_head_dim)
        q_BTHK = torch.cat([q_BTHK[..., :nope], rotate_interleaved(q_BTHK[..., nope:], angles)], dim=-1)
        q_BTHK = record(f"{at}.q", q_BTHK, dims=HEADS)

        kv_a = linear(x_BTD, w["kv_a_proj_with_mqa.weight"])
        latent_BTR = rms_norm(kv_a[..., :rank], w["kv_a_layernorm.weight"], c.rms_norm_eps)
        latent_BTR = record(f"{at}.kv_latent", latent_BTR, dims=HIDDEN)
        k_rope_BTK = rotate_interleaved(kv_a[:, :, None, rank:], angles)[:, :, 0]
        k_rope_BTK = record(f"{at}.k_rope", k_rope_BTK, dims=HIDDEN)
        latent_BSR = call.cache.extend(f"{at}.kv_latent", latent_BTR)
        k_rope_BSK = call.cache.extend(f"{at}.k_rope", k_rope_BTK)

        selected_BTC = self.select_keys(n, x_BTD, q_a, call)
        allowed_BTS = one_hot_any(selected_BTC, latent_BSR.shape[1])

        kv_BSHK = linear(latent_BSR, w["kv_b_proj.weight"]).view(B, -1, H, nope + c.v_head_dim)
        k_BSHK = torch.cat([kv_BSHK[..., :nope], k_rope_BSK[:, :, None].expand(-1, -1, H, -1)], dim=-1)
        core_BTHK = attend(q_BTHK, k_BSHK, kv_BSHK[..., nope:], allowed_BTS, w["sinks"])
        core_BTHK = record(f"{at}.core", core_BTHK, dims=HEADS)
        return record(at, linear(core_BTHK.flatten(2), w["o_proj.weight"]), dims=HIDDEN)

    def select_keys(self, n: int, x_BTD: Tensor, q_a: Tensor, call: Call) -> Tensor:
        """Return the keys that each query attends to, ascending, -1 where fewer exist. Shape [B, T, index_topk]."""
        c, at, record = self.config, f"layers.{n}.attn.indexer", call.record
        w = self.part(f"model.layers.{n}.self_attn.indexer")
        B, T, _ = x_BTD.shape
        angles = rotary_angles(call.positions_BT, c.index_rope_dim, c.rope_theta)

        q_BTIK = linear(q_a, w["wq_b.weight"]).view(B, T, c.index_n_heads, c.index_head_dim)
        q_BTIK = record(f"{at}.q", rotate_half_split(q_BTIK, angles), dims=HEADS)
        k_BTK = layer_norm(linear(x_BTD, w["wk.weight"]), w["k_norm.weight"], w["k_norm.bias"], INDEXER_NORM_EPS)
        k_BTK = record(f"{at}.k", rotate_half_split(k_BTK[:, :, None], angles)[:, :, 0], dims=HIDDEN)
        k_BSK = call.cache.extend(f"{at}.k", k_BTK)
        head_weights_BTI = record(f"{at}.weights", wide_linear(x_BTD, w["weights_proj.weight"]), dims=HIDDEN)

        dots_BTIS = torch.einsum("btik,bsk->btis", wide(q_BTIK), wide(k_BSK)).relu()
        scores_BTS = torch.einsum("bti,btis->bts", head_weights_BTI, dots_BTIS)
        scores_BTS = scores_BTS * c.index_n_heads**-0.5 * c.index_head_dim**-0.5
        scores_BTL = F.pad(scores_BTS, (0, call.length_tokens - scores_BTS.shape[-1]), value=float("-inf"))
        query_T = call.start + torch.arange(T, device=x_BTD.device)
        future_TL = torch.arange(call.length_tokens, device=x_BTD.device)[None, :] > query_T[:, None]
        scores_BTL = scores_BTL.masked_fill(future_TL, float("-inf"))
        scores_BTL = record(f"{at}.topk.scores", scores_BTL, dims="batch token key")

        padded = F.pad(scores_BTL, (0, max(0, c.index_topk - call.length_tokens)), value=float("-inf"))
        chosen_BTC = top_indices(padded, c.index_topk)
        chosen_BTC = chosen_BTC.masked_fill(chosen_BTC > query_T[:, None], -1)
        return record(f"{at}.topk", chosen_BTC, dims="batch token choice")

    def experts(self, n: int, x_BTD: Tensor, record: Recorder) -> Tensor:
        """Apply the routed and the shared experts."""
        c, at, w = self.config, f"layers.{n}.moe", self.part(f"model.layers.{n}.mlp")
        logits_BTE = record(f"{at}.router.logits", wide_linear(x_BTD, w["gate.weight"]), dims="batch token expert")
        chances_BTE = logits_BTE.sigmoid()
        biased_BTE = chances_BTE + w["gate.e_score_correction_bias"]
        biased_BTE = record(f"{at}.router.topk.scores", biased_BTE, dims="batch token expert")
        chosen_BTC = top_indices(biased_BTE, c.num_experts_per_tok)
        chosen_BTC = record(f"{at}.router.topk", chosen_BTC, dims="batch token choice")
        weights_BTC = chances_BTE.gather(-1, chosen_BTC)
        weights_BTC = weights_BTC / (weights_BTC.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        weights_BTC = record(f"{at}.router.weights", weights_BTC, dims="batch token choice")

        sum_BTD = torch.zeros_like(wide(x_BTD))
        parts_BTCD = sum_BTD[:, :, None].repeat(1, 1, c.num_experts_per_tok, 1)
        for e in range(c.n_routed_experts):
            weight_BT = (weights_BTC * (chosen_BTC == e)).sum(-1)
            token_is_here = (chosen_BTC == e).any(-1)
            if not token_is_here.any():
                continue
            out = gated_clamped(self.part(f"model.layers.{n}.mlp.experts.{e}"), x_BTD[token_is_here])
            share = weight_BT[token_is_here][:, None] * wide(out)
            sum_BTD[token_is_here] += share
            parts_BTCD[chosen_BTC == e] = share
        if getattr(record, "wants_parts", False):
            step = part_step(parts_BTCD.shape[-1])
            record(f"{at}.experts.parts", parts_BTCD[..., ::step].float(), dims="batch token choice feature")
            record(f"{at}.experts.parts.owner", chosen_BTC, dims="batch token choice")
        routed_BTD = record(f"{at}.experts", sum_BTD.to(x_BTD.dtype), dims=HIDDEN)
        shared_BTD = gated(self.part(f"model.layers.{n}.mlp.shared_experts"), x_BTD)
        shared_BTD = record(f"{at}.shared_expert", shared_BTD, dims=HIDDEN)
        return record(at, routed_BTD + shared_BTD, dims=HIDDEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """The rows of a request's pictures, and how many of them stand before this call's first token."""

    rows_ND: Tensor
    used: int
    image_token_id: int

    def into(self, h_BTD: Tensor, token_ids_BT: Tensor) -> Tensor:
        """Put the next rows in place of this call's image tokens, in order of appearance."""
        here = token_ids_BT == self.image_token_id
        merged = h_BTD.clone()
        merged[here] = self.rows_ND[self.used : self.used + int(here.sum())]
        return merged


def picture_features(
    model: Model, pixel_values: Tensor, grid: Tensor, token_ids_BL: Tensor, start: int, record: Recorder
) -> Features:
    """Run the tower on all pictures of a request, for a call that starts at token `start`."""
    image = model.config.image_token_id
    rows = tower(model.part("visual"), model.config.vision, pixel_values, grid, record)
    return Features(rows_ND=rows, used=int((token_ids_BL[:, :start] == image).sum()), image_token_id=image)


def attend(q_BTHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, allowed_BTS: Tensor, sinks_H: Tensor) -> Tensor:
    """Mix the values of the allowed keys; each head's sink takes its share of the softmax and gives nothing."""
    scores_BHTS = torch.einsum("bthk,bshk->bhts", wide(q_BTHK), wide(k_BSHK)) * q_BTHK.shape[-1] ** -0.5
    scores_BHTS = scores_BHTS.masked_fill(~allowed_BTS[:, None], float("-inf"))
    sink_BHT1 = sinks_H[None, :, None, None].expand(*scores_BHTS.shape[:3], 1).to(scores_BHTS.dtype)
    chances_BHTS = torch.cat([scores_BHTS, sink_BHT1], dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("bhts,bshk->bthk", chances_BHTS.to(v_BSHK.dtype), v_BSHK)


def one_hot_any(chosen_BTC: Tensor, count: int) -> Tensor:
    """Return which of `count` keys are among the chosen ones; -1 chooses none. Shape [B, T, count], boolean."""
    keys = torch.arange(count, device=chosen_BTC.device)
    return (chosen_BTC[..., None] == keys).any(-2)


def gated(weights: Mapping[str, Tensor], x_BTD: Tensor) -> Tensor:
    """Apply down(silu(gate x) * up x)."""
    gate, up = linear(x_BTD, weights["gate_proj.weight"]), linear(x_BTD, weights["up_proj.weight"])
    return linear(F.silu(gate) * up, weights["down_proj.weight"])


def gated_clamped(weights: Mapping[str, Tensor], x_BTD: Tensor) -> Tensor:
    """Apply down(act(gate x, up x)), act(g, u) = min(g, 7) sigmoid(1.702 min(g, 7)) (clamp(u, -7, 7) + 1)."""
    gate = linear(x_BTD, weights["gate_proj.weight"]).clamp(max=SWIGLU_LIMIT)
    up = linear(x_BTD, weights["up_proj.weight"]).clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return linear(gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1), weights["down_proj.weight"])
