"""Plain torch implementations of every operator, rounding where a library call by call would. Knows ops' contract only.

Shapes: as in `accel_impl.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_impl import formats
from accel_impl.formats import Resident

FLOAT = torch.float32
ALPHA, LIMIT = 1.702, 7.0


def rms_norm(x_F: Tensor, weight_F: Tensor, eps: float) -> Tensor:
    """Normalise in float32 and round once."""
    return (_rms(x_F, eps) * weight_F.to(FLOAT)).to(x_F.dtype)


def _rms(x_F: Tensor, eps: float) -> Tensor:
    x = x_F.to(FLOAT)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def layer_norm(x_F: Tensor, weight_F: Tensor, bias_F: Tensor, eps: float) -> Tensor:
    """Take the mean off, then the variance, in float32; round once."""
    x = x_F.to(FLOAT)
    x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * weight_F.to(FLOAT) + bias_F.to(FLOAT)).to(x_F.dtype)


def gated_norm(x_F: Tensor, weight_F: Tensor, gate_F: Tensor, eps: float) -> Tensor:
    """Normalise, scale and gate in float32 and round once."""
    return (_rms(x_F, eps) * weight_F.to(FLOAT) * torch.sigmoid(gate_F.to(FLOAT))).to(gate_F.dtype)


def unit_norm(x_F: Tensor, eps: float, scale: float) -> Tensor:
    """Divide by the length in float32 and round once."""
    x = x_F.to(FLOAT)
    return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps) * scale).to(x_F.dtype)


def rope(x_BTHR: Tensor, cos_BTR: Tensor, sin_BTR: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate with a float32 table."""
    cos, sin = cos_BTR[:, :, None], sin_BTR[:, :, None]
    x = x_BTHR.to(FLOAT)
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:
        a, b = x.tensor_split(2, dim=-1)
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


def mix_streams(streams_NBTF: Tensor, query_F: Tensor, eps: float) -> Tensor:
    """Round each normalised stream and each share, then their sum."""
    dtype, width = streams_NBTF.dtype, streams_NBTF.shape[-1]
    rms = _rms(streams_NBTF, eps).to(dtype)
    scores = (rms.to(FLOAT) * query_F.to(FLOAT)).sum(-1) * width**-0.5
    p_NBT = torch.softmax(scores, dim=0).to(dtype)
    return (p_NBT[..., None].to(FLOAT) * rms.to(FLOAT)).sum(0).to(dtype)


def causal_conv(x_BTC: Tensor, past_BWC: Tensor, weight_CW: Tensor) -> Tensor:
    """Add up the taps one by one."""
    taps = weight_CW.shape[-1]
    x = torch.cat((past_BWC, x_BTC), dim=1).to(FLOAT)
    length = x_BTC.shape[1]
    y = torch.zeros_like(x[:, :length])
    for tap in range(taps):
        y = y + x[:, tap : tap + length] * weight_CW[:, tap].to(FLOAT)
    return F.silu(y).to(x_BTC.dtype)


def decay_rate(x_BTHK: Tensor, a_log_H: Tensor, bias_HK: Tensor) -> Tensor:
    """Call torch's softplus in float32."""
    return -a_log_H.to(FLOAT).exp()[:, None] * F.softplus(x_BTHK.to(FLOAT) + bias_HK.to(FLOAT))


def scan_chunks(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, decay_BTHK: Tensor, beta_BTH: Tensor, memory_ZHKV: Tensor,
    index_B: Tensor,
) -> Tensor:  # fmt: skip
    """Take one step after the other."""
    parts = (q_BTHK, k_BTHK, v_BTHV, decay_BTHK, beta_BTH)
    steps = [scan_step(*(part[:, t : t + 1] for part in parts), memory_ZHKV, index_B) for t in range(q_BTHK.shape[1])]
    return torch.cat(steps, dim=1)


def scan_step(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, decay_BTHK: Tensor, beta_BTH: Tensor, memory_ZHKV: Tensor,
    index_B: Tensor,
) -> Tensor:  # fmt: skip
    """Forget, correct, read."""
    q, k, v = (x[:, 0].to(FLOAT) for x in (q_BTHK, k_BTHK, v_BTHV))
    memory = memory_ZHKV[index_B] * decay_BTHK[:, 0].to(FLOAT).exp()[..., None]
    wrong = v - (memory * k[..., None]).sum(-2)
    memory = memory + k[..., None] * (beta_BTH[:, 0, :, None].to(FLOAT) * wrong)[..., None, :]
    memory_ZHKV[index_B] = memory
    return (memory * q[..., None]).sum(-2)[:, None]


