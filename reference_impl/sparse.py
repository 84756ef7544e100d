"""Sparse attention: latent keys and values, sinks, pictures as keys. Knows one layer's weights; not the decoder.

B batch  T tokens of this call  S keys so far  N rows of pictures  D features  H heads  K head width  R latent width
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from reference_impl.config import Config
from reference_impl.indexer import select_keys
from reference_impl.layers import (
    linear,
    rms_norm,
    rotary_angles,
    rotate_interleaved,
    score_scale,
    wide,
    yarn_frequencies,
)
from reference_impl.request import Call, Pictures

HIDDEN, HEADS = "batch token feature", "batch token head feature"
QUERY_BLOCK = 256
"""Queries that are attended with at once; the scores of all would not fit at length."""


def sparse_attention(
    c: Config, w: Mapping[str, Tensor], at: str, layer: int, x_BTD: Tensor, call: Call, pictures: Pictures | None
) -> Tensor:
    """Apply one sparse layer to normed tokens; `at` names its taps and what it keeps."""
    record, nope, rank = call.record, c.qk_nope_head_dim, c.kv_lora_rank
    angles = rotary_angles(call.positions_BT, yarn_frequencies(c.qk_rope_head_dim, c.rope))

    q_a_BTR = record(f"{at}.q_a", linear(x_BTD, w["q_a_proj.weight"]), dims=HIDDEN)
    q_a_BTR = record(f"{at}.q_norm", rms_norm(q_a_BTR, w["q_a_layernorm.weight"], c.rms_norm_eps), dims=HIDDEN)
    q_BTHK = linear(q_a_BTR, w["q_b_proj.weight"]).unflatten(-1, (c.num_attention_heads, c.qk_head_dim))
    q_BTHK = torch.cat([q_BTHK[..., :nope], rotate_interleaved(q_BTHK[..., nope:], angles)], dim=-1)
    q_BTHK = record(f"{at}.q", q_BTHK, dims=HEADS)

    kv_a = linear(x_BTD, w["kv_a_proj_with_mqa.weight"])
    latent_BTR = rms_norm(kv_a[..., :rank], w["kv_a_layernorm.weight"], c.rms_norm_eps)
    latent_BTR = record(f"{at}.kv_latent", latent_BTR, dims=HIDDEN)
    k_rope_BTK = rotate_interleaved(kv_a[:, :, None, rank:], angles)[:, :, 0]
    k_rope_BTK = record(f"{at}.k_rope", k_rope_BTK, dims=HIDDEN)
    latent_BSR = call.cache.extend(f"{at}.kv_latent", latent_BTR)
    k_rope_BSK = call.cache.extend(f"{at}.k_rope", k_rope_BTK)

    selected_BTC = select_keys(c, w, f"{at}.indexer", layer, x_BTD, q_a_BTR, call)
    k_BSHK, v_BSHK = keys_and_values(c, w, latent_BSR, k_rope_BSK)
    allowed_BTS = one_hot_any(selected_BTC, latent_BSR.shape[1]) | recent(
        call.places_T, k_BSHK.shape[1], c.index_window
    )
    if pictures is not None:
        latent_BNR = _visual_latents(c, w, at, pictures, call)
        extra_k, extra_v = keys_and_values(c, w, latent_BNR, None)
        k_BSHK, v_BSHK = torch.cat([extra_k, k_BSHK], dim=1), torch.cat([extra_v, v_BSHK], dim=1)
        seen_TN = pictures.places_N <= call.places_T[:, None]
        allowed_BTS = torch.cat([seen_TN.expand(len(x_BTD), -1, -1), allowed_BTS], dim=-1)

    scale = score_scale(c.rope) ** 2 * c.qk_head_dim**-0.5
    core_BTHK = record(f"{at}.core", attend(q_BTHK, k_BSHK, v_BSHK, allowed_BTS, w["sinks"], scale), dims=HEADS)
    return record(at, linear(core_BTHK.flatten(2), w["o_proj.weight"]), dims=HIDDEN)


def keys_and_values(
    c: Config, w: Mapping[str, Tensor], latent_BSR: Tensor, k_rope_BSK: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the keys and values [B, S, H, K] of latents; the rotary part of a key is one for all heads, None zeros."""
    nope, heads = c.qk_nope_head_dim, c.num_attention_heads
    kv_BSHK = linear(latent_BSR, w["kv_b_proj.weight"]).unflatten(-1, (heads, nope + c.v_head_dim))
    if k_rope_BSK is None:
        k_rope_BSK = latent_BSR.new_zeros(*latent_BSR.shape[:2], c.qk_rope_head_dim)
    shared_BSHK = k_rope_BSK[:, :, None].expand(-1, -1, heads, -1)
    return torch.cat([kv_BSHK[..., :nope], shared_BSHK], dim=-1), kv_BSHK[..., nope:]


def _visual_latents(c: Config, w: Mapping[str, Tensor], at: str, pictures: Pictures, call: Call) -> Tensor:
    """Return the latents of a request's pictures; the request's first call makes them. Shape [B, N, R]."""
    name = f"{at}.visual_latent"
    if name not in call.cache.kept:
        latent_NR = rms_norm(
            linear(pictures.rows_ND, w["visual_kv_proj.weight"]), w["visual_norm.weight"], c.rms_norm_eps
        )
        call.cache.extend(name, call.record(name, latent_NR, dims="row feature")[None])
    return call.cache.kept[name]


def attend(
    q_BTHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, allowed_BTS: Tensor, sinks_H: Tensor, scale: float
) -> Tensor:
    """Mix the values of the allowed keys; each head's sink takes its share of the softmax and gives nothing.

    Of each block of queries, keys that none of them attends to are left out.
    """
    done = []
    for first in range(0, q_BTHK.shape[1], QUERY_BLOCK):
        block = slice(first, first + QUERY_BLOCK)
        keys = allowed_BTS[:, block].flatten(0, 1).any(0).nonzero()[:, 0]
        scores_BHTS = torch.einsum("bthk,bshk->bhts", wide(q_BTHK[:, block]), wide(k_BSHK[:, keys])) * scale
        scores_BHTS = scores_BHTS.masked_fill(~allowed_BTS[:, None, block, keys], float("-inf"))
        sink_BHT1 = sinks_H[None, :, None, None].expand(*scores_BHTS.shape[:3], 1).to(scores_BHTS.dtype)
        chances_BHTS = torch.cat([scores_BHTS, sink_BHT1], dim=-1).softmax(-1)[..., :-1]
        done.append(torch.einsum("bhts,bshk->bthk", chances_BHTS.to(v_BSHK.dtype), v_BSHK[:, keys]))
    return torch.cat(done, dim=1)


def one_hot_any(chosen_BTC: Tensor, count: int) -> Tensor:
    """Return which of `count` keys are among the chosen ones; -1 chooses none. Shape [B, T, count], boolean."""
    empty = torch.zeros(*chosen_BTC.shape[:-1], count + 1, dtype=torch.bool, device=chosen_BTC.device)
    return empty.scatter(-1, chosen_BTC.where(chosen_BTC >= 0, count), True)[..., :count]


def recent(places_T: Tensor, count: int, window: int) -> Tensor:
    """Return which of `count` keys are among each query's last `window`, itself included. Shape [T, count], boolean."""
    keys_S = torch.arange(count, device=places_T.device)
    return (keys_S <= places_T[:, None]) & (keys_S > places_T[:, None] - window)
