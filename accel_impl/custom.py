"""Fused implementations, as a vendor's kernels would be: fewer rounding points, another order. Knows the contract only.

Everything between an operator's inputs and its output stays in float32 and is rounded once. Those with shapes of their
own are operators of torch, too (`accel_impl.kernels`). Shapes: as in `accel_impl.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_impl import kernels
from accel_impl.formats import Resident

FLOAT = torch.float32
ALPHA, LIMIT = 1.702, 7.0

indexer_scores = kernels.indexer_scores
choose_keys = kernels.choose_keys
mix_streams = kernels.mix_streams
causal_conv = kernels.causal_conv
scan_chunks = kernels.scan_chunks
scan_step = kernels.scan_step


def rms_norm(x_F: Tensor, weight_F: Tensor, eps: float) -> Tensor:
    """Scale by the weight first, by the norm last."""
    x = x_F.to(FLOAT)
    norm = (torch.linalg.vecdot(x, x) / x.shape[-1] + eps).sqrt()
    return (x * weight_F.to(FLOAT) / norm[..., None]).to(x_F.dtype)


def gated_norm(x_F: Tensor, weight_F: Tensor, gate_F: Tensor, eps: float) -> Tensor:
    """Gate first, normalise last."""
    x = x_F.to(FLOAT)
    norm = (torch.linalg.vecdot(x, x) / x.shape[-1] + eps).sqrt()
    return (torch.sigmoid(gate_F.to(FLOAT)) * weight_F.to(FLOAT) * x / norm[..., None]).to(gate_F.dtype)


def unit_norm(x_F: Tensor, eps: float, scale: float) -> Tensor:
    """Divide by the length."""
    x = x_F.to(FLOAT)
    return (x * scale / (torch.linalg.vecdot(x, x) + eps).sqrt()[..., None]).to(x_F.dtype)


def rope(x_BTHR: Tensor, cos_BTR: Tensor, sin_BTR: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate pairs as one product by a matrix of two rows, whatever their order."""
    x = x_BTHR.to(FLOAT)
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).mT
    turn = torch.stack((cos_BTR, -sin_BTR, sin_BTR, cos_BTR), dim=-1).unflatten(-1, (2, 2))[:, :, None]
    turned = (turn * pairs[..., None, :]).sum(-1)
    return (turned if interleaved else turned.mT).flatten(-2).to(x_BTHR.dtype)


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


def decay_rate(x_BTHK: Tensor, a_log_H: Tensor, bias_HK: Tensor) -> Tensor:
    """Write softplus so that neither side overflows."""
    x = x_BTHK.to(FLOAT) + bias_HK.to(FLOAT)
    return -(x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))) * a_log_H.to(FLOAT).exp()[:, None]


def attend_prefill(
    q_BTHD: Tensor, latent_NL: Tensor, rope_NR: Tensor, rows_BTK: Tensor, kv_b: Resident, sinks_H: Tensor, scale: float
) -> Tensor:
    """Gather, for a block of queries, the rows that any of them has chosen, and expand each of those once."""
    return kernels.attend_prefill(q_BTHD, latent_NL, rope_NR, rows_BTK, kv_b.decode(FLOAT), sinks_H, scale)


def attend_decode(
    q_BTHD: Tensor, latent_NL: Tensor, rope_NR: Tensor, rows_BTK: Tensor, kv_b: Resident, sinks_H: Tensor, scale: float
) -> Tensor:
    """Attend in latent space: kv_b is absorbed into the query and into the output."""
    return kernels.attend_decode(q_BTHD, latent_NL, rope_NR, rows_BTK, kv_b.decode(FLOAT), sinks_H, scale)


def group_worth(scores_BTE: Tensor, groups: int) -> Tensor:
    """Take the best, then the best of the rest."""
    by_group = scores_BTE.unflatten(-1, (groups, -1))
    best, at = by_group.max(-1, keepdim=True)
    return (best + by_group.scatter(-1, at, float("-inf")).amax(-1, keepdim=True))[..., 0]


def choose_experts(scores_BTE: Tensor, count: int) -> Tensor:
    """Count for each candidate those before it, instead of sorting: there are few."""
    place = torch.arange(scores_BTE.shape[-1], device=scores_BTE.device)
    one, other = scores_BTE[..., :, None], scores_BTE[..., None, :]
    before = ((other > one) | ((other == one) & (place < place[:, None]))).sum(-1)
    return torch.where(before < count, place, len(place)).sort(-1).values[..., :count]


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
    counts = torch.tensor(lengths, device=q_PHD.device)
    picture = torch.repeat_interleave(torch.arange(len(lengths), device=q_PHD.device), counts)
    q, k, v = (t.to(FLOAT).transpose(0, 1)[None] for t in (q_PHD, k_PHD, v_PHD))
    mask = picture[:, None] == picture[None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1).to(q_PHD.dtype)