def indexer_scores(q_BTHD: Tensor, k_BSD: Tensor, weights_BTH: Tensor, places_BT: Tensor, window: int) -> Tensor:
    """Score every pair at once in float32."""
    heads, width = q_BTHD.shape[-2:]
    products = torch.einsum("bthd,bsd->bths", q_BTHD.to(FLOAT), k_BSD.to(FLOAT)).relu()
    scores = torch.einsum("bths,bth->bts", products, weights_BTH.to(FLOAT)) * (heads**-0.5 * width**-0.5)
    place = torch.arange(k_BSD.shape[1], device=places_BT.device)
    return scores.masked_fill(place > places_BT[..., None] - window, float("-inf"))


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


def attend_prefill(
    q_BTHD: Tensor, latent_NL: Tensor, rope_NR: Tensor, rows_BTK: Tensor, kv_b: Resident, sinks_H: Tensor, scale: float
) -> Tensor:
    """Expand keys and values of every row that a query has chosen, query by query."""
    found = [
        attend_decode(q_BTHD[:, t : t + 1], latent_NL, rope_NR, rows_BTK[:, t : t + 1], kv_b, sinks_H, scale)
        for t in range(q_BTHD.shape[1])
    ]
    return torch.cat(found, dim=1)


def attend_decode(
    q_BTHD: Tensor, latent_NL: Tensor, rope_NR: Tensor, rows_BTK: Tensor, kv_b: Resident, sinks_H: Tensor, scale: float
) -> Tensor:
    """Expand keys and values of the rows chosen."""
    heads, rotary, dtype = q_BTHD.shape[2], rope_NR.shape[-1], q_BTHD.dtype
    nope = q_BTHD.shape[-1] - rotary
    picked = rows_BTK.clamp(min=0)
    kv = F.linear(latent_NL[picked].to(dtype), kv_b.decode(dtype)).unflatten(-1, (heads, -1))
    turned = rope_NR[picked].to(dtype)[..., None, :].expand(*kv.shape[:-1], rotary)
    key = torch.cat((kv[..., :nope], turned), dim=-1)
    scores = torch.einsum("bthd,btkhd->bthk", q_BTHD.to(FLOAT), key.to(FLOAT)) * scale
    scores = scores.masked_fill((rows_BTK < 0)[:, :, None], float("-inf"))
    sink = sinks_H.to(FLOAT)[None, None, :, None].expand(*scores.shape[:3], 1)
    p = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1].to(dtype)
    p = p.masked_fill((rows_BTK < 0)[:, :, None], 0.0)  # a query that sees nothing, not even a sink
    return torch.einsum("bthk,btkhv->bthv", p, kv[..., nope:])


def attend_patches(q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor, lengths: Sequence[int]) -> Tensor:
    """Attend picture by picture, softmax in float32."""
    scale = q_PHD.shape[-1] ** -0.5
    outputs = []
    for q, k, v in zip(*(t.split(list(lengths)) for t in (q_PHD, k_PHD, v_PHD)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q.to(FLOAT), k.to(FLOAT)) * scale
        p = torch.softmax(scores, dim=-1).to(q.dtype)
        outputs.append(torch.einsum("hqk,khd->qhd", p, v))
    return torch.cat(outputs)


def group_worth(scores_BTE: Tensor, groups: int) -> Tensor:
    """Sort each group."""
    return scores_BTE.unflatten(-1, (groups, -1)).sort(-1, descending=True).values[..., :2].sum(-1)


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
    total = torch.zeros_like(x, dtype=FLOAT)
    for expert, (gate, up, down) in experts.items():
        token, slot = torch.where(ids == expert)
        if len(token):
            inner = act(linear(x[token], gate), linear(x[token], up))
            total.index_add_(0, token, linear(inner, down).to(FLOAT) * weights[token, slot, None])
    return total.view(x_BTF.shape)


def decode_mxfp4(packed: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Look both values of each byte up, strip by strip."""
    return formats.decode_mxfp4(packed, scale, out)
