"""Faults of vision towers and of the place of pictures. Knows how modules are built, not their classes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from harness.faults.catalogue import NoPlace, fault
from harness.faults.parts import Part, Parts, attention_of, find, find_or_none, out_projection
from harness.faults.ways import Calls, held, on_arguments, on_output, within

Places = list[str]
PICTURE = "picture|image|patch|row|order|position|channel"


def _grid(parts: Parts) -> dict[str, Tensor]:
    """Return a box that holds the grids [pictures, 3] that the tower was given last."""
    if parts.tower is None or not parts.blocks:
        raise NoPlace("this model has no vision tower")
    box: dict[str, Tensor] = {}

    def look(_: Part, args: Any, kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and not value.is_floating_point() and value.shape[1:] == (3,):
                box["grid"] = value

    parts.tower.register_forward_pre_hook(look, with_kwargs=True)
    return box


def _merger(parts: Parts) -> Part:
    return find(parts.tower, r"merger$")


@fault("IM09", stage="image", cause=PICTURE, needs="a vision tower")
def pictures_swapped(parts: Parts) -> Places:
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
    return [parts.tap(_merger(parts)), "merged"]


def _scatter(parts: Parts, change: Callable[[Tensor], Tensor]) -> None:
    """Change the mask of the place where pictures' rows go."""
    _grid(parts)

    def watch(func: Any, args: Any, kwargs: Any) -> Any:
        if func is not Tensor.masked_scatter:
            return NotImplemented
        return func(args[0], change(args[1]), *args[2:], **kwargs)

    within(parts.module, lambda: Calls(watch))


@fault(stage="image", cause=PICTURE, needs="a vision tower")
def placed_one_late(parts: Parts) -> Places:
    """The rows of pictures lie one token too late."""
    _scatter(parts, lambda mask: mask.roll(1, 1))
    return ["merged"]


