"""The vision tower: patches to rows of the decoder's width. Knows the visual weights; must not know tokens or pixels.

P patches of all pictures, merge-block-major  N merged rows  D features  H heads  K head width
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from harness.adapter import Recorder
from reference_impl.config import VisionConfig
from reference_impl.layers import layer_norm, linear, rotate_half_split, wide
from reference_impl.pixels import merge_order

PATCHES, ROWS = "patch feature", "row feature"


def tower(
    w: Mapping[str, Tensor], c: VisionConfig, pixel_values: Tensor, grid: Tensor, record: Recorder
) -> tuple[Tensor, list[Tensor]]:
    """Return one row per merge block, all pictures in order, and the rows for each of the deeper layers.

    Shapes: pixel_values [P, C], grid [images, 3] -> [N, D], of [N, D] each.
    """
    kernel = w["patch_embed.weight"]
    patches = pixel_values.to(kernel.dtype).unflatten(1, kernel.shape[1:])
    x_PD = record("vision.patch_embed", F.conv2d(patches, kernel, w["patch_embed.bias"]).flatten(1), dims=PATCHES)
    x_PD = x_PD + record("vision.pos_embed", positions(w["pos_embed"], c, grid), dims=PATCHES)
    picture_P = torch.repeat_interleave(torch.arange(len(grid), device=grid.device), grid.prod(dim=1))
    same_picture_PP = (picture_P[:, None] == picture_P[None, :]).to(x_PD.device)
    angles_PK = rotary_angles_2d(c, grid).to(x_PD.device)
    deepstack: list[Tensor] = []
    for n in range(c.depth):
        x_PD = record(
            f"vision.blocks.{n}", _block(below(w, f"blocks.{n}"), c, x_PD, angles_PK, same_picture_PP), dims=PATCHES
        )
        if n in c.deepstack_visual_indexes:
            j = c.deepstack_visual_indexes.index(n)
            part = below(w, f"deepstack.{j}")
            beside = layer_norm(side_by_side(x_PD, c), part["norm.weight"], part["norm.bias"], c.layer_norm_eps)
            deepstack.append(record(f"vision.deepstack.{j}", project(part, beside), dims=ROWS))
    x_PD = record("vision.norm", layer_norm(x_PD, w["norm.weight"], w["norm.bias"], c.layer_norm_eps), dims=PATCHES)
    return record("vision.merger", project(below(w, "merger"), side_by_side(x_PD, c)), dims=ROWS), deepstack


def below(w: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the weights below a prefix, by the rest of their names."""
    return {k.removeprefix(f"{prefix}."): v for k, v in w.items() if k.startswith(f"{prefix}.")}


def side_by_side(x_PD: Tensor, c: VisionConfig) -> Tensor:
    """Put the patches of a merge block side by side. Shape [N, merge^2 * D]."""
    return x_PD.reshape(-1, c.spatial_merge_size**2 * c.hidden_size)


def project(w: Mapping[str, Tensor], merged_ND: Tensor) -> Tensor:
    """Apply fc2(gelu(fc1 x)), with the exact gelu."""
    return linear(F.gelu(linear(merged_ND, w["fc1.weight"], w["fc1.bias"])), w["fc2.weight"], w["fc2.bias"])


def positions(table: Tensor, c: VisionConfig, grid: Tensor) -> Tensor:
    """Resize the table to each picture's grid and gather it in patch order. Shapes: [rows, columns, D] -> [P, D]."""
    source = wide(table).permute(2, 0, 1)[None]
    parts = []
    for _, height, width in grid.tolist():
        resized = F.interpolate(source, size=(height, width), mode="bilinear", align_corners=False, antialias=False)
        order = merge_order(height, width, c.spatial_merge_size).to(table.device)
        parts.append(resized[0].flatten(1).T[order])
    return torch.cat(parts).to(table.dtype)


def rotary_angles_2d(c: VisionConfig, grid: Tensor) -> Tensor:
    """Return each patch's angles in float64: half of them turn with its row, half with its column. Shape [P, K / 2]."""
    count = c.hidden_size // c.num_heads // 4
    frequencies = c.rope_theta ** (-torch.arange(count, dtype=torch.float64) / count)
    parts = []
    for _, height, width in grid.tolist():
        raster = merge_order(height, width, c.spatial_merge_size)
        row_P, column_P = raster // width, raster % width
        parts.append(torch.cat([row_P[:, None] * frequencies, column_P[:, None] * frequencies], dim=1))
    return torch.cat(parts)


def _block(
    w: Mapping[str, Tensor], c: VisionConfig, x_PD: Tensor, angles_PK: Tensor, same_picture_PP: Tensor
) -> Tensor:
    normed = layer_norm(x_PD, w["norm1.weight"], w["norm1.bias"], c.layer_norm_eps)
    x_PD = x_PD + _attention(w, c, normed, angles_PK, same_picture_PP)
    normed = layer_norm(x_PD, w["norm2.weight"], w["norm2.bias"], c.layer_norm_eps)
    inner = F.gelu(linear(normed, w["mlp.fc1.weight"], w["mlp.fc1.bias"]), approximate="tanh")
    return x_PD + linear(inner, w["mlp.fc2.weight"], w["mlp.fc2.bias"])


def _attention(
    w: Mapping[str, Tensor], c: VisionConfig, x_PD: Tensor, angles_PK: Tensor, same_picture_PP: Tensor
) -> Tensor:
    """Attend inside each picture."""
    qkv = linear(x_PD, w["attn.qkv.weight"], w["attn.qkv.bias"])
    q_PHK, k_PHK, v_PHK = qkv.unflatten(-1, (3, c.num_heads, -1)).unbind(1)
    q_PHK, k_PHK = (rotate_half_split(x[None], angles_PK[None])[0] for x in (q_PHK, k_PHK))
    scores_HPP = torch.einsum("phk,rhk->hpr", wide(q_PHK), wide(k_PHK)) * q_PHK.shape[-1] ** -0.5
    chances_HPP = scores_HPP.masked_fill(~same_picture_PP, float("-inf")).softmax(-1).to(x_PD.dtype)
    mixed_PHK = torch.einsum("hpr,rhk->phk", chances_HPP, v_PHK)
    return linear(mixed_PHK.flatten(1), w["attn.proj.weight"], w["attn.proj.bias"])
