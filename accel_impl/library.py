"""Operators that torch has in one call: the library's own kernels, whatever the device. Knows ops' contract only.

Shapes: as in `accel_impl.ops`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_impl.formats import Resident

FLOAT = torch.float32


def rms_norm(x_F: Tensor, weight_F: Tensor, eps: float) -> Tensor:
    """Call torch's, in float32."""
    return F.rms_norm(x_F.to(FLOAT), x_F.shape[-1:], weight_F.to(FLOAT), eps).to(x_F.dtype)


def layer_norm(x_F: Tensor, weight_F: Tensor, bias_F: Tensor, eps: float) -> Tensor:
    """Call torch's, in float32."""
    return F.layer_norm(x_F.to(FLOAT), x_F.shape[-1:], weight_F.to(FLOAT), bias_F.to(FLOAT), eps).to(x_F.dtype)


def gelu(x_F: Tensor, *, tanh: bool) -> Tensor:
    """Call torch's."""
    return F.gelu(x_F, approximate="tanh" if tanh else "none")


def linear(x_F: Tensor, weight: Resident, bias: Tensor | None = None, *, out: torch.dtype | None = None) -> Tensor:
    """Call torch's in dtype; a partial sum in float32."""
    dtype = out or x_F.dtype
    return F.linear(x_F.to(dtype), weight.decode(x_F.dtype).to(dtype), None if bias is None else bias.to(dtype))


def causal_conv(x_BTC: Tensor, past_BWC: Tensor, weight_CW: Tensor) -> Tensor:
    """Call torch's convolution, one group for each channel."""
    x = torch.cat((past_BWC, x_BTC), dim=1).to(FLOAT).mT
    y = F.conv1d(x, weight_CW.to(FLOAT)[:, None], groups=len(weight_CW))
    return F.silu(y).mT.to(x_BTC.dtype)


def attend_patches(q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor, lengths: Sequence[int]) -> Tensor:
    """Call torch's attention once for each picture, unrounded."""
    parts = []
    for q, k, v in zip(*(t.split(list(lengths)) for t in (q_PHD, k_PHD, v_PHD)), strict=True):
        heads = [t.to(FLOAT).transpose(0, 1)[None] for t in (q, k, v)]
        parts.append(F.scaled_dot_product_attention(*heads)[0].transpose(0, 1))
    return torch.cat(parts).to(q_PHD.dtype)
