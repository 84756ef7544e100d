"""Sparse attention: latent keys and values in pages, an indexer that chooses among them, pictures as keys, sinks.

Knows names of weights and operators; must not know where pages lie beyond what the store says.

Legend: B requests, T tokens of this call, S keys so far, F features, H heads, D head width, L latent, R rotary,
K chosen, W window, M picture rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_impl import ops, rotary
from accel_impl.held import CHOICE, HEADS, HIDDEN, Held
from accel_impl.store import SlotStore
from harness.adapter import Recorder

INDEXER_EPS = 1e-6
"""Of the layer norm of the indexer's keys; the configuration does not name it."""
WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Where the tokens of a call stand: places count tokens, on the device; positions turn them, on the host.

    `total` is the length that scores are padded to.
    """

    places_BT: Tensor
    positions_BT: Tensor
    total: int
    turn: tuple[Tensor, Tensor]
    index_turn: tuple[Tensor, Tensor]


def span_of(held: Held, places_BT: Tensor, positions_BT: Tensor, total: int) -> Span:
    """Return the span of places and positions, with both tables of angles."""
    rope, config = held.config.rope, held.config
    return Span(
        places_BT=places_BT,
        positions_BT=positions_BT,
        total=total,
        turn=rotary.table(positions_BT, rope, config.qk_rope_head_dim, held.device),
        index_turn=rotary.table(positions_BT, rope, config.index_rope_dim, held.device),
    )


def sparse_attention(
    held: Held, layer: int, tap: str, x_BTF: Tensor, span: Span, store: SlotStore, record: Recorder, *,
    images_MF: Tensor | None = None, pictures: bool = True,
) -> Tensor:  # fmt: skip
    """Return the layer's attention. `images_MF` are rows of the tower, in the call that brings them.

    `pictures` says whether the layer attends to pictures at all.
    """
    config, name = held.config, f"model.layers.{layer}.self_attn"
    q_a = record(f"{tap}.q_a", held.linear(x_BTF, f"{name}.q_a_proj"), dims=HIDDEN)
    q_a = record(f"{tap}.q_norm", held.rms_norm(q_a, f"{name}.q_a_layernorm"), dims=HIDDEN)
    q = held.linear(q_a, f"{name}.q_b_proj").unflatten(-1, (-1, config.head_dim))
    nope, rest = q.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
    q = torch.cat((nope, ops.rope(held.use, rest, *span.turn, interleaved=True)), dim=-1)
    heads = config.num_attention_heads
    q_BTHD = held.place.record_cut(record, f"{tap}.q", q, heads, 2, HEADS)
    kv = held.linear(x_BTF, f"{name}.kv_a_proj_with_mqa")
    latent, k_rope = kv.split((config.kv_lora_rank, config.qk_rope_head_dim), dim=-1)
    latent = record(f"{tap}.kv_latent", held.rms_norm(latent, f"{name}.kv_a_layernorm"), dims=HIDDEN)
    k_rope = ops.rope(held.use, k_rope[:, :, None], *span.turn, interleaved=True)[:, :, 0]
    store.put(layer, {"latent": latent, "rope": record(f"{tap}.k_rope", k_rope, dims=HIDDEN)})
    chosen_BTK = _chosen(held, layer, tap, x_BTF, q_a, span, store, record)
    if images_MF is not None:
        rows = held.rms_norm(held.linear(images_MF, f"{name}.visual_kv_proj"), f"{name}.visual_norm")
        store.put_pictures(layer, record(f"{tap}.visual_latent", rows, dims="row feature"))
    rows_BTK = _rows(config.index_window, chosen_BTK, span.places_BT, store, pictures=pictures)
    core = _attended(held, layer, q_BTHD, rows_BTK, store)
    core = held.place.record_cut(record, f"{tap}.core", core, heads, 2, HEADS)
    return held.row_linear(core.flatten(2), f"{name}.o_proj")


def _chosen(
    held: Held, layer: int, tap: str, x_BTF: Tensor, q_a: Tensor, span: Span, store: SlotStore, record: Recorder
) -> Tensor:
    """Return the places that each query chooses among those before its window [B, T, K], -1 unused."""
    config, policy = held.config, held.config.policy(layer)
    if policy == "random":
        keys = max(store.starts) + store.count
        scores_BTS = drawn_scores(layer, span.places_BT, keys, config.index_window)
    else:
        scores_BTS = _scored(held, layer, tap, x_BTF, q_a, span, store, record)
    if policy == "block":
        scores_BTS = best_of_blocks(scores_BTS, config.index_block)
    scores_BTS = F.pad(scores_BTS, (0, max(0, span.total - scores_BTS.shape[-1])), value=float("-inf"))
    index = f"{tap}.indexer"
    scores_BTS = record(f"{index}.topk.scores", scores_BTS, dims="batch token key", kind="scores")
    chosen = ops.choose_keys(held.use, scores_BTS, config.index_topk)
    return record(f"{index}.topk", chosen, dims=CHOICE, kind="selection")


def _scored(
    held: Held, layer: int, tap: str, x_BTF: Tensor, q_a: Tensor, span: Span, store: SlotStore, record: Recorder
) -> Tensor:
    """Put this call's indexer keys into the store and return every candidate's score [B, T, S]."""
    config, name, index = held.config, f"model.layers.{layer}.self_attn.indexer", f"{tap}.indexer"
    q = held.linear(q_a, f"{name}.wq_b").unflatten(-1, (-1, config.index_head_dim))
    q = record(f"{index}.q", _turned(held, q, span), dims=HEADS)
    k = held.linear(x_BTF, f"{name}.wk")
    bias = held.tensor(f"{name}.k_norm.bias")
    k = ops.layer_norm(held.use, k, held.tensor(f"{name}.k_norm.weight"), bias, INDEXER_EPS)
    k = record(f"{index}.k", _turned(held, k[:, :, None], span)[:, :, 0], dims=HIDDEN)
    weights = record(f"{index}.weights", held.exact(x_BTF, f"{name}.weights_proj"), dims=HIDDEN)
    store.put(layer, {"index": k})
    keys_BSD = store.all(layer, "index")
    return ops.indexer_scores(held.use, q, keys_BSD, weights, span.places_BT, config.index_window)


def _turned(held: Held, x_BTHD: Tensor, span: Span) -> Tensor:
    turned, rest = x_BTHD.tensor_split([held.config.index_rope_dim], dim=-1)
    return torch.cat((ops.rope(held.use, turned, *span.index_turn, interleaved=False), rest), dim=-1)


def best_of_blocks(scores_BTS: Tensor, block: int) -> Tensor:
    """Give each candidate the greatest score among the candidates of its block of neighbours."""
    padded = F.pad(scores_BTS, (0, -scores_BTS.shape[-1] % block), value=float("-inf")).unflatten(-1, (-1, block))
    best = padded.amax(-1, keepdim=True).expand_as(padded).flatten(-2)[..., : scores_BTS.shape[-1]]
    return best.masked_fill(scores_BTS == float("-inf"), float("-inf"))


def drawn_scores(layer: int, places_BT: Tensor, keys: int, window: int) -> Tensor:
    """Return scores that depend on the layer and both places alone, in [0, 1), -inf where there is no candidate."""
    place_S = torch.arange(keys, device=places_BT.device)
    word = (place_S * 0x9E3779B1 & WORD) ^ (places_BT[..., None] * 0x85EBCA77 & WORD)
    word = word ^ ((layer + 1) * 0xC2B2AE3D & WORD)
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 1)):
        word = (word ^ (word >> shift)) * factor & WORD
    scores_BTS = (word >> 8).float() / 2**24
    return scores_BTS.masked_fill(place_S > places_BT[..., None] - window, float("-inf"))


def _rows(window: int, chosen_BTK: Tensor, places_BT: Tensor, store: SlotStore, *, pictures: bool) -> Tensor:
    """Return all rows of the pools that each query attends to: chosen, the window, pictures before it; -1 is none."""
    back_W = torch.arange(window - 1, -1, -1, device=places_BT.device)
    recent_BTW = (places_BT[..., None] - back_W).clamp(min=-1)
    rows = store.rows(torch.cat((chosen_BTK, recent_BTW), dim=-1))
    if not pictures:
        return rows
    rows_BM, places_BM = store.pictures()
    seen_BTM = places_BM[:, None] <= places_BT[..., None]
    return torch.cat((rows, torch.where(seen_BTM, rows_BM[:, None], -1)), dim=-1)


def _attended(held: Held, layer: int, q_BTHD: Tensor, rows_BTK: Tensor, store: SlotStore) -> Tensor:
    """Attend: decode reads each query's own rows, every other call gathers for blocks of queries."""
    name = f"model.layers.{layer}.self_attn"
    scale = held.config.head_dim**-0.5 * rotary.score_factor(held.config.rope)
    attend = ops.attend_decode if store.sparse else ops.attend_prefill
    latent_NL, rope_NR = store.pool(layer, "latent"), store.pool(layer, "rope")
    kv_b, sinks_H = held.weights[f"{name}.kv_b_proj.weight"], held.wide(f"{name}.sinks")
    return attend(held.use, q_BTHD, latent_NL, rope_NR, rows_BTK, kv_b, sinks_H, scale)
