"""Pictures become rows in the order that towers expect."""

from __future__ import annotations

import base64

import pytest
import torch

from harness.adapters.images import PixelFormat, find_layout, pictures, placed
from harness.errors import PortError
from harness.types import Case, Image

FORM = PixelFormat(patch=2, merge=2, time=2, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def image(height: int, width: int) -> Image:
    values = bytes((7 * i) % 256 for i in range(height * width * 3))
    return Image(height=height, width=width, rgb=base64.b64encode(values).decode())


def test_flat_rows_are_merge_block_major() -> None:
    """Row 4 b + 2 i + j of a picture is patch (i, j) of merge block b, channel first, repeated over time."""
    picture = image(8, 12)
    raw = torch.tensor(list(base64.b64decode(picture.rgb))).reshape(8, 12, 3).float() / 127.5 - 1
    shown = pictures((picture,), FORM)
    assert shown.grid.tolist() == [[1, 4, 6]]
    assert shown.rows == (6,)
    for block, i, j in ((0, 0, 1), (1, 1, 0), (4, 1, 1)):
        y, x = 2 * (2 * (block // 3) + i), 2 * (2 * (block % 3) + j)
        patch = raw[y : y + 2, x : x + 2].permute(2, 0, 1)
        row = shown.pixels[4 * block + 2 * i + j].reshape(3, 2, 2, 2)
        assert torch.allclose(row[:, 0], patch, atol=1e-6)
        assert torch.equal(row[:, 0], row[:, 1])


def test_sizes_become_whole_merged_patches() -> None:
    """A picture whose sides are no multiple of patch times merge is resized to the nearest that are."""
    assert pictures((image(9, 5), image(4, 13)), FORM).grid.tolist() == [[1, 4, 2], [1, 2, 6]]


def test_layout_is_found_by_asking() -> None:
    """The first layout that gives the right number of rows is taken; a tower that refuses all is quoted."""

    def takes_blocks(shown):
        if shown.pixels.dim() != 4 or shown.pixels.shape[-1] != 3:
            raise ValueError("not these")
        return int(shown.grid.prod(-1).sum())

    assert find_layout(FORM, takes_blocks) == "tokens"
    with pytest.raises(PortError, match="5 rows instead of 6"):
        find_layout(FORM, lambda shown: 5)


def test_placeholders() -> None:
    """Each picture's rows stand where the case says, between the start and end tokens of the configuration."""
    case = Case(id="c", token_ids=(1, 2, 3), images=(image(4, 4), image(4, 4)), image_at=(1, 3))
    config = {"image_token_id": 9, "vision_start_token_id": 7, "vision_end_token_id": 8}
    ids, spans = placed(case, (2, 1), config)
    assert ids == [1, 7, 9, 9, 8, 2, 3, 7, 9, 8]
    assert spans == [(2, 4), (8, 9)]
