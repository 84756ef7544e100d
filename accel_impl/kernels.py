"""Custom operators of torch (`torch.ops.day0_accel`), each with a fake kernel for its shapes. Knows tensors only.

What a vendor would write in its own language stands here in torch's; what matters to torch is the same: a schema that
says what is changed, outputs that share no memory with inputs, shapes known without running. Shapes: as in
`accel_impl.ops`, weights decoded in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_impl import scan

FLOAT = torch.float32
QUERY_TILE = 128
"""Queries of one tile of scores; bounds their memory at long context."""
QUERY_BLOCK = 64
"""Queries that gather their rows together."""
TINY = 1e-30
"""Below any sum of a softmax that saw something; keeps a row that saw nothing at 0."""
_operator = torch.library.custom_op


@_operator("day0_accel::indexer_scores", mutates_args=())
def indexer_scores(q_BTHD: Tensor, k_BSD: Tensor, weights_BTH: Tensor, places_BT: Tensor, window: int) -> Tensor:
    """Score tile by tile of queries; never hold more than a tile's products."""
    heads, width = q_BTHD.shape[-2:]
    keys = k_BSD.to(FLOAT).transpose(1, 2)[:, None]
    weights = weights_BTH.to(FLOAT) * (heads**-0.5 * width**-0.5)
    place = torch.arange(k_BSD.shape[1], device=k_BSD.device)
    tiles = []
    for at in range(0, q_BTHD.shape[1], QUERY_TILE):
        tile = slice(at, at + QUERY_TILE)
        products = (q_BTHD[:, tile].to(FLOAT) @ keys).relu_()
        scores = (weights[:, tile, None] @ products)[:, :, 0]
        tiles.append(scores.masked_fill_(place > places_BT[:, tile, None] - window, float("-inf")))
    return torch.cat(tiles, dim=1)


@indexer_scores.register_fake
def _(q_BTHD: Tensor, k_BSD: Tensor, weights_BTH: Tensor, places_BT: Tensor, window: int) -> Tensor:
    return q_BTHD.new_empty(*q_BTHD.shape[:2], k_BSD.shape[1], dtype=FLOAT)


@_operator("day0_accel::choose_keys", mutates_args=())
def choose_keys(scores_BTS: Tensor, count: int) -> Tensor:
    """Take the greatest of keys made of the score's bits above and the place, counted backwards, below: no ties."""
    scores = F.pad(scores_BTS.to(FLOAT), (0, max(0, count - scores_BTS.shape[-1])), value=float("-inf"))
    tiles = [_choose(tile, count) for tile in scores.flatten(0, -2).split(QUERY_TILE)]
    return torch.cat(tiles).view(*scores_BTS.shape[:-1], count)


def _choose(scores_TS: Tensor, count: int) -> Tensor:
    bits = (scores_TS + 0.0).view(torch.int32).long()  # -0 becomes 0
    rising = torch.where(bits < 0, -1 - (bits & 0x7FFFFFFF), bits)
    last = scores_TS.shape[-1] - 1
    backwards = last - torch.arange(last + 1, device=scores_TS.device)
    ids = last - (rising * 2**31 + backwards).topk(count, dim=-1).values.remainder(2**31)
    ids = ids.masked_fill(scores_TS.gather(-1, ids) == float("-inf"), last + 1).sort(-1).values
    return ids.masked_fill(ids > last, -1)


@choose_keys.register_fake
def _(scores_BTS: Tensor, count: int) -> Tensor:
    return scores_BTS.new_empty(*scores_BTS.shape[:-1], count, dtype=torch.int64)


