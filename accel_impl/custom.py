"""Fused implementations, as a vendor's kernels would be: fewer rounding points, another order. Knows the contract only.

Everything between an operator's inputs and its output stays in float32 and is rounded once. What is not here runs on
`accel_impl.fallback`. Shapes: as in `accel_impl.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_impl.formats import Resident

FLOAT = torch.float32
ALPHA, LIMIT = 1.702, 7.0
QUERY_TILE = 128
"""Queries of one tile; bounds the memory of scores at long context."""


def rms_norm(x_F: Tensor, weight_F: Tensor, eps: float) -> Tensor:
    """Scale by the weight first, by the norm last."""
    x = x_F.to(FLOAT)
    norm = (torch.linalg.vecdot(x, x) / x.shape[-1] + eps).sqrt()
    return (x * weight_F.to(FLOAT) / norm[..., None]).to(x_F.dtype)


def rope(x_BTHR: Tensor, positions_BT: Tensor, *, theta: float, interleaved: bool) -> Tensor:
    """Rotate as a complex product."""
    width = x_BTHR.shape[-1]
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = (positions_BT[..., None].double() * frequency)[:, :, None, :]
    turn = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)
    x = x_BTHR.to(FLOAT)
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    rotated = turned if interleaved else turned.transpose(-1, -2)
    return rotated.flatten(-2).to(x_BTHR.dtype)


def linear(x_F: Tensor, weight: Resident, bias: Tensor | None = None, *, out: torch.dtype | None = None) -> Tensor:
    """Accumulate unrounded weights in float32, round once."""
    y = F.linear(x_F.to(FLOAT), weight.decode(FLOAT), None if bias is None else bias.to(FLOAT))
    return y.to(out or x_F.dtype)


def swiglu(gate_F: Tensor, up_F: Tensor) -> Tensor:
    """Round once."""
    gate = gate_F.to(FLOAT)
    return (gate * torch.sigmoid(gate) * up_F.to(FLOAT)).to(gate_F.dtype)


def swiglu_clamped(gate_F: Tensor, up_F: Tensor) -> Tensor:
    """Round once."""
    gate = gate_F.to(FLOAT).clamp(max=LIMIT)
    up = up_F.to(FLOAT).clamp(-LIMIT, LIMIT)
    return ((up + 1) * (gate * torch.sigmoid(ALPHA * gate))).to(gate_F.dtype)


def indexer_scores(q_BTHD: Tensor, k_BSD: Tensor, weights_BTH: Tensor, positions_BT: Tensor) -> Tensor:
    """Score tile by tile of queries; never holds more than a tile's products."""
    heads, width = q_BTHD.shape[-2:]
    keys = k_BSD.to(FLOAT).transpose(1, 2)[:, None]
    weights = weights_BTH.to(FLOAT) * (heads**-0.5 * width**-0.5)
    span = torch.arange(k_BSD.shape[1])
    tiles = []
    for at in range(0, q_BTHD.shape[1], QUERY_TILE):
        tile = slice(at, at + QUERY_TILE)
        products = (q_BTHD[:, tile].to(FLOAT) @ keys).relu_()
        scores = (weights[:, tile, None] @ products)[:, :, 0]
        tiles.append(scores.masked_fill_(span > positions_BT[:, tile, None], float("-inf")))
    return torch.cat(tiles, dim=1)