@fault("IM03", stage="image", cause=PICTURE, needs="a tower that merges blocks of patches")
def patches_raster(parts: Parts) -> Places:
    """Patches come in raster order where the tower wants blocks that are merged."""
    box = _grid(parts)
    embed = find(parts.tower, r"patch_embed(ding)?$|embeddings$")

    def change(y: Tensor, _: Any) -> Tensor:
        flat, done, found = y.reshape(-1, y.shape[-1]), 0, []
        for _, height, width in box["grid"].tolist():
            n = height * width
            if height % 2 or width % 2 or done + n > flat.shape[0]:
                raise NoPlace("this tower does not merge blocks of patches")
            part = flat[done : done + n]
            blocks = torch.arange(n).reshape(height // 2, width // 2, 2, 2).permute(0, 2, 1, 3).reshape(-1)
            found.append(part[blocks])
            done += n
        if done != flat.shape[0]:
            raise NoPlace("this tower does not merge blocks of patches")
        return torch.cat(found).reshape(y.shape)

    on_output(embed, change)
    return [parts.tap(embed), parts.tap(embed, ".*"), "vision.pos_embed", "vision.patch_embed*"]


@fault("IM06", stage="image", cause=PICTURE, needs="a vision tower")
def channels_reversed(parts: Parts) -> Places:
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
    return ["inputs.pixel_values", "vision.patch_embed*", "vision.pixels", parts.tap(parts.tower) + ".patch*"]


@fault(
    "IM13", stage="image", cause="mask|picture|off|wrong|attention|core", needs="a tower with bounds between pictures"
)
def pictures_attend_across(parts: Parts) -> Places:
    """In one block every patch attends to the patches of all pictures."""
    _grid(parts)
    attention = attention_of(parts.blocks[-1])

    def change(kwargs: dict[str, Any]) -> None:
        lengths = kwargs["cu_seqlens"]
        kwargs["cu_seqlens"] = lengths[[0, -1]]

    on_arguments(attention, change)
    return [parts.tap(attention), parts.tap(attention, ".*"), parts.tap(parts.blocks[-1])]


@fault(stage="image", cause="off|wrong|projection|scale|times", needs="a vision tower")
def block_scaled(parts: Parts) -> Places:
    """A projection in the tower is 1 % too large."""
    _grid(parts)
    part = out_projection(attention_of(parts.blocks[-1]))
    on_output(part, lambda y, _: y * 1.01)
    return [parts.tap(part), parts.tap(attention_of(parts.blocks[-1]))]


@fault("IM01", stage="image", cause="position table|resizing|patch", needs="a table of positions that is resized")
def grid_corners(parts: Parts) -> Places:
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

    within(parts.tower, lambda: Calls(counted))
    on_output(parts.tower, lambda y, _: y if seen else _refuse())
    return ["vision.pos_embed*", "vision.patch_embed*", "vision.in*", parts.tap(parts.blocks[0], ".in*")]


def _refuse() -> Any:
    raise NoPlace("this tower resizes no table")


@fault("IM08", stage="image", cause=PICTURE + "|rotary", needs="positions of several axes for pictures")
def pictures_in_line(parts: Parts) -> Places:
    """Tokens of pictures get positions in one line instead of time, height and width."""
    _grid(parts)
    rotary = parts.rotary()

    def change(kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("position_ids")
        if ids is None or ids.dim() != 3:
            return
        kwargs["position_ids"] = torch.arange(ids.shape[-1])[None, None].expand_as(ids)

    on_arguments(parts.module, change)
    return [parts.tap(rotary), parts.tap(rotary, ".*"), "inputs.position_ids"]


@fault(stage="image", cause="position|patch|off|wrong|table", needs="a table of patch positions")
def patch_positions_lost(parts: Parts) -> Places:
    """Patches get no learned position."""
    _grid(parts)
    table = find_or_none(parts.tower, r"pos(ition)?_embed(ding)?$")
    if table is None:
        raise NoPlace("this tower has no table of positions")
    on_output(table, lambda y, _: torch.zeros_like(y))
    return [parts.tap(table), parts.tap(table, ".*"), "vision.pos_embed*", "vision.patch_embed*",
            parts.tap(parts.blocks[0], ".in*")]  # fmt: skip


@fault(stage="image", cause="rotary|rope|core|attention|off|wrong", needs="rotary tables in the tower")
def tower_rope_base(parts: Parts) -> Places:
    """One block of the tower rotates by other angles."""
    _grid(parts)
    attention = attention_of(parts.blocks[-1])

    def change(kwargs: dict[str, Any]) -> None:
        tables = kwargs.get("position_embeddings")
        if tables is None:
            raise NoPlace("this tower has no rotary table")
        kwargs["position_embeddings"] = tuple(t.roll(1, 0) for t in tables)

    on_arguments(attention, change)
    return [parts.tap(attention, ".in.position_embeddings*"), parts.tap(attention), parts.tap(attention, ".*")]


@fault(stage="image", cause="scale|times|softmax|core|attention|off|wrong", needs="a vision tower")
def tower_scale(parts: Parts) -> Places:
    """The softmax scale of one block of the tower is 10 % off."""
    _grid(parts)
    attention = attention_of(parts.blocks[-1])
    name = next((n for n in ("scaling", "scale") if isinstance(getattr(attention, n, None), float)), None)
    if name is None:
        raise NoPlace("this tower's attention has no scale of its own")
    setattr(attention, name, getattr(attention, name) * 1.1)
    return [parts.tap(attention), parts.tap(attention, ".*")]


@fault(stage="image", cause="merger|activation|order|off|wrong", needs="a merger with an activation")
def merger_activation(parts: Parts) -> Places:
    """The merger has another activation."""
    _grid(parts)
    merger = _merger(parts)
    name = next((n for n, _ in merger.named_children() if re.search(r"act", n)), None)
    if name is None:
        raise NoPlace("this merger has no activation")
    setattr(merger, name, nn.ReLU())
    return [parts.tap(merger), parts.tap(merger, ".*")]


@fault(stage="image", cause="merger|order|row|off|wrong", needs="a tower that merges blocks of patches")
def merger_columns_first(parts: Parts) -> Places:
    """Inside a merged block, patches are joined column by column instead of row by row."""
    _grid(parts)
    joining = [m for _, m in parts.tower.named_modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (2, 2)]
    if joining:
        within(joining[-1], lambda: held(joining[-1].weight, joining[-1].weight.data.transpose(-1, -2)))
        return [parts.tap(joining[-1]), parts.tap(joining[-1], ".*")]
    merger = _merger(parts)

    def change(_: Part, args: Any) -> Any:
        x = args[0]
        if x.dim() != 2 or x.shape[0] % 4:
            raise NoPlace("this merger is not given patches one by one")
        return (x.unflatten(0, (-1, 2, 2)).transpose(1, 2).flatten(0, 2), *args[1:])

    merger.register_forward_pre_hook(change)
    return [parts.tap(merger), parts.tap(merger, ".*"), "vision.norm"]


@fault(stage="image", cause="layers|off|wrong|glue|mid|row|zero", needs="features of the tower in several layers")
def deep_features_lost(parts: Parts) -> Places:
    """What inner blocks of the tower give to the first layers of the decoder is left out."""
    _grid(parts)
    mergers = [m for p, m in parts.tower.named_modules() if re.search(r"deepstack_merger_list\.\d+$", p)]
    if not mergers:
        raise NoPlace("this tower gives features once")
    for merger in mergers:
        on_output(merger, lambda y, _: torch.zeros_like(y))
    return [*(parts.tap(m) for m in mergers), *(parts.tap(m, ".*") for m in mergers), "layers.0", "layers.0.in*"]


@fault(stage="image", cause=PICTURE + "|normalisation", needs="a vision tower")
def pixels_normalised_otherwise(parts: Parts) -> Places:
    """Pixels are divided by a deviation that is 2 % too small."""
    _grid(parts)

    def change(kwargs: dict[str, Any]) -> None:
        if isinstance(kwargs.get("pixel_values"), Tensor):
            kwargs["pixel_values"] = kwargs["pixel_values"] * 1.02

    on_arguments(parts.module, change)
    return ["inputs.pixel_values", "vision.patch_embed*", "vision.pixels", parts.tap(parts.tower) + ".patch*"]