@_operator("day0_accel::mix_streams", mutates_args=())
def mix_streams(streams_NBTF: Tensor, query_F: Tensor, eps: float) -> Tensor:
    """Weigh the streams by share over norm: nothing is rounded before the sum."""
    streams, width = streams_NBTF.to(FLOAT), streams_NBTF.shape[-1]
    norm_NBT = (torch.linalg.vecdot(streams, streams) / width + eps).sqrt()
    scores = (streams @ query_F.to(FLOAT)) / norm_NBT * width**-0.5
    share_NBT = torch.softmax(scores, dim=0) / norm_NBT
    return torch.einsum("nbt,nbtf->btf", share_NBT, streams).to(streams_NBTF.dtype)


@mix_streams.register_fake
def _(streams_NBTF: Tensor, query_F: Tensor, eps: float) -> Tensor:
    return torch.empty_like(streams_NBTF[0])


@_operator("day0_accel::causal_conv", mutates_args=())
def causal_conv(x_BTC: Tensor, past_BWC: Tensor, weight_CW: Tensor) -> Tensor:
    """Take all windows of inputs at once."""
    x = torch.cat((past_BWC, x_BTC), dim=1).to(FLOAT)
    y = (x.unfold(1, weight_CW.shape[-1], 1) * weight_CW.to(FLOAT)).sum(-1)
    return (y * torch.sigmoid(y)).to(x_BTC.dtype)


@causal_conv.register_fake
def _(x_BTC: Tensor, past_BWC: Tensor, weight_CW: Tensor) -> Tensor:
    return x_BTC.new_empty(x_BTC.shape)


@_operator("day0_accel::scan_chunks", mutates_args=("memory_ZHKV",))
def scan_chunks(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, decay_BTHK: Tensor, beta_BTH: Tensor, memory_ZHKV: Tensor,
    index_B: Tensor,
) -> Tensor:  # fmt: skip
    """Take chunks of tokens at once."""
    s_BHKV = memory_ZHKV[index_B]
    core = scan.chunked(q_BTHK, k_BTHK, v_BTHV, decay_BTHK, beta_BTH, s_BHKV)
    memory_ZHKV[index_B] = s_BHKV
    return core.contiguous()


@_operator("day0_accel::scan_step", mutates_args=("memory_ZHKV",))
def scan_step(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, decay_BTHK: Tensor, beta_BTH: Tensor, memory_ZHKV: Tensor,
    index_B: Tensor,
) -> Tensor:  # fmt: skip
    """Take one token of each slot."""
    parts = (x[:, 0].to(FLOAT) for x in (q_BTHK, k_BTHK, v_BTHV, decay_BTHK, beta_BTH))
    s_BHKV = memory_ZHKV[index_B]
    core = scan.step(*parts, s_BHKV)
    memory_ZHKV[index_B] = s_BHKV
    return core[:, None]


def _scanned(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, decay_BTHK: Tensor, beta_BTH: Tensor, memory_ZHKV: Tensor,
    index_B: Tensor,
) -> Tensor:  # fmt: skip
    return v_BTHV.new_empty(v_BTHV.shape, dtype=FLOAT)


scan_chunks.register_fake(_scanned)
scan_step.register_fake(_scanned)


@_operator("day0_accel::attend_prefill", mutates_args=())
def attend_prefill(
    q_BTHD: Tensor, latent_NL: Tensor, rope_NR: Tensor, rows_BTK: Tensor, kv_b: Tensor, sinks_H: Tensor, scale: float
) -> Tensor:
    """Gather block by block of queries: what any of them has chosen is read and expanded once."""
    found = []
    for q_THD, rows_TK in zip(q_BTHD, rows_BTK, strict=True):
        for at in range(0, len(q_THD), QUERY_BLOCK):
            block = slice(at, at + QUERY_BLOCK)
            found.append(_attend_block(q_THD[block], latent_NL, rope_NR, rows_TK[block], kv_b, sinks_H, scale))
    return torch.cat(found).unflatten(0, q_BTHD.shape[:2]).to(q_BTHD.dtype)


