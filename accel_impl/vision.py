"""Pictures: from RGB bytes to rows of the decoder's width. Knows the tower only; must not know tokens.

Legend: N pictures, P patches (merge-block-major), C channels, Y X pixels of a patch, F features, H heads, D head width,
M merged rows.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_impl import ops
from accel_impl.config import VisionConfig
from accel_impl.held import Held
from harness.adapter import Recorder
from harness.errors import PortError
from harness.types import Image

DIMS = "patch feature"
ROWS = "row feature"


# ---- from bytes to patches


def fitted(height: int, width: int, config: VisionConfig) -> tuple[int, int]:
    """Return the size that a picture is resized to: multiples of a merge block within the limits of area.

    In whole numbers, so that no side depends on how a square root was rounded: floor(sqrt(h L / w) / u) is the integer
    root of h L / (w u^2).
    """
    unit = config.patch_size * config.spatial_merge_size
    sides = [max(unit, unit * round(side / unit)) for side in (height, width)]
    area = sides[0] * sides[1]
    if config.min_pixels <= area <= config.max_pixels:
        return sides[0], sides[1]
    found = []
    for side, other in ((height, width), (width, height)):
        if area > config.max_pixels:
            found.append(max(1, math.isqrt(side * config.max_pixels // (other * unit**2))) * unit)
        else:
            blocks = -(-side * config.min_pixels // (other * unit**2))
            found.append((math.isqrt(blocks - 1) + 1) * unit)
    return found[0], found[1]


def triangle(source: int, target: int) -> Tensor:
    """Return the resizing of one axis as a sparse matrix [target, source] of whole numbers; a row's sum is its unit.

    The weight of input j for output i is 1 - |(j + 1/2) - (i + 1/2) s / t| / max(s / t, 1), here times 2 max(s, t).
    """
    wide = max(source, target)
    reach = -(-wide // target)
    middle = (2 * torch.arange(target) + 1)[:, None] * source
    places = middle // (2 * target) + torch.arange(-reach - 1, reach + 2)
    weights = 2 * wide - ((2 * places + 1) * target - middle).abs()
    used = (weights > 0) & (places >= 0) & (places < source)
    rows = torch.arange(target)[:, None].expand_as(places)[used]
    return torch.sparse_coo_tensor(
        torch.stack((rows, places[used])), weights[used].double(), (target, source), check_invariants=False
    ).coalesce()


def resized(rgb_YXC: Tensor, height: int, width: int) -> Tensor:
    """Resize bytes [h, w, 3] with a triangle filter along y, then x, rounded half up once.

    Sums of whole numbers are exact in float64, so halves are: the order of summation cannot move a byte.
    """
    along_y, along_x = triangle(rgb_YXC.shape[0], height), triangle(rgb_YXC.shape[1], width)
    mixed = (along_y @ rgb_YXC.double().flatten(1)).view(height, -1, 3).transpose(0, 1)
    mixed = (along_x @ mixed.flatten(1)).view(width, height, 3).transpose(0, 1)
    units = along_y.sum(1).to_dense()[:, None] * along_x.sum(1).to_dense()
    return (mixed / units[..., None] + 0.5).floor().to(torch.uint8)


def pixels(images: Sequence[Image], config: VisionConfig) -> tuple[Tensor, Tensor]:
    """Return pixel values [P, C * patch * patch] float32 and grids [N, 3] (1, height, width in patches)."""
    rows, grids, size = [], [], config.patch_size
    for image in images:
        rgb_YXC = resized(_decoded(image), *fitted(image.height, image.width, config))
        normal = (rgb_YXC.float() / 255 - torch.tensor(config.mean)) / torch.tensor(config.std)
        h, w = normal.shape[0] // size, normal.shape[1] // size
        patches = normal.view(h, size, w, size, 3).permute(0, 2, 4, 1, 3)
        rows.append(block_major(patches.reshape(h, w, -1), config.spatial_merge_size))
        grids.append((1, h, w))
    return torch.cat(rows), torch.tensor(grids, dtype=torch.int64)


def _decoded(image: Image) -> Tensor:
    data = bytearray(base64.b64decode(image.rgb))
    if min(image.height, image.width) < 1 or len(data) != 3 * image.height * image.width:
        raise PortError(f"expected {image.height} x {image.width} x 3 bytes of RGB, found {len(data)}")
    return torch.frombuffer(data, dtype=torch.uint8).view(image.height, image.width, 3)


def block_major(grid: Tensor, merge: int) -> Tensor:
    """Reorder [h, w, ...] to [h * w, ...]: blocks of merge x merge in raster order, raster inside each block."""
    h, w, *rest = grid.shape
    split = grid.view(h // merge, merge, w // merge, merge, *rest)
    return split.transpose(1, 2).reshape(h * w, *rest)


# ---- tables of places


def bilinear(source: int, target: int, device: torch.device) -> Tensor:
    """Return bilinear resizing of one axis (align_corners False, edges held) as a matrix [target, source] float32."""
    at = ((torch.arange(target, dtype=torch.float64) + 0.5) * source / target - 0.5).clamp(0, source - 1)
    apart = (at[:, None] - torch.arange(source)).abs()
    return (1 - apart).clamp(min=0).float().to(device)


def turns(grids: Tensor, config: VisionConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin [1, P, D / 2] float32 of the tower's rotary angles: rows of patches first, then columns."""
    quarter = config.hidden_size // config.num_heads // 4
    frequency = config.rope_theta ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    parts = []
    for _, h, w in grids.tolist():
        places = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), dim=-1)
        places = block_major(places, config.spatial_merge_size).double()
        parts.append((places[..., None] * frequency).flatten(1))
    angles = torch.cat(parts)[None]
    return angles.cos().float().to(device), angles.sin().float().to(device)


