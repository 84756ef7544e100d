"""Angles of positions. Knows the formula and the configuration; must not know tensors of a model.

Tables are made on the host in float64, whatever the device, and rounded once to float32. Source: YaRN, arXiv
2309.00071, section 3.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from accel_impl.config import RopeConfig


@functools.cache
def frequencies(rope: RopeConfig, width: int) -> Tensor:
    """Return the turn of each pair per position [width / 2], float64: YaRN's blend of both ends."""
    pair = torch.arange(0, width, 2, dtype=torch.float64)
    base = rope.rope_theta ** (-pair / width)

    def turns(count: float) -> float:
        """The pair that turns `count` times within the original length."""
        length = rope.original_max_position_embeddings / (2 * math.pi * count)
        return width * math.log(length) / (2 * math.log(rope.rope_theta))

    low = max(math.floor(turns(rope.beta_fast)), 0)
    high = min(math.ceil(turns(rope.beta_slow)), width - 1)
    ramp = ((pair / 2 - low) / max(high - low, 0.001)).clamp(0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)


def score_factor(rope: RopeConfig) -> float:
    """Return what scores of attention are multiplied by, beside the head's width."""
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2


def table(positions_BT: Tensor, rope: RopeConfig, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin [B, T, width / 2] float32 of positions on the host."""
    angle = positions_BT.cpu()[..., None].double() * frequencies(rope, width)
    return angle.cos().float().to(device), angle.sin().float().to(device)
