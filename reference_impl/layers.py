"""The parts that text and vision share: norms, rotary, linears. Knows tensors and precisions; must not know the model.

B batch  T tokens of this call  S keys so far  M streams  D features  H heads  K head width
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from reference_impl.config import RopeConfig


def wide(x: Tensor) -> Tensor:
    """Return a tensor in the precision of the float32 islands: float64 in a float64 model, float32 otherwise."""
    return x if x.dtype == torch.float64 else x.float()


def linear(x_BTD: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear in the weight's own precision."""
    return F.linear(x_BTD, weight, bias)


def wide_linear(x_BTD: Tensor, weight: Tensor) -> Tensor:
    """Apply a linear whose result stays in float32 (float64 in a float64 model)."""
    return F.linear(wide(x_BTD), wide(weight))


def rms_norm(x_BTD: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    """Scale by the inverse root mean square, and by the weight where there is one; computed wide, rounded once."""
    x = wide(x_BTD)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (x if weight_D is None else x * wide(weight_D)).to(x_BTD.dtype)


def layer_norm(x_BTD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """Subtract the mean, divide by the standard deviation; computed wide, rounded once."""
    x = wide(x_BTD)
    return F.layer_norm(x, x.shape[-1:], wide(weight_D), wide(bias_D), eps).to(x_BTD.dtype)


def mix(query_D: Tensor, streams: Sequence[Tensor], eps: float) -> Tensor:
    """Mix streams [B, T, D], normed, by a softmax over how each answers to the query."""
    normed_BTMD = torch.stack([rms_norm(stream, None, eps) for stream in streams], dim=-2)
    answers_BTM = wide(normed_BTMD) @ wide(query_D) * len(query_D) ** -0.5
    shares_BTM = answers_BTM.softmax(-1).to(normed_BTMD.dtype)
    return (shares_BTM[..., None, :] @ normed_BTMD)[..., 0, :]


def gated(weights: Mapping[str, Tensor], x_BTD: Tensor) -> Tensor:
    """Apply down(silu(gate x) * up x)."""
    gate, up = linear(x_BTD, weights["gate_proj.weight"]), linear(x_BTD, weights["up_proj.weight"])
    return linear(F.silu(gate) * up, weights["down_proj.weight"])


def yarn_frequencies(width: int, rope: RopeConfig) -> Tensor:
    """Return the frequency of each pair of `width` rotated features, in float64. Shape [width / 2].

    Fast pairs keep theirs, slow ones are divided by the factor, those between are blended.
    Source: arXiv 2309.00071, section 3.2.
    """
    i = torch.arange(width // 2, dtype=torch.float64)
    plain = rope.rope_theta ** (-2 * i / width)

    def pair_of(turns: float) -> float:
        """Return the (fractional) pair that turns so often within the original length."""
        wavelength = rope.original_max_position_embeddings / (2 * math.pi * turns)
        return width * math.log(wavelength) / (2 * math.log(rope.rope_theta))

    low = max(math.floor(pair_of(rope.beta_fast)), 0)
    high = min(math.ceil(pair_of(rope.beta_slow)), width - 1)
    slow = ((i - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / rope.factor * slow + plain * (1 - slow)


def score_scale(rope: RopeConfig) -> float:
    """Return the factor m on queries and keys that makes up for the flatter softmax over more tokens (YaRN)."""
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1


def rotary_angles(positions_BT: Tensor, frequencies: Tensor) -> Tensor:
    """Return position * frequency for each pair, in float64. Shapes: positions [B, T] -> [B, T, pairs]."""
    return positions_BT.double()[..., None] * frequencies.to(positions_BT.device)


def rotate_interleaved(x_BTHK: Tensor, angles: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i+1) of the last axis. Computed wide, rounded once."""
    x = wide(x_BTHK)
    cos, sin = angles.cos().to(x.dtype)[:, :, None], angles.sin().to(x.dtype)[:, :, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x_BTHK.dtype)


def rotate_half_split(x_BTHK: Tensor, angles: Tensor) -> Tensor:
    """Rotate the pairs (i, i + pairs) of the first features; the others pass. Computed wide, rounded once."""
    x = wide(x_BTHK)
    cos, sin = angles.cos().to(x.dtype)[:, :, None], angles.sin().to(x.dtype)[:, :, None]
    half = angles.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x_BTHK.dtype)


def top_indices(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` highest scores along the last axis, ascending; ties go to the lower index."""
    best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]
    return best.sort(dim=-1).values