# ---- the tower


class Tower:
    """The vision tower of one rank."""

    def __init__(self, held: Held) -> None:
        if held.config.vision is None:
            raise PortError("expected a configuration with a vision tower, found none")
        self.held, self.config = held, held.config.vision
        held.use.map_attention("vision_full")

    def _tensor(self, name: str) -> Tensor:
        return self.held.tensor(f"visual.{name}")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        weight = self.held.weights[f"visual.{name}.weight"]
        return ops.linear(self.held.use, x, weight, self._tensor(f"{name}.bias"))

    def _row_linear(self, x: Tensor, name: str) -> Tensor:
        """Multiply by a matrix cut along its input, sum over ranks, add the bias once."""
        place = self.held.place
        if place.tp.size == 1:
            return self._linear(x, name)
        partial = ops.linear(self.held.use, x, self.held.weights[f"visual.{name}.weight"], out=torch.float32)
        return (place.reduce(partial) + self._tensor(f"{name}.bias").float()).to(self.held.dtype)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.config.layer_norm_eps
        return ops.layer_norm(self.held.use, x, self._tensor(f"{name}.weight"), self._tensor(f"{name}.bias"), eps)

    def positions(self, grids: Tensor) -> Tensor:
        """Return the position table resized to each picture's grid, in patch order [P, F]."""
        table = self._tensor("pos_embed").float()
        rows = []
        for _, h, w in grids.tolist():
            along_y, along_x = (bilinear(n, m, table.device) for n, m in zip(table.shape, (h, w), strict=False))
            grid = torch.einsum("hy,wx,yxf->hwf", along_y, along_x, table)
            rows.append(block_major(grid, self.config.spatial_merge_size))
        return torch.cat(rows).to(self.held.dtype)

    def __call__(self, pixel_values: Tensor, grids: Tensor, record: Recorder) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return rows [M, decoder width] of all pictures in order: for placeholders, and for each deepstack layer."""
        config, device = self.config, self.held.device
        lengths = [int(n) for n in grids.prod(-1)]
        cos_sin = turns(grids, config, device)
        x_PF = record("vision.patch_embed", self._patches(pixel_values.to(device, self.held.dtype)), dims=DIMS)
        x_PF = x_PF + record("vision.pos_embed", self.positions(grids), dims=DIMS)
        deepstack = []
        for index in range(config.depth):
            x_PF = record(f"vision.blocks.{index}", self._block(x_PF, f"blocks.{index}", lengths, cos_sin), dims=DIMS)
            if index in config.deepstack_visual_indexes:
                name = f"deepstack.{config.deepstack_visual_indexes.index(index)}"
                rows = self._projected(self._norm(self._beside(x_PF), f"{name}.norm"), name)
                deepstack.append(record(f"vision.{name}", rows, dims=ROWS))
        x_PF = record("vision.norm", self._norm(x_PF, "norm"), dims=DIMS)
        merged = record("vision.merger", self._projected(self._beside(x_PF), "merger"), dims=ROWS)
        return merged, tuple(deepstack)

    def _patches(self, x_PF: Tensor) -> Tensor:
        """Embed patches by a 2-D convolution whose kernel is a whole patch, accumulated in float32, rounded once."""
        size = self.config.patch_size
        weight, bias = self._tensor("patch_embed.weight").float(), self._tensor("patch_embed.bias").float()
        x_PF11 = F.conv2d(x_PF.float().view(-1, 3, size, size), weight.view(-1, 3, size, size), bias, stride=size)
        return x_PF11.flatten(1).to(self.held.dtype)

    def _beside(self, x_PF: Tensor) -> Tensor:
        """Lay the patches of a merge block side by side [M, merge * merge * F]."""
        return x_PF.reshape(-1, self.config.merged_features)

    def _projected(self, x_MF: Tensor, name: str) -> Tensor:
        return self._linear(ops.gelu(self.held.use, self._linear(x_MF, f"{name}.fc1"), tanh=False), f"{name}.fc2")

    def _block(self, x_PF: Tensor, name: str, lengths: Sequence[int], cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        heads = len(self.held.place.cut(self.config.num_heads))
        qkv = self._linear(self._norm(x_PF, f"{name}.norm1"), f"{name}.attn.qkv")
        q_PHD, k_PHD, v_PHD = qkv.unflatten(-1, (3, heads, -1)).unbind(1)
        q_PHD, k_PHD = (ops.rope(self.held.use, x[None], *cos_sin, interleaved=False)[0] for x in (q_PHD, k_PHD))
        mixed = ops.attend_patches(self.held.use, q_PHD, k_PHD, v_PHD, lengths).flatten(1)
        x_PF = x_PF + self._row_linear(mixed, f"{name}.attn.proj")
        inner = ops.gelu(self.held.use, self._linear(self._norm(x_PF, f"{name}.norm2"), f"{name}.mlp.fc1"), tanh=True)
        return x_PF + self._row_linear(inner, f"{name}.mlp.fc2")
