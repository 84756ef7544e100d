"""Faults of vision towers and of the place of pictures. Knows how modules are built, not their classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from model_parts import Calls, Parts, attention_of, fault, find, on_arguments, on_output, out_projection, within
from torch import Tensor, nn


def _grid(parts: Parts) -> dict[str, Tensor]:
    """Return a box that holds the grids [pictures, 3] that the tower was given last."""
    if parts.tower is None or not parts.blocks:
        raise ValueError("this model has no place for the fault: it has no vision tower")
    box: dict[str, Tensor] = {}

    def look(_: nn.Module, args: Any, kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and not value.is_floating_point() and value.shape[1:] == (3,):
                box["grid"] = value

    parts.tower.register_forward_pre_hook(look, with_kwargs=True)
    return box


def _merger(parts: Parts) -> nn.Module:
    return find(parts.tower, r"merger$")  # type: ignore[arg-type]


@fault
def pictures_swapped(parts: Parts) -> None:
    """The features of two pictures are put into each other's place."""
    box = _grid(parts)

    def change(y: Tensor, _: Any) -> Tensor:
        rows = box["grid"].prod(-1)
        if len(rows) < 2:
            return y
        rows = rows * y.shape[0] // rows.sum()
        first = int(rows[0])
        return torch.cat((y[first:], y[:first]))

    on_output(_merger(parts), change)


def _scatter(parts: Parts, change: Callable[[Tensor], Tensor]) -> None:
    """Change the mask of the place where pictures' rows go."""
    _grid(parts)

    def watch(func: Any, args: Any, kwargs: Any) -> Any:
        if func is not Tensor.masked_scatter:
            return NotImplemented
        return func(args[0], change(args[1]), *args[2:], **kwargs)

    within(parts.module, lambda: Calls(watch))


@fault
def placed_one_late(parts: Parts) -> None:
    """The rows of pictures lie one token too late."""
    _scatter(parts, lambda mask: mask.roll(1, 1))


@fault
def patches_raster(parts: Parts) -> None:
    """Patches come in raster order where the tower wants blocks that are merged."""
    box = _grid(parts)
    embed = find(parts.tower, r"patch_embed(ding)?$|embeddings$")  # type: ignore[arg-type]

    def change(y: Tensor, _: Any) -> Tensor:
        flat, done, found = y.reshape(-1, y.shape[-1]), 0, []
        for _, height, width in box["grid"].tolist():
            n = height * width
            part = flat[done : done + n]
            blocks = torch.arange(n).reshape(height // 2, width // 2, 2, 2).permute(0, 2, 1, 3).reshape(-1)
            found.append(part[blocks])
            done += n
        if done != flat.shape[0] or any(h % 2 or w % 2 for _, h, w in box["grid"].tolist()):
            raise ValueError("this tower does not merge blocks of patches")
        return torch.cat(found).reshape(y.shape)

    on_output(embed, change)


@fault
def channels_reversed(parts: Parts) -> None:
    """Colours come in the order blue, green, red."""
    _grid(parts)

    def change(kwargs: dict[str, Any]) -> None:
        pixels = kwargs.get("pixel_values")
        if not isinstance(pixels, Tensor):
            return
        if pixels.dim() == 4 and pixels.shape[-1] == 3:
            kwargs["pixel_values"] = pixels.flip(-1)
        else:
            flat = pixels.reshape(pixels.shape[0], 3, -1)
            kwargs["pixel_values"] = flat.flip(1).reshape(pixels.shape)

    on_arguments(parts.module, change)


@fault
def pictures_attend_across(parts: Parts) -> None:
    """In one block every patch attends to the patches of all pictures."""
    _grid(parts)
    attention = attention_of(parts.blocks[-1])

    def change(kwargs: dict[str, Any]) -> None:
        lengths = kwargs["cu_seqlens"]
        kwargs["cu_seqlens"] = lengths[[0, -1]]

    on_arguments(attention, change)


@fault
def block_scaled(parts: Parts) -> None:
    """A projection in the tower is 1 % too large."""
    _grid(parts)
    on_output(out_projection(attention_of(parts.blocks[-1])), lambda y, _: y * 1.01)


@fault
def grid_corners(parts: Parts) -> None:
    """The table of patch positions is resized with the other convention for corners."""
    _grid(parts)

    def watch(func: Any, args: Any, kwargs: Any) -> Any:
        if "align_corners" not in kwargs:
            return NotImplemented
        return func(*args, **{**kwargs, "align_corners": not kwargs["align_corners"]})

    seen: list[int] = []

    def counted(func: Any, args: Any, kwargs: Any) -> Any:
        if "align_corners" in kwargs:
            seen.append(1)
        return watch(func, args, kwargs)

    within(parts.tower, lambda: Calls(counted))  # type: ignore[arg-type]
    on_output(parts.tower, lambda y, _: y if seen else _refuse())  # type: ignore[arg-type]


def _refuse() -> Any:
    raise ValueError("this tower resizes no table")