def _attend_block(
    q_THD: Tensor, latent_NL: Tensor, rope_NR: Tensor, rows_TK: Tensor, kv_b: Tensor, sinks_H: Tensor, scale: float
) -> Tensor:
    heads, nope = q_THD.shape[1], q_THD.shape[-1] - rope_NR.shape[-1]
    union_U, at_TK = _as_met(rows_TK)
    picked = union_U.clamp(min=0)
    kv_UHD = F.linear(latent_NL[picked].to(FLOAT), kv_b).unflatten(-1, (heads, -1))
    seen_TU = torch.zeros(len(q_THD), len(union_U), dtype=torch.bool, device=q_THD.device).scatter_(1, at_TK, True)
    q = q_THD.to(FLOAT)
    scores_THU = torch.einsum("thd,uhd->thu", q[..., :nope], kv_UHD[..., :nope])
    scores_THU = (scores_THU + q[..., nope:] @ rope_NR[picked].to(FLOAT).T) * scale
    scores_THU = scores_THU.masked_fill(~(seen_TU & (union_U >= 0))[:, None], float("-inf"))
    p_THU = _with_sink(scores_THU, sinks_H.to(FLOAT)[None, :, None])
    return torch.einsum("thu,uhv->thv", p_THU, kv_UHD[..., nope:])


def _as_met(rows_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row once, in the order in which they are met, and where each one is in it [T, K].

    Not in the order of pages: sums must not depend on which pages a request was given.
    """
    union_U, at_TK = torch.unique(rows_TK, return_inverse=True)
    count = rows_TK.numel()
    first_U = torch.full_like(union_U, count)
    first_U.scatter_reduce_(0, at_TK.flatten(), torch.arange(count, device=rows_TK.device), "amin")
    order_U = first_U.argsort()
    return union_U[order_U], order_U.argsort()[at_TK]


def _with_sink(scores: Tensor, sink: Tensor) -> Tensor:
    """Return the softmax over the last axis whose denominator also counts exp(sink)."""
    top = torch.maximum(scores.amax(-1, keepdim=True), sink)
    top = torch.where(torch.isinf(top), torch.zeros_like(top), top)
    weight = (scores - top).exp()
    return weight / (weight.sum(-1, keepdim=True) + (sink - top).exp()).clamp(min=TINY)


@_operator("day0_accel::attend_decode", mutates_args=())
def attend_decode(
    q_BTHD: Tensor, latent_NL: Tensor, rope_NR: Tensor, rows_BTK: Tensor, kv_b: Tensor, sinks_H: Tensor, scale: float
) -> Tensor:
    """Gather each query's own rows out of the pages and attend in latent space."""
    heads, nope = q_BTHD.shape[2], q_BTHD.shape[-1] - rope_NR.shape[-1]
    weight_HDL = kv_b.unflatten(0, (heads, -1))
    picked = rows_BTK.clamp(min=0)
    q, latent_BTKL = q_BTHD.to(FLOAT), latent_NL[picked].to(FLOAT)
    absorbed = torch.einsum("bthn,hnl->bthl", q[..., :nope], weight_HDL[:, :nope])
    scores = absorbed @ latent_BTKL.mT + q[..., nope:] @ rope_NR[picked].to(FLOAT).mT
    scores = (scores * scale).masked_fill((rows_BTK < 0)[:, :, None], float("-inf"))
    p = _with_sink(scores, sinks_H.to(FLOAT)[None, None, :, None])
    return torch.einsum("bthl,hvl->bthv", p @ latent_BTKL, weight_HDL[:, nope:]).to(q_BTHD.dtype).contiguous()


def _attended(
    q_BTHD: Tensor, latent_NL: Tensor, rope_NR: Tensor, rows_BTK: Tensor, kv_b: Tensor, sinks_H: Tensor, scale: float
) -> Tensor:
    values = kv_b.shape[0] // q_BTHD.shape[2] - (q_BTHD.shape[-1] - rope_NR.shape[-1])
    return q_BTHD.new_empty(*q_BTHD.shape[:-1], values)


attend_prefill.register_fake(_attended)
attend_decode.register_fake(_attended)
