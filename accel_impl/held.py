"""The weights of one rank, and products with them. Knows names and cuts; must not know how layers are put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from accel_impl import ops
from accel_impl.backend import BackendAdapter
from accel_impl.config import Config
from accel_impl.formats import Resident
from accel_impl.parallel import Place

HIDDEN, HEADS, CHOICE = "batch token feature", "batch token head feature", "batch token choice"
"""What taps call their axes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a layer computes with: configuration, weights by checkpoint name, place, operators, precision, device."""

    config: Config
    weights: Mapping[str, Resident]
    place: Place
    use: BackendAdapter
    dtype: torch.dtype
    device: torch.device

    def tensor(self, name: str) -> Tensor:
        """Return a weight in the model's precision."""
        return self.weights[name].decode(self.dtype)

    def wide(self, name: str) -> Tensor:
        """Return a weight in float32."""
        return self.weights[name].decode(torch.float32)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Return x W^T in the model's precision."""
        return ops.linear(self.use, x, self.weights[f"{name}.weight"])

    def exact(self, x: Tensor, name: str) -> Tensor:
        """Return x W^T in float32."""
        return ops.linear(self.use, x.float(), self.weights[f"{name}.weight"])

    def row_linear(self, x: Tensor, name: str) -> Tensor:
        """Multiply by a matrix cut along its input and sum over ranks, rounding once."""
        if self.place.tp.size == 1:
            return self.linear(x, name)
        partial = ops.linear(self.use, x, self.weights[f"{name}.weight"], out=torch.float32)
        return self.place.reduce(partial).to(self.dtype)

    def rms_norm(self, x: Tensor, name: str) -> Tensor:
        """Return the named norm of x."""
        return ops.rms_norm(self.use, x, self.tensor(f"{name}.weight"), self.config.rms_norm_eps)

    def gated(self, x: Tensor, name: str) -> Tensor:
        """Return a dense gated feed-forward."""
        inner = ops.swiglu(self.use, self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj"))
        return self.row_linear(inner, f"{name}.down_proj")
