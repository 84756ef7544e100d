"""Pictures: from RGB bytes to rows of the decoder's width. Knows the tower only; must not know tokens.

Legend: N pictures, P patches (merge-block-major), C channels, F features, H heads, D head width, M merged rows.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_impl import ops
from accel_impl.backend import BackendAdapter
from accel_impl.config import VisionConfig
from accel_impl.formats import Resident
from accel_impl.parallel import Place
from harness.adapter import Recorder
from harness.errors import PortError
from harness.types import Image

DIMS = "patch feature"


def block_major(grid: Tensor, merge: int) -> Tensor:
    """Reorder [h, w, ...] to [h * w, ...]: blocks of merge x merge in raster order, raster inside each block."""
    h, w, *rest = grid.shape
    split = grid.view(h // merge, merge, w // merge, merge, *rest)
    return split.transpose(1, 2).reshape(h * w, *rest)


def pixels(images: Sequence[Image], config: VisionConfig) -> tuple[Tensor, Tensor]:
    """Return pixel values [P, C * patch * patch] float32 and grids [N, 3] (1, height, width in patches)."""
    step = config.patch_size * config.spatial_merge_size
    rows, grids = [], []
    for image in images:
        if image.height % step or image.width % step or not image.height or not image.width:
            raise PortError(f"expected a picture of multiples of {step} pixels, found {image.height}x{image.width}")
        data = bytearray(base64.b64decode(image.rgb))
        if len(data) != 3 * image.height * image.width:
            raise PortError(f"expected {3 * image.height * image.width} bytes of RGB, found {len(data)}")
        rgb = torch.frombuffer(data, dtype=torch.uint8).view(image.height, image.width, 3)
        normal = (rgb.float() / 255 - torch.tensor(config.mean)) / torch.tensor(config.std)
        h, w = image.height // config.patch_size, image.width // config.patch_size
        patches = normal.view(h, config.patch_size, w, config.patch_size, 3).permute(0, 2, 4, 1, 3)
        rows.append(block_major(patches.reshape(h, w, -1), config.spatial_merge_size))
        grids.append((1, h, w))
    return torch.cat(rows), torch.tensor(grids, dtype=torch.int64)


class Tower:
    """The vision tower of one rank."""

    def __init__(
        self,
        config: VisionConfig,
        weights: Mapping[str, Resident],
        place: Place,
        use: BackendAdapter,
        dtype: torch.dtype,
    ) -> None:
        self.config, self.weights, self.place, self.use, self.dtype = config, weights, place, use, dtype
        use.map_attention("vision_full")

    def _tensor(self, name: str) -> Tensor:
        return self.weights[f"visual.{name}"].decode(self.dtype)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return ops.linear(self.use, x, self.weights[f"visual.{name}.weight"], self._tensor(f"{name}.bias"))

    def _row_linear(self, x: Tensor, name: str) -> Tensor:
        """Multiply by a matrix cut along its input, sum over ranks, add the bias once."""
        if self.place.tp.size == 1:
            return self._linear(x, name)
        partial = ops.linear(self.use, x, self.weights[f"visual.{name}.weight"], out=torch.float32)
        return (self.place.reduce(partial) + self._tensor(f"{name}.bias").float()).to(self.dtype)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.config.layer_norm_eps
        return ops.layer_norm(self.use, x, self._tensor(f"{name}.weight"), self._tensor(f"{name}.bias"), eps)

    def positions(self, grids: Tensor) -> Tensor:
        """Return the position table resized to each picture's grid, in patch order [P, F]."""
        table = self._tensor("pos_embed").float().permute(2, 0, 1)[None]
        rows = []
        for _, h, w in grids.tolist():
            resized = F.interpolate(table, size=(h, w), mode="bilinear", align_corners=False)[0].permute(1, 2, 0)
            rows.append(block_major(resized, self.config.spatial_merge_size))
        return torch.cat(rows).to(self.dtype)

    def __call__(self, pixel_values: Tensor, grids: Tensor, record: Recorder) -> Tensor:
        """Return the merged rows [M, decoder width] of all pictures in order."""
        lengths = [int(n) for n in grids.prod(-1)]
        x_PF = record("vision.patch_embed", self._linear(pixel_values.to(self.dtype), "patch_embed"), dims=DIMS)
        x_PF = x_PF + record("vision.pos_embed", self.positions(grids), dims=DIMS)
        for index in range(self.config.depth):
            x_PF = record(f"vision.blocks.{index}", self._block(x_PF, f"blocks.{index}", lengths), dims=DIMS)
        x_PF = record("vision.norm", self._norm(x_PF, "norm"), dims=DIMS)
        x_MF = x_PF.reshape(-1, self.config.merged_features)
        x_MF = ops.gelu(self.use, self._linear(x_MF, "merger.fc1"), tanh=False)
        return record("vision.merger", self._linear(x_MF, "merger.fc2"), dims="row feature")

    def _block(self, x_PF: Tensor, name: str, lengths: Sequence[int]) -> Tensor:
        heads = len(self.place.cut(self.config.num_heads))
        qkv = self._linear(self._norm(x_PF, f"{name}.norm1"), f"{name}.attn.qkv")
        q_PHD, k_PHD, v_PHD = qkv.unflatten(-1, (3, heads, -1)).unbind(1)
        mixed = ops.attend_patches(self.use, q_PHD, k_PHD, v_PHD, lengths).flatten(1)
        x_PF = x_PF + self._row_linear(mixed, f"{name}.attn.proj")
        inner = ops.gelu(self.use, self._linear(self._norm(x_PF, f"{name}.norm2"), f"{name}.mlp.fc1"), tanh=True)
        return x_PF + self._row_linear(inner, f"{name}.mlp.fc2")