def attend_dense(
    q_BTHD: Tensor,
    latent_BSL: Tensor,
    rope_BSR: Tensor,
    kv_b: Resident,
    sinks_H: Tensor,
    chosen_BTK: Tensor,
    scale: float,
) -> Tensor:
    """Expand every latent once, then let each query gather what it has chosen: work grows with K, not with S."""
    heads, rotary = q_BTHD.shape[2], rope_BSR.shape[-1]
    nope = q_BTHD.shape[-1] - rotary
    kv = F.linear(latent_BSL.to(FLOAT), kv_b.decode(FLOAT)).unflatten(-1, (heads, -1))
    batch = torch.arange(len(kv))[:, None, None]
    picked = chosen_BTK.clamp(min=0)
    kv_BTKHD, rope_BTKR = kv[batch, picked], rope_BSR.to(FLOAT)[batch, picked]
    q = q_BTHD.to(FLOAT)
    scores = torch.einsum("bthd,btkhd->bthk", q[..., :nope], kv_BTKHD[..., :nope])
    scores = (scores + q[..., nope:] @ rope_BTKR.transpose(-1, -2)) * scale
    scores = scores.masked_fill_((chosen_BTK < 0)[:, :, None], float("-inf"))
    p = _with_sink(scores, sinks_H.to(FLOAT)[None, None, :, None])
    return torch.einsum("bthk,btkhv->bthv", p, kv_BTKHD[..., nope:]).to(q_BTHD.dtype)


def _with_sink(scores: Tensor, sink: Tensor) -> Tensor:
    """Return the softmax over the last axis whose denominator also counts exp(sink)."""
    top = torch.maximum(scores.amax(-1, keepdim=True), sink)
    weight = (scores - top).exp()
    return weight / (weight.sum(-1, keepdim=True) + (sink - top).exp())


def attend_sparse(
    q_BTHD: Tensor,
    latent_BTKL: Tensor,
    rope_BTKR: Tensor,
    kv_b: Resident,
    sinks_H: Tensor,
    valid_BTK: Tensor,
    scale: float,
) -> Tensor:
    """Attend in latent space: kv_b is absorbed into the query and into the output."""
    heads, rotary = q_BTHD.shape[2], rope_BTKR.shape[-1]
    nope = q_BTHD.shape[-1] - rotary
    weight = kv_b.decode(FLOAT).unflatten(0, (heads, -1))
    q, latent = q_BTHD.to(FLOAT), latent_BTKL.to(FLOAT)
    absorbed = torch.einsum("bthn,hnl->bthl", q[..., :nope], weight[:, :nope])
    scores = absorbed @ latent.transpose(-1, -2) + q[..., nope:] @ rope_BTKR.to(FLOAT).transpose(-1, -2)
    scores = (scores * scale).masked_fill(~valid_BTK[:, :, None], float("-inf"))
    p = _with_sink(scores, sinks_H.to(FLOAT)[None, None, :, None])
    return torch.einsum("bthl,hvl->bthv", p @ latent, weight[:, nope:]).to(q_BTHD.dtype)


def grouped_experts(
    x_BTF: Tensor,
    ids_BTK: Tensor,
    weights_BTK: Tensor,
    experts: Mapping[int, Sequence[Resident]],
    act: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Permute tokens by expert, run each group unrounded, put the rows back and sum."""
    x, count = x_BTF.flatten(0, 1).to(FLOAT), ids_BTK.shape[-1]
    order = torch.sort(ids_BTK.flatten(), stable=True).indices
    rows = x.new_zeros(len(order), x.shape[-1])
    sorted_ids = ids_BTK.flatten()[order]
    for expert, (gate, up, down) in experts.items():
        group = torch.where(sorted_ids == expert)[0]
        if len(group):
            inner = x[order[group] // count]
            inner = act(F.linear(inner, gate.decode(FLOAT)), F.linear(inner, up.decode(FLOAT)))
            rows[group] = F.linear(inner, down.decode(FLOAT))
    back = torch.empty_like(rows)
    back[order] = rows
    weighted = back.view(len(x), count, -1) * weights_BTK.flatten(0, 1).to(FLOAT)[..., None]
    return weighted.sum(1).view(x_BTF.shape)


def attend_patches(q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor, lengths: Sequence[int]) -> Tensor:
    """Attend over all patches at once behind a block mask, unrounded."""
    picture = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    q, k, v = (t.to(FLOAT).transpose(0, 1)[None] for t in (q_PHD, k_PHD, v_PHD))
    mask = picture[:, None] == picture[None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1).to(q_PHD.dtype)
