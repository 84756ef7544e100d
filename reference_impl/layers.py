"""The parts that text and vision share: norms, rotary, linears. Knows tensors and precisions; must not know the model.

B batch  T tokens of this call  S keys so far  D features  H heads  K head width
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def wide(x: Tensor) -> Tensor:
    """Return a tensor in the precision of the float32 islands: float64 in a float64 model, float32 otherwise."""
    return x if x.dtype == torch.float64 else x.float()


def linear(x_BTD: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear in the weight's own precision."""
    return F.linear(x_BTD, weight, bias)


def wide_linear(x_BTD: Tensor, weight: Tensor) -> Tensor:
    """Apply a linear whose result stays in float32 (float64 in a float64 model)."""
    return F.linear(wide(x_BTD), wide(weight))


def rms_norm(x_BTD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Scale by the inverse root mean square and the weight; computed wide, rounded once."""
    x = wide(x_BTD)
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * wide(weight_D)).to(x_BTD.dtype)


def layer_norm(x_BTD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """Subtract the mean, divide by the standard deviation; computed wide, rounded once."""
    x = wide(x_BTD)
    return F.layer_norm(x, x.shape[-1:], wide(weight_D), wide(bias_D), eps).to(x_BTD.dtype)


def rotary_angles(positions_BT: Tensor, width: int, theta: float) -> Tensor:
    """Return position * theta^(-2i / width) for each pair i, in float64.

    Shapes: positions [B, T] -> [B, T, width / 2].
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=positions_BT.device) / width
    return positions_BT.double()[..., None] * theta**-exponents


def rotate_interleaved(x_BTHK: Tensor, angles: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i+1) of the last axis. Computed wide, rounded once."""
    x = wide(x_BTHK)
    cos, sin = angles.cos().to(x.dtype)[:, :, None], angles.sin().to(x.dtype)[:, :, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x_BTHK.dtype)


def rotate_half_split(x_BTHK: Tensor, angles: Tensor) -> Tensor:
    """Rotate the pairs (i, i + width/2) of the first `width` features; the others pass. Computed wide, rounded once."""
    x = wide(x_BTHK)
    cos, sin = angles.cos().to(x.dtype)[:, :, None], angles.sin().to(x.dtype)[:, :, None]
    half = angles.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x_BTHK.dtype)


def top_indices(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` highest scores along the last axis, ascending; ties go to the lower index."""
    best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]
    return best.sort(dim=-1).values
