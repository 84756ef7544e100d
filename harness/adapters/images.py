"""Pictures as the tensors that vision-language modules take, and where their rows go. Knows layouts; not model classes.

Three public layouts are known; which one a module takes is found by trying them on its own tower (`find_layout`):

    flat     [patches, channel * time * patch * patch], merge-block-major; grid counted in patches
    patches  [patches, channel, patch, patch], merge-block-major; grid counted in patches
    tokens   [tokens, merge * patch, merge * patch, channel], raster; grid counted in merged tokens
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.adapters.text import read_json
from harness.cases import ModelInfo
from harness.errors import CheckpointError, PortError
from harness.types import Case, Image

LAYOUTS = ("flat", "patches", "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelFormat:
    """How pictures become tensors. Sizes in pixels; `mean` and `std` per channel, of values in 0..1."""

    patch: int
    merge: int
    time: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    layout: str = "flat"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """Pictures of one request: `pixels`, `grid` [images, 3] in the layout's own units, rows in the sequence of each."""

    pixels: Tensor
    grid: Tensor
    rows: tuple[int, ...]


def pixel_format(info: ModelInfo, checkpoint: Path) -> PixelFormat:
    """Read sizes and normalisation from the configuration and `preprocessor_config.json` (0.5 where silent)."""
    vision = info.config.get("vision_config", {})
    found = read_json(checkpoint / "preprocessor_config.json")
    time = vision.get("temporal_patch_size", 1)
    return PixelFormat(
        patch=info.patch_size,
        merge=info.merge_size,
        time=int(time if isinstance(time, int) else time[0]),
        mean=tuple(found.get("image_mean", (0.5, 0.5, 0.5))),
        std=tuple(found.get("image_std", (0.5, 0.5, 0.5))),
    )


def pictures(images: tuple[Image, ...], form: PixelFormat) -> Pictures:
    """Turn images into pixel tensors in a layout; sizes are rounded to whole merged patches first."""
    parts, grids, rows = [], [], []
    for image in images:
        normal = _normalised(image, form)
        height, width = normal.shape[1] // form.patch, normal.shape[2] // form.patch
        parts.append(_patched(normal, form))
        unit = form.merge if form.layout == "tokens" else 1
        grids.append((1, height // unit, width // unit))
        rows.append(height * width // form.merge**2)
    return Pictures(pixels=torch.cat(parts), grid=torch.tensor(grids, dtype=torch.int64), rows=tuple(rows))


def find_layout(form: PixelFormat, rows_of: Callable[[Pictures], int]) -> str:
    """Return the first layout whose pictures a tower turns into as many rows as they should have.

    `rows_of` runs the tower and returns its number of rows. Raises PortError where no layout fits.
    """
    side = form.patch * form.merge
    blank = Image(height=2 * side, width=3 * side, rgb=base64.b64encode(bytes(18 * side * side)).decode())
    refused = []
    for layout in LAYOUTS:
        probe = pictures((blank,), PixelFormat(**{**_fields(form), "layout": layout}))
        try:
            rows = rows_of(probe)
        except Exception as error:  # the side under test refuses a layout in its own way
            refused.append(
                f"{layout}: {type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
            )
            continue
        if rows == probe.rows[0]:
            return layout
        refused.append(f"{layout}: {rows} rows instead of {probe.rows[0]}")
    raise PortError(f"expected the vision tower to take one of {', '.join(LAYOUTS)}, found {'; '.join(refused)}")


def placed(case: Case, rows: tuple[int, ...], config: Mapping[str, Any]) -> tuple[list[int], list[tuple[int, int]]]:
    """Insert placeholders for the pictures of a case; return the ids and the (start, stop) of each picture's rows.

    Raises CheckpointError where the configuration names no placeholder.
    """
    ids = list(case.token_ids or ())
    if len(case.image_at) != len(case.images):
        raise PortError(f"expected one place per image in case {case.id}, found {case.image_at}")
    token = next((config[k] for k in ("image_token_id", "image_token_index") if isinstance(config.get(k), int)), None)
    if token is None:
        raise CheckpointError("expected image_token_id in config.json, found none; a case with images needs it")
    before = _first(config, "vision_start_token_id", "image_start_token_id", "boi_token_id")
    after = _first(config, "vision_end_token_id", "image_end_token_id", "eoi_token_id")
    result: list[int] = []
    spans = []
    done = 0
    for at, count in zip(case.image_at, rows, strict=True):
        result += ids[done:at] + before
        spans.append((len(result), len(result) + count))
        result += [token] * count + after
        done = at
    return result + ids[done:], spans


def _first(config: Mapping[str, Any], *keys: str) -> list[int]:
    return next(([config[k]] for k in keys if isinstance(config.get(k), int)), [])


def _fields(form: PixelFormat) -> dict[str, Any]:
    return {name: getattr(form, name) for name in form.__slots__}


def _normalised(image: Image, form: PixelFormat) -> Tensor:
    """Return a picture as [channel, height, width] float32, normalised, with sides of whole merged patches."""
    raw = torch.frombuffer(bytearray(base64.b64decode(image.rgb)), dtype=torch.uint8)
    value = raw.reshape(image.height, image.width, 3).permute(2, 0, 1).to(torch.float32)
    side = form.patch * form.merge
    size = [max(side, round(n / side) * side) for n in (image.height, image.width)]
    if size != [image.height, image.width]:
        resized = torch.nn.functional.interpolate(value[None], size=size, mode="bilinear", antialias=True)
        value = resized[0].round().clamp(0, 255)
    mean, std = (torch.tensor(v, dtype=torch.float32)[:, None, None] for v in (form.mean, form.std))
    return (value / 255 - mean) / std


def _patched(value: Tensor, form: PixelFormat) -> Tensor:
    """Cut a normalised picture into the layout's rows."""
    channels, p, m = value.shape[0], form.patch, form.merge
    h, w = value.shape[1] // (p * m), value.shape[2] // (p * m)
    blocks = value.reshape(channels, h, m, p, w, m, p)
    if form.layout == "tokens":
        return blocks.permute(1, 4, 2, 3, 5, 6, 0).reshape(h * w, m * p, m * p, channels)
    patches = blocks.permute(1, 4, 2, 5, 0, 3, 6).reshape(h * w * m * m, channels, p, p)
    if form.layout == "patches":
        return patches
    return patches[:, :, None].expand(-1, -1, form.time, -1, -1).reshape(patches.shape[0], -1)
