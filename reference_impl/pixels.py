"""From pictures to patches: size, resize, normalise, cut. Knows bytes and whole numbers; must not know weights.

H W of the original picture  h w of the resized one  P patches of all pictures, merge-block-major
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from harness.errors import PortError
from harness.types import Image
from reference_impl.config import VisionConfig


def to_patches(images: Sequence[Image], config: VisionConfig) -> tuple[Tensor, Tensor]:
    """Turn pictures into normalised patches and their grids.

    Shapes: pixel_values [P, 3 * patch * patch] float32, grid [images, 3] int64 (1, grid height, grid width).
    Raises PortError if a picture's bytes are not as many as its sides say.
    """
    patch, values, grids = config.patch_size, [], []
    for image in images:
        pixels_3hw = resized(_raw(image), *fitted_size(image.height, image.width, config)).float() / 255
        pixels_3hw = (pixels_3hw - torch.tensor(config.mean)[:, None, None]) / torch.tensor(config.std)[:, None, None]
        height, width = pixels_3hw.shape[1] // patch, pixels_3hw.shape[2] // patch
        patches = pixels_3hw.view(3, height, patch, width, patch).permute(1, 3, 0, 2, 4).reshape(height * width, -1)
        values.append(patches[merge_order(height, width, config.spatial_merge_size)])
        grids.append((1, height, width))
    return torch.cat(values), torch.tensor(grids, dtype=torch.int64)


def fitted_size(height: int, width: int, config: VisionConfig) -> tuple[int, int]:
    """Return the sides in pixels that a picture is resized to: multiples of a merge block, of a permitted area.

    In whole numbers: floor(sqrt(a / b)) is the integer root of floor(a / b).
    """
    block = config.patch_size * config.spatial_merge_size
    h, w = (max(1, round(side / block)) * block for side in (height, width))
    if h * w > config.max_pixels:
        h, w = (
            max(1, math.isqrt(config.max_pixels * side // (other * block**2))) * block
            for side, other in ((height, width), (width, height))
        )
    elif h * w < config.min_pixels:
        h, w = (
            (math.isqrt(-(-config.min_pixels * side // (other * block**2)) - 1) + 1) * block
            for side, other in ((height, width), (width, height))
        )
    return h, w


def resized(pixels_3HW: Tensor, height: int, width: int) -> Tensor:
    """Resize by a triangle filter that widens as it shrinks; every value rounded once, half up. uint8 in and out.

    Weights are whole numbers and so are their sums (exact in float64), so a half is a half on every machine.
    """
    down_hH, across_wW = (
        triangle(new, old).double() for new, old in zip((height, width), pixels_3HW.shape[1:], strict=True)
    )
    total_3hw = (down_hH @ pixels_3HW.double() @ across_wW.T).long()
    unit_hw = (down_hH.sum(1)[:, None] * across_wW.sum(1)[None, :]).long()
    return torch.div(2 * total_3hw + unit_hw, 2 * unit_hw, rounding_mode="floor").to(torch.uint8)


def triangle(new: int, old: int) -> Tensor:
    """Return the weight of each old sample for each new one, times twice the finer length. Shape [new, old], int64."""
    centre_n, centre_o = 2 * torch.arange(new) + 1, 2 * torch.arange(old) + 1
    return (2 * max(new, old) - (centre_o[None, :] * new - centre_n[:, None] * old).abs()).clamp(min=0)


def merge_order(height: int, width: int, merge: int) -> Tensor:
    """Return raster indices of a grid's patches in merge-block-major order."""
    raster = torch.arange(height * width).view(height // merge, merge, width // merge, merge)
    return raster.permute(0, 2, 1, 3).flatten()


def _raw(image: Image) -> Tensor:
    data = base64.b64decode(image.rgb)
    if len(data) != image.height * image.width * 3 or not data:
        raise PortError(f"expected {image.height}x{image.width} pixels of 3 bytes, found {len(data)} bytes")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(image.height, image.width, 3).permute(2, 0, 1)
