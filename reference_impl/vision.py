"""Pictures: patches, the tower, the merger. Knows pixels and the visual weights; must not know tokens.

P patches of all pictures, merge-block-major  D features  H heads  K head width
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from harness.adapter import Recorder
from harness.errors import PortError
from harness.types import Image
from reference_impl.config import VisionConfig
from reference_impl.layers import layer_norm, linear, wide

PATCH_DIMS = "patch feature"


def to_patches(images: Sequence[Image], config: VisionConfig) -> tuple[Tensor, Tensor]:
    """Turn pictures into normalised patches and their grids.

    Shapes: pixel_values [P, 3 * patch * patch] float32, grid [images, 3] int64 (1, grid height, grid width).
    Raises PortError if a side is no multiple of a merge block.
    """
    patch, block = config.patch_size, config.patch_size * config.spatial_merge_size
    values, grids = [], []
    for image in images:
        if image.height % block or image.width % block:
            raise PortError(f"expected picture sides that are multiples of {block}, found {image.height}x{image.width}")
        raw = torch.frombuffer(bytearray(base64.b64decode(image.rgb)), dtype=torch.uint8)
        pixels = raw.view(image.height, image.width, 3).permute(2, 0, 1).float() / 255
        pixels = (pixels - torch.tensor(config.mean)[:, None, None]) / torch.tensor(config.std)[:, None, None]
        height, width = image.height // patch, image.width // patch
        patches = pixels.view(3, height, patch, width, patch).permute(1, 3, 0, 2, 4).reshape(height * width, -1)
        values.append(patches[merge_order(height, width, config.spatial_merge_size)])
        grids.append((1, height, width))
    return torch.cat(values), torch.tensor(grids, dtype=torch.int64)


def merge_order(height: int, width: int, merge: int) -> Tensor:
    """Return raster indices of a grid's patches in merge-block-major order."""
    raster = torch.arange(height * width).view(height // merge, merge, width // merge, merge)
    return raster.permute(0, 2, 1, 3).flatten()


def tower(
    weights: Mapping[str, Tensor], config: VisionConfig, pixel_values: Tensor, grid: Tensor, record: Recorder
) -> Tensor:
    """Return one feature row per merge block, all pictures in order.

    Shapes: pixel_values [P, C], grid [images, 3] -> [P / merge^2, D].
    """
    embed_weight = weights["patch_embed.weight"]
    x_PD = linear(pixel_values.to(embed_weight.dtype), embed_weight, weights["patch_embed.bias"])
    x_PD = record("vision.patch_embed", x_PD, dims=PATCH_DIMS)
    x_PD = x_PD + record("vision.pos_embed", _positions(weights["pos_embed"], config, grid), dims=PATCH_DIMS)
    picture_P = torch.repeat_interleave(torch.arange(len(grid), device=grid.device), grid.prod(dim=1))
    same_picture_PP = (picture_P[:, None] == picture_P[None, :]).to(x_PD.device)
    for n in range(config.depth):
        block = {k.removeprefix(f"blocks.{n}."): v for k, v in weights.items() if k.startswith(f"blocks.{n}.")}
        x_PD = record(f"vision.blocks.{n}", _block(block, config, x_PD, same_picture_PP), dims=PATCH_DIMS)
    x_PD = layer_norm(x_PD, weights["norm.weight"], weights["norm.bias"], config.layer_norm_eps)
    x_PD = record("vision.norm", x_PD, dims=PATCH_DIMS)
    merged = x_PD.reshape(-1, config.spatial_merge_size**2 * config.hidden_size)
    merged = F.gelu(linear(merged, weights["merger.fc1.weight"], weights["merger.fc1.bias"]))
    rows = linear(merged, weights["merger.fc2.weight"], weights["merger.fc2.bias"])
    return record("vision.merger", rows, dims="row feature")


def _positions(table: Tensor, config: VisionConfig, grid: Tensor) -> Tensor:
    """Resize the table to each picture's grid and gather it in patch order. Shapes: [rows, columns, D] -> [P, D]."""
    source = wide(table).permute(2, 0, 1)[None]
    parts = []
    for _, height, width in grid.tolist():
        resized = F.interpolate(source, size=(height, width), mode="bilinear", align_corners=False, antialias=False)
        order = merge_order(height, width, config.spatial_merge_size).to(table.device)
        parts.append(resized[0].flatten(1).T[order])
    return torch.cat(parts).to(table.dtype)


def _block(weights: Mapping[str, Tensor], config: VisionConfig, x_PD: Tensor, same_picture_PP: Tensor) -> Tensor:
    normed = layer_norm(x_PD, weights["norm1.weight"], weights["norm1.bias"], config.layer_norm_eps)
    x_PD = x_PD + _attention(weights, config, normed, same_picture_PP)
    normed = layer_norm(x_PD, weights["norm2.weight"], weights["norm2.bias"], config.layer_norm_eps)
    inner = F.gelu(linear(normed, weights["mlp.fc1.weight"], weights["mlp.fc1.bias"]), approximate="tanh")
    return x_PD + linear(inner, weights["mlp.fc2.weight"], weights["mlp.fc2.bias"])


def _attention(weights: Mapping[str, Tensor], config: VisionConfig, x_PD: Tensor, same_picture_PP: Tensor) -> Tensor:
    qkv = linear(x_PD, weights["attn.qkv.weight"], weights["attn.qkv.bias"])
    q_HPK, k_HPK, v_HPK = qkv.view(len(x_PD), 3, config.num_heads, -1).permute(1, 2, 0, 3)
    scores_HPP = wide(q_HPK) @ wide(k_HPK).transpose(-1, -2) * q_HPK.shape[-1] ** -0.5
    chances_HPP = scores_HPP.masked_fill(~same_picture_PP, float("-inf")).softmax(-1).to(x_PD.dtype)
    mixed_PD = (chances_HPP @ v_HPK).transpose(0, 1).reshape(x_PD.shape)
    return linear(mixed_PD, weights["attn.proj.weight"], weights["attn.proj.bias"])
