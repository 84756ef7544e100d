"""Recurrent attention: a gated delta rule that forgets by channel. Knows one layer's weights; not the decoder.

B batch  T tokens of this call  D features  C channels of the convolution  H heads  K width of a key  V of a value
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from reference_impl.config import Config
from reference_impl.layers import linear, rms_norm, wide
from reference_impl.request import Call

LENGTH_EPS = 1e-6
HIDDEN, HEADS = "batch token feature", "batch token head feature"


def recurrent_attention(c: Config, w: Mapping[str, Tensor], at: str, x_BTD: Tensor, call: Call) -> Tensor:
    """Apply one recurrent layer to normed tokens; `at` names its taps and what it keeps."""
    record, cache, heads = call.record, call.cache, (c.linear_num_heads, c.linear_head_dim)
    qkv_BTC = torch.cat([linear(x_BTD, w[f"{name}_proj.weight"]) for name in "qkv"], dim=-1)
    before_BTC = cache.after_last(f"{at}.conv", qkv_BTC, c.linear_conv_kernel_dim - 1)
    q_BTHK, k_BTHK, v_BTHV = (
        part.unflatten(-1, heads) for part in short_convolution(before_BTC, w["conv1d.weight"]).chunk(3, dim=-1)
    )
    q_BTHK = record(f"{at}.q", unit_length(q_BTHK, c.linear_head_dim**-0.5), dims=HEADS)
    k_BTHK = record(f"{at}.k", unit_length(k_BTHK), dims=HEADS)
    v_BTHV = record(f"{at}.v", v_BTHV, dims=HEADS)

    step_BTHK = F.softplus(wide(_low_rank(w, "f", x_BTD)) + w["dt_bias"]).unflatten(-1, heads)
    decay_BTHK = record(f"{at}.decay", -w["A_log"].exp()[:, None] * step_BTHK, dims=HEADS)
    beta_BTH = record(f"{at}.beta", wide(linear(x_BTD, w["b_proj.weight"])).sigmoid(), dims="batch token head")

    core_BTHV, state_BHKV = delta_rule(q_BTHK, k_BTHK, v_BTHV, decay_BTHK, beta_BTH, cache.kept.get(f"{at}.state"))
    cache.keep_state(f"{at}.state", state_BHKV)
    core_BTHV = record(f"{at}.core", core_BTHV, dims=HEADS)

    gate_BTHV = wide(_low_rank(w, "g", x_BTD)).sigmoid().unflatten(-1, heads)
    normed_BTHV = (rms_norm(core_BTHV, w["o_norm.weight"], c.rms_norm_eps) * gate_BTHV).to(x_BTD.dtype)
    normed_BTHV = record(f"{at}.norm", normed_BTHV, dims=HEADS)
    return record(at, linear(normed_BTHV.flatten(2), w["o_proj.weight"]), dims=HIDDEN)


def short_convolution(before_BTC: Tensor, weight_C1K: Tensor) -> Tensor:
    """Convolve each channel with its own taps and apply silu, in one step: computed wide, rounded once.

    The last tap meets the token itself. Shapes: [B, K - 1 + T, C] -> [B, T, C].
    """
    mixed_BCT = F.conv1d(wide(before_BTC).transpose(1, 2), wide(weight_C1K), groups=before_BTC.shape[-1])
    return F.silu(mixed_BCT).transpose(1, 2).to(before_BTC.dtype)


def unit_length(x_BTHK: Tensor, factor: float = 1.0) -> Tensor:
    """Return vectors of length 1, times a factor; computed wide, rounded once."""
    x = wide(x_BTHK)
    return (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + LENGTH_EPS) * factor).to(x_BTHK.dtype)


def delta_rule(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, decay_BTHK: Tensor, beta_BTH: Tensor, state_BHKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Walk over the tokens: forget, correct what the key recalls towards the value, read with the query.

    Everything in float32 (float64 in a float64 model); `state` None is zeros.
    Returns what was read [B, T, H, V] and the state after the last token.
    Source: arXiv 2510.26692, section 3, equation 1 (Kimi Delta Attention); arXiv 2412.06464.
    """
    q, k, v = wide(q_BTHK), wide(k_BTHK), wide(v_BTHV)
    state = state_BHKV if state_BHKV is not None else q.new_zeros(q.shape[0], *q.shape[2:], v.shape[-1])
    kept = decay_BTHK.exp()
    read = []
    for t in range(q.shape[1]):
        state = state * kept[:, t, :, :, None]
        recalled_BHV = (state * k[:, t, :, :, None]).sum(-2)
        correction_BHV = beta_BTH[:, t, :, None] * (v[:, t] - recalled_BHV)
        state = state + k[:, t, :, :, None] * correction_BHV[:, :, None, :]
        read.append((state * q[:, t, :, :, None]).sum(-2))
    return torch.stack(read, dim=1), state


def _low_rank(w: Mapping[str, Tensor], name: str, x_BTD: Tensor) -> Tensor:
    """Apply two linears with a narrow place between them; each result in the model's precision."""
    return linear(linear(x_BTD, w[f"{name}_a_proj.weight"]), w[f"{name}_b_proj.weight"])
