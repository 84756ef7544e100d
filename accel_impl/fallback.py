"""Plain torch implementations of every operator, rounding where a library call by call would. Knows ops' contract only.

Shapes: as in `accel_impl.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_impl.formats import Resident

FLOAT = torch.float32
ALPHA, LIMIT = 1.702, 7.0


def rms_norm(x_F: Tensor, weight_F: Tensor, eps: float) -> Tensor:
    """Normalise in float32 and round once."""
    x = x_F.to(FLOAT)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * weight_F.to(FLOAT)).to(x_F.dtype)


def layer_norm(x_F: Tensor, weight_F: Tensor, bias_F: Tensor, eps: float) -> Tensor:
    """Normalise in float32 and round once."""
    x = F.layer_norm(x_F.to(FLOAT), x_F.shape[-1:], weight_F.to(FLOAT), bias_F.to(FLOAT), eps)
    return x.to(x_F.dtype)


def rope(x_BTHR: Tensor, positions_BT: Tensor, *, theta: float, interleaved: bool) -> Tensor:
    """Rotate with a float32 table."""
    width = x_BTHR.shape[-1]
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = (positions_BT[..., None].double() * frequency)[:, :, None, :]
    cos, sin = angle.cos().to(FLOAT), angle.sin().to(FLOAT)
    x = x_BTHR.to(FLOAT)
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:
        a, b = x[..., : width // 2], x[..., width // 2 :]
        rotated = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return rotated.to(x_BTHR.dtype)


def linear(x_F: Tensor, weight: Resident, bias: Tensor | None = None, *, out: torch.dtype | None = None) -> Tensor:
    """Multiply in the dtype of x; a partial sum is left in float32."""
    if out is not None and out != x_F.dtype:
        y = F.linear(x_F.to(out), weight.decode(x_F.dtype).to(out))
        return y if bias is None else y + bias.to(out)
    return F.linear(x_F, weight.decode(x_F.dtype), None if bias is None else bias.to(x_F.dtype))


def swiglu(gate_F: Tensor, up_F: Tensor) -> Tensor:
    """Round after each product."""
    return F.silu(gate_F) * up_F


def swiglu_clamped(gate_F: Tensor, up_F: Tensor) -> Tensor:
    """Round after each product."""
    gate = gate_F.clamp(max=LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up_F.clamp(-LIMIT, LIMIT) + 1)


def gelu(x_F: Tensor, *, tanh: bool) -> Tensor:
    """Call torch's."""
    return F.gelu(x_F, approximate="tanh" if tanh else "none")


def indexer_scores(q_BTHD: Tensor, k_BSD: Tensor, weights_BTH: Tensor, positions_BT: Tensor) -> Tensor:
    """Score every pair at once in float32."""
    heads, width = q_BTHD.shape[-2:]
    products = torch.einsum("bthd,bsd->bths", q_BTHD.to(FLOAT), k_BSD.to(FLOAT)).relu()
    scores = torch.einsum("bths,bth->bts", products, weights_BTH.to(FLOAT)) * (heads**-0.5 * width**-0.5)
    return scores.masked_fill(_future(positions_BT, k_BSD.shape[1]), float("-inf"))


def _future(positions_BT: Tensor, keys: int) -> Tensor:
    return torch.arange(keys, device=positions_BT.device) > positions_BT[..., None]


def choose_keys(scores_BTS: Tensor, count: int) -> Tensor:
    """Sort stably, so that ties go to the lower id."""
    keys = scores_BTS.shape[-1]
    if keys < count:
        scores_BTS = F.pad(scores_BTS, (0, count - keys), value=float("-inf"))
    values, ids = torch.sort(scores_BTS, dim=-1, descending=True, stable=True)
    values, ids = values[..., :count], ids[..., :count]
    beyond = torch.iinfo(torch.int64).max
    ids = ids.masked_fill(values == float("-inf"), beyond).sort(-1).values
    return ids.masked_fill(ids == beyond, -1)


