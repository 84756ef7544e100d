from __future__ import annotations

import base64
import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_impl.backend import BackendAdapter
from accel_impl.config import VisionConfig
from accel_impl.formats import Plain
from accel_impl.held import Held
from accel_impl.parallel import Place
from accel_impl.vision import Tower, fitted, pixels, resized
from harness.adapter import silent
from harness.errors import PortError
from harness.types import Image

CONFIG = VisionConfig(
    patch_size=8, spatial_merge_size=2, depth=3, hidden_size=48, num_heads=3, intermediate_size=112,
    pos_embed_grid=(5, 5), mean=(0.48, 0.46, 0.41), std=(0.27, 0.26, 0.28), layer_norm_eps=1e-6, rope_theta=10000.0,
    deepstack_visual_indexes=(0, 1), min_pixels=512, max_pixels=8192,
)  # fmt: skip
GRIDS = torch.tensor([[1, 4, 10], [1, 6, 2]])
OUT = 160


def image(rgb: torch.Tensor) -> Image:
    return Image(height=rgb.shape[0], width=rgb.shape[1], rgb=base64.b64encode(bytes(rgb.flatten().tolist())).decode())


def noise(height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(height * 1000 + width)
    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(("source", "target"), [((37, 53), (48, 64)), ((200, 130), (64, 48)), ((17, 300), (32, 112))])
def test_resizing_is_the_triangle_filter(source: tuple[int, int], target: tuple[int, int]) -> None:
    """Every byte is that of torch's antialiased bilinear filter in float64, rounded; exact halves may fall up only."""
    rgb = noise(*source)
    wide = rgb.permute(2, 0, 1)[None].double()
    expected = torch.nn.functional.interpolate(wide, size=target, mode="bilinear", antialias=True)[0].permute(1, 2, 0)
    assert float((resized(rgb, *target).double() - expected).abs().max()) < 0.5 + 1e-9
    assert torch.equal(resized(rgb, *source), rgb)


def test_halves_are_rounded_up_exactly() -> None:
    """Each byte is the quotient of whole numbers, halves up: here recomputed in fractions."""
    rgb = noise(9, 1)
    found = resized(rgb, 16, 1)
    for i in range(16):
        weights = [
            max(Fraction(0), 1 - abs(Fraction(2 * j + 1, 2) - Fraction(2 * i + 1, 2) * 9 / 16)) for j in range(9)
        ]
        for c in range(3):
            mean = sum(w * int(rgb[j, 0, c]) for j, w in enumerate(weights)) / sum(weights)
            assert int(found[i, 0, c]) == math.floor(mean + Fraction(1, 2))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((32, 48), (32, 48)), ((40, 56), (32, 64)), ((24, 72), (32, 64)), ((30, 600), (16, 400)), ((5, 5), (32, 32)),
        ((16, 16), (32, 32)), ((1000, 701), (96, 64)), ((256, 256), (80, 80)), ((180, 80), (128, 48)),
    ],
)  # fmt: skip
def test_a_picture_is_fitted_to_whole_blocks(size: tuple[int, int], expected: tuple[int, int]) -> None:
    """Sides are multiples of a merge block, ties to even, and the area keeps its limits where both sides can."""
    assert fitted(*size, CONFIG) == expected


def test_patches_are_in_order_of_merge_blocks() -> None:
    """Row by row each patch holds its own pixels, channel by channel, normalised in the channels' order."""
    rgb = noise(32, 48)
    rows, grids = pixels([image(rgb)], CONFIG)
    assert grids.tolist() == [[1, 4, 6]]
    blocks = [(y, x) for y in range(0, 4, 2) for x in range(0, 6, 2)]
    for number, (y, x) in enumerate((y + dy, x + dx) for y, x in blocks for dy in (0, 1) for dx in (0, 1)):
        patch = rgb[8 * y : 8 * y + 8, 8 * x : 8 * x + 8].float() / 255
        normal = (patch - torch.tensor(CONFIG.mean)) / torch.tensor(CONFIG.std)
        assert torch.equal(rows[number], normal.permute(2, 0, 1).flatten())


def test_a_picture_of_too_few_bytes_is_refused() -> None:
    """Bytes that do not fill the picture are an error that says how many were expected."""
    with pytest.raises(PortError, match="expected 16 x 16 x 3 bytes"):
        pixels([Image(height=16, width=16, rgb=base64.b64encode(b"abc").decode())], CONFIG)


@pytest.fixture(scope="module")
def upstream() -> Any:
    """Give transformers' tower of the same kind, with random weights that are not neutral."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    config = Qwen3VLVisionConfig(
        depth=3, hidden_size=48, intermediate_size=112, num_heads=3, patch_size=8, temporal_patch_size=1,
        out_hidden_size=OUT, num_position_embeddings=25, deepstack_visual_indexes=[0, 1],
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3VLVisionModel(config).float().eval()
    model.interpolation_align_corners = False
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape) * (0.3 if parameter.ndim == 1 else parameter[0].numel() ** -0.5)
            )
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter += 1
    return model


def tower_of(upstream: Any) -> Tower:
    weights = {}
    for name, value in upstream.state_dict().items():
        for old, new in (
            ("patch_embed.proj", "patch_embed"), ("pos_embed.weight", "pos_embed"), ("mlp.linear_fc", "mlp.fc"),
            ("merger.linear_fc", "merger.fc"), ("merger.norm", "norm"), ("deepstack_merger_list", "deepstack"),
            (".linear_fc", ".fc"),
        ):  # fmt: skip
            name = name.replace(old, new)
        value = value.view(5, 5, 48) if name == "pos_embed" else value
        weights[f"visual.{name}"] = Plain(tensor=value[:, :, 0] if value.ndim == 5 else value)
    decoder: Any = SimpleNamespace(vision=CONFIG)
    held = Held(
        config=decoder, weights=weights, place=Place(), use=BackendAdapter(), dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    return Tower(held)


def rows(found: tuple[torch.Tensor, tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    return [found[0], *found[1]]


def test_the_tower_is_upstreams(upstream: Any) -> None:
    """Merged and deepstack rows of two pictures are those of transformers' tower with the same weights."""
    values = torch.randn(52, 192, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = tower_of(upstream)(values, GRIDS, silent)
        expected = upstream(values, grid_thw=GRIDS)
    for actual, wanted in zip(rows(found), [expected.pooler_output, *expected.deepstack_features], strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


def test_pictures_do_not_see_each_other(upstream: Any) -> None:
    """Rows of two pictures together are the rows of each alone, in their order."""
    values = torch.randn(52, 192, generator=torch.Generator().manual_seed(2))
    tower = tower_of(upstream)
    with torch.no_grad():
        together = tower(values, GRIDS, silent)
        alone = [tower(part, grid[None], silent) for part, grid in zip(values.split([40, 12]), GRIDS, strict=True)]
    for both, parts in zip(rows(together), zip(*map(rows, alone), strict=True), strict=True):
        torch.testing.assert_close(both, torch.cat(parts), rtol=1e-5, atol=1e-5)
