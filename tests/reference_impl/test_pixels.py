"""Pictures before the tower: their size, their resizing, their patches."""

from __future__ import annotations

import base64
from fractions import Fraction

import pytest
import torch
from torch.nn import functional as F

from harness.cases import seeded_image
from harness.errors import PortError
from harness.types import Image
from reference_impl.config import VisionConfig, read_config
from reference_impl.pixels import fitted_size, resized, to_patches


@pytest.fixture
def config(checkpoint) -> VisionConfig:
    return read_config(checkpoint).vision


def picture(height: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, height, width), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("size", "fitted"),
    [
        ((32, 48), (32, 48)),  # as it is
        ((40, 56), (32, 64)),  # halves go to the even multiple: 2.5 and 3.5 blocks
        ((39, 41), (32, 48)),
        ((5, 200), (16, 192)),  # a side of at least one block
        ((1000, 10), (896, 16)),  # sqrt(8192 * 1000 / 10) = 905.1 down, and 9.05 up to a block: larger than permitted
        ((300, 500), (64, 112)),
        ((16, 16), (32, 32)),  # sqrt(512) = 22.6 up
        ((3, 17), (16, 64)),
    ],
)
def test_sizes(config, size, fitted):
    """Sides are the nearest multiples of 16, scaled from the original ones where the area is not permitted."""
    assert fitted_size(*size, config) == fitted


def test_sizes_are_those_of_the_same_rule_upstream(config):
    """For ordinary pictures the sizes are those of qwen2_vl's rule (which computes with rounded square roots)."""
    upstream = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    for height in range(16, 400, 13):
        for width in range(16, 400, 17):
            expected = upstream.smart_resize(height, width, 16, config.min_pixels, config.max_pixels)
            assert fitted_size(height, width, config) == tuple(expected), (height, width)


@pytest.mark.parametrize("size", [(16, 16), (40, 24), (100, 37), (33, 90)])
def test_resizing_is_the_antialiased_triangle_filter(size):
    """Every value is within rounding of torch's antialiased bilinear filter in float64."""
    pixels = picture(40, 37)
    found = resized(pixels, *size).double()
    expected = F.interpolate(pixels[None].double(), size=size, mode="bilinear", antialias=True, align_corners=False)[0]
    assert float((found - expected).abs().max()) <= 0.5 + 1e-9


def test_resizing_is_exact():
    """One row by fractions, halves up; a picture of the right size is untouched."""
    pixels = picture(1, 10, seed=3)
    found = resized(pixels, 1, 4)[:, 0]
    for channel in range(3):
        for i in range(4):
            places = {
                j: Fraction(2 * j + 1, 5) - Fraction(2 * i + 1, 2) for j in range(10)
            }  # from output i, in outputs
            weights = {j: 1 - abs(place) for j, place in places.items() if abs(place) < 1}
            exact = sum(w * int(pixels[channel, 0, j]) for j, w in weights.items()) / sum(weights.values())
            assert int(found[channel, i]) == int(exact + Fraction(1, 2))
    assert torch.equal(resized(pixels, 1, 10), pixels)


def test_halves_go_up():
    """A value between two numbers goes to the upper one."""
    two = torch.tensor([[[4, 5], [4, 5]]], dtype=torch.uint8).expand(3, -1, -1)
    assert resized(two, 1, 1).flatten().tolist() == [5, 5, 5]


def test_patches_are_normalised_and_in_merge_block_order(config):
    """The second patch lies right of the first, the third below it, the fifth starts the next block of four."""
    image = seeded_image(32, 48, seed=3)
    values, grid = to_patches([image], config)
    raw = base64.b64decode(image.rgb)
    for patch, (top, left) in enumerate([(0, 0), (0, 8), (8, 0), (8, 8), (0, 16)]):
        for channel, y, x in ((0, 0, 0), (1, 3, 5), (2, 7, 2)):
            value = raw[((top + y) * 48 + left + x) * 3 + channel] / 255
            expected = (value - config.mean[channel]) / config.std[channel]
            assert values.view(24, 3, 8, 8)[patch, channel, y, x].item() == pytest.approx(expected, rel=1e-5)
    assert grid.tolist() == [[1, 4, 6]]


def test_a_large_picture_fits(config):
    """A photograph of 1200 x 900 becomes a grid of permitted area."""
    values, grid = to_patches([seeded_image(300, 225, seed=1)], config)
    assert grid.tolist() == [[1, 12, 8]]
    assert values.shape == (96, 192)
    assert len(values) * 64 <= config.max_pixels


def test_too_few_bytes_are_refused(config):
    """A picture whose bytes do not fill its sides is an error that says how many there are."""
    with pytest.raises(PortError, match="3 bytes"):
        to_patches([Image(height=16, width=16, rgb=base64.b64encode(b"123").decode())], config)