def attend_dense(
    q_BTHD: Tensor,
    latent_BSL: Tensor,
    rope_BSR: Tensor,
    kv_b: Resident,
    sinks_H: Tensor,
    chosen_BTK: Tensor,
    scale: float,
) -> Tensor:
    """Expand keys and values of every latent, mask what was not chosen."""
    heads, keys = q_BTHD.shape[2], latent_BSL.shape[1]
    nope = q_BTHD.shape[-1] - rope_BSR.shape[-1]
    kv = F.linear(latent_BSL, kv_b.decode(latent_BSL.dtype)).unflatten(-1, (heads, -1))
    key = torch.cat((kv[..., :nope], rope_BSR[:, :, None].expand(-1, -1, heads, -1)), dim=-1)
    scores = torch.einsum("bthd,bshd->bhts", q_BTHD.to(FLOAT), key.to(FLOAT)) * scale
    chosen = torch.zeros(*chosen_BTK.shape[:2], keys + 1, dtype=torch.bool)
    chosen.scatter_(-1, chosen_BTK.masked_fill(chosen_BTK < 0, keys), True)
    scores = scores.masked_fill(~chosen[:, None, :, :keys], float("-inf"))
    sink = sinks_H.to(FLOAT)[None, :, None, None].expand(*scores.shape[:3], 1)
    p = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :keys].to(q_BTHD.dtype)
    return torch.einsum("bhts,bshv->bthv", p, kv[..., nope:])


def attend_sparse(
    q_BTHD: Tensor,
    latent_BTKL: Tensor,
    rope_BTKR: Tensor,
    kv_b: Resident,
    sinks_H: Tensor,
    valid_BTK: Tensor,
    scale: float,
) -> Tensor:
    """Expand keys and values of the gathered latents."""
    heads = q_BTHD.shape[2]
    nope = q_BTHD.shape[-1] - rope_BTKR.shape[-1]
    kv = F.linear(latent_BTKL, kv_b.decode(latent_BTKL.dtype)).unflatten(-1, (heads, -1))
    key = torch.cat((kv[..., :nope], rope_BTKR[..., None, :].expand(-1, -1, -1, heads, -1)), dim=-1)
    scores = torch.einsum("bthd,btkhd->bthk", q_BTHD.to(FLOAT), key.to(FLOAT)) * scale
    scores = scores.masked_fill(~valid_BTK[:, :, None], float("-inf"))
    sink = sinks_H.to(FLOAT)[None, None, :, None].expand(*scores.shape[:3], 1)
    p = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1].to(q_BTHD.dtype)
    return torch.einsum("bthk,btkhv->bthv", p, kv[..., nope:])


def choose_experts(scores_BTE: Tensor, count: int) -> Tensor:
    """Sort stably, so that ties go to the lower id."""
    ids = torch.sort(scores_BTE, dim=-1, descending=True, stable=True).indices
    return ids[..., :count].sort(-1).values


def grouped_experts(
    x_BTF: Tensor,
    ids_BTK: Tensor,
    weights_BTK: Tensor,
    experts: Mapping[int, Sequence[Resident]],
    act: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Visit the experts one by one; sum in float32."""
    x = x_BTF.flatten(0, 1)
    ids, weights = ids_BTK.flatten(0, 1), weights_BTK.flatten(0, 1).to(FLOAT)
    total = torch.zeros(x.shape, dtype=FLOAT)
    for expert, (gate, up, down) in experts.items():
        token, slot = torch.where(ids == expert)
        if len(token):
            inner = act(linear(x[token], gate), linear(x[token], up))
            total.index_add_(0, token, linear(inner, down).to(FLOAT) * weights[token, slot, None])
    return total.view(x_BTF.shape)


def attend_patches(q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor, lengths: Sequence[int]) -> Tensor:
    """Attend picture by picture, softmax in float32."""
    scale = q_PHD.shape[-1] ** -0.5
    outputs = []
    for q, k, v in zip(*(t.split(list(lengths)) for t in (q_PHD, k_PHD, v_PHD)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q.to(FLOAT), k.to(FLOAT)) * scale
        p = torch.softmax(scores, dim=-1).to(q.dtype)
        outputs.append(torch.einsum("hqk,khd->qhd", p, v))
    return torch.cat(outputs)
