"""The indexer: which earlier keys a query attends to beside its recent ones. Knows one layer's weights; no attention.

B batch  T tokens of this call  S keys so far  L tokens of the whole request  I heads  K head width  C choices
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from reference_impl.config import Config
from reference_impl.layers import (
    layer_norm,
    linear,
    rotary_angles,
    rotate_half_split,
    top_indices,
    wide,
    wide_linear,
    yarn_frequencies,
)
from reference_impl.request import Call

NORM_EPS = 1e-6
QUERY_BLOCK = 256
"""Queries that are scored at once; the scores of all heads for all would not fit at length."""
HIDDEN, HEADS = "batch token feature", "batch token head feature"
NEVER = float("-inf")


def select_keys(
    c: Config, w: Mapping[str, Tensor], at: str, layer: int, x_BTD: Tensor, q_a_BTR: Tensor, call: Call
) -> Tensor:
    """Return the keys that each query attends to beside its window, ascending, -1 where there are fewer. [B, T, C].

    Candidates are the keys before the window; the policy of the layer says what each is worth.
    """
    policy, record = c.index_policy(layer), call.record
    if policy == "random":
        keys_S = torch.arange(call.start + x_BTD.shape[1], device=x_BTD.device)
        scores_BTS = random_scores(layer, call.places_T, keys_S).to(wide(x_BTD).dtype).expand(len(x_BTD), -1, -1)
    else:
        scores_BTS = importance(c, w, at, x_BTD, q_a_BTR, call)
    early_TS = torch.arange(scores_BTS.shape[-1], device=x_BTD.device) > call.places_T[:, None] - c.index_window
    scores_BTS = scores_BTS.masked_fill(early_TS, NEVER)
    if policy == "block":
        scores_BTS = best_of_block(scores_BTS, c.index_block).masked_fill(early_TS, NEVER)
    room = call.length_tokens - scores_BTS.shape[-1]
    scores_BTL = record(f"{at}.topk.scores", F.pad(scores_BTS, (0, room), value=NEVER), dims="batch token key")

    padded = F.pad(scores_BTL[..., : scores_BTS.shape[-1]], (0, c.index_topk), value=NEVER)
    chosen_BTC = top_indices(padded, c.index_topk)
    chosen_BTC = chosen_BTC.masked_fill(chosen_BTC > call.places_T[:, None] - c.index_window, -1)
    return record(f"{at}.topk", chosen_BTC, dims="batch token choice")


def importance(c: Config, w: Mapping[str, Tensor], at: str, x_BTD: Tensor, q_a_BTR: Tensor, call: Call) -> Tensor:
    """Score the keys up to each query: heads' agreement, cut at zero, weighed by the query. Shape [B, T, S].

    Keys behind the last query of its block read 0.

    Source: DeepSeek-V3.2, section 2.1 ("lightning indexer").
    """
    record, w = call.record, {k.removeprefix("indexer."): v for k, v in w.items() if k.startswith("indexer.")}
    angles = rotary_angles(call.positions_BT, yarn_frequencies(c.index_rope_dim, c.rope))
    q_BTIK = linear(q_a_BTR, w["wq_b.weight"]).unflatten(-1, (c.index_n_heads, c.index_head_dim))
    q_BTIK = record(f"{at}.q", rotate_half_split(q_BTIK, angles), dims=HEADS)
    k_BTK = layer_norm(linear(x_BTD, w["wk.weight"]), w["k_norm.weight"], w["k_norm.bias"], NORM_EPS)
    k_BTK = record(f"{at}.k", rotate_half_split(k_BTK[:, :, None], angles)[:, :, 0], dims=HIDDEN)
    k_BSK = call.cache.extend(f"{at}.k", k_BTK)
    weights_BTI = record(f"{at}.weights", wide_linear(x_BTD, w["weights_proj.weight"]), dims=HIDDEN)
    scores = []
    for first in range(0, q_BTIK.shape[1], QUERY_BLOCK):
        block = slice(first, first + QUERY_BLOCK)
        seen_BSK = wide(k_BSK[:, : call.start + block.stop])
        dots_BTIS = torch.einsum("btik,bsk->btis", wide(q_BTIK[:, block]), seen_BSK).relu()
        part_BTS = torch.einsum("bti,btis->bts", weights_BTI[:, block], dots_BTIS)
        scores.append(F.pad(part_BTS, (0, k_BSK.shape[1] - seen_BSK.shape[1])))
    return torch.cat(scores, dim=1) * c.index_n_heads**-0.5 * c.index_head_dim**-0.5


def best_of_block(scores_BTS: Tensor, size: int) -> Tensor:
    """Give each key the greatest score of its block of `size` neighbours."""
    blocks = F.pad(scores_BTS, (0, -scores_BTS.shape[-1] % size), value=NEVER).unflatten(-1, (-1, size))
    return blocks.amax(-1, keepdim=True).expand_as(blocks).flatten(-2)[..., : scores_BTS.shape[-1]]


def random_scores(layer: int, queries_T: Tensor, keys_S: Tensor) -> Tensor:
    """Return scores in [0, 1) that follow from layer and places alone, the same everywhere. Shape [T, S], float32.

    Whole numbers mod 2^32; what int64 holds beyond is cut off.
    """
    mask = (1 << 32) - 1
    of_layer = ((layer + 1) * 0xC2B2AE3D) & mask
    u = (keys_S * 0x9E3779B1 & mask)[None, :] ^ (queries_T * 0x85EBCA77 & mask)[:, None] ^ of_layer
    u = u ^ (u >> 15)
    u = u * 0x2C1B3C6D & mask
    u = u ^ (u >> 12)
    u = u * 0x297A2D39 & mask
    u = u ^ (u >> 15)
    return (u >> 8).float() / (1 << 24)
