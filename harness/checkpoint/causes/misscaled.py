"""The known mistakes with scales: what they are worth, which block they belong to, one more factor for the whole.

As in `misread`, each is a change of a weight written out by place. No tensor in memory, no names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.checkpoint.causes.misread import Mistake
from harness.checkpoint.causes.stored import Grid, Stored

_SLICES = (2, 3, 4, 8, 16)
"""Ranks that a weight is commonly cut over."""
_SIZES = (16, 32, 64, 128, 256)


def misread_scales(stored: Stored) -> Iterator[Mistake]:
    """Yield the mistakes with scales, the simplest first."""
    if _exponents(stored) or stored.scale.dtype in (torch.uint8, torch.int8):
        yield from _exponent_bytes(stored)
    yield from _amounts(stored)
    yield from _overall(stored)
    yield from _exchanged(stored)
    yield from _other_blocks(stored)
    yield from _cut(stored)


def _exponents(stored: Stored) -> bool:
    return str(stored.scale.dtype).endswith("e8m0fnu")


def _worth(words: str, make: Callable[[Tensor], Tensor]) -> Mistake:
    """Return a mistake with what factors are worth, whichever block they are of."""

    def change(s: Stored) -> Stored:
        return dataclasses.replace(s, grid=dataclasses.replace(s.grid, values=make(s.grid.values)))

    return Mistake(part="scales", words=words, change=change)


def _given(table: Tensor, _: Tensor) -> Tensor:
    return table


def _exponent_bytes(stored: Stored) -> Iterator[Mistake]:
    raw = stored.scale.contiguous().view(torch.uint8).reshape(stored.grid.values.shape)
    yield _worth("every exponent off by one: bias 128 where it is 127 (each scale half)", lambda v: v * 0.5)
    yield _worth("every exponent off by one: bias 126 where it is 127 (each scale double)", lambda v: v * 2.0)
    for words, table in (
        ("each scale byte read as a number (not as an exponent of two)", raw.float()),
        ("each scale byte less 127 read as a number", raw.float() - 127),
        ("each scale byte read as a signed number", raw.view(torch.int8).float()),
        ("each scale byte read as e4m3", raw.view(torch.float8_e4m3fn).float()),
        ("the bias of the exponents not subtracted", torch.exp2(raw.double()).float()),
    ):
        yield _worth(words, partial(_given, table))


def _amounts(stored: Stored) -> Iterator[Mistake]:
    yield _worth("the reciprocal of each scale (divided where it must be multiplied)", lambda v: 1 / v)
    yield _worth("no scale (a missing scale taken as 1)", torch.ones_like)
    yield _worth("each scale applied twice", lambda v: v * v)
    if stored.scale.element_size() > 1:
        yield _worth("each scale half as large", lambda v: v * 0.5)
        yield _worth("each scale twice as large", lambda v: v * 2.0)
    yield _worth("each scale's sign lost", torch.abs)
    if not _exponents(stored) and stored.scale.is_floating_point():
        yield _worth("each scale rounded to the nearest power of two", partial(_power, torch.round))
        yield _worth("each scale rounded down to a power of two", partial(_power, torch.floor))
        yield _worth("each scale rounded up to a power of two", partial(_power, torch.ceil))
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float8_e4m3fn, "e4m3")):
        yield _worth(f"each scale rounded to {name}", partial(_through, dtype))


def _through(dtype: torch.dtype, value: Tensor) -> Tensor:
    return value.to(dtype).to(torch.float32)


def _power(way: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    return torch.where(value > 0, torch.exp2(way(torch.log2(value.clamp(min=1e-45).double()))).float(), value)


def _overall(stored: Stored) -> Iterator[Mistake]:
    if stored.overall is None:
        return

    def overall(words: str, make: Callable[[Tensor], Tensor | None]) -> Mistake:
        def change(s: Stored) -> Stored:
            assert s.overall is not None
            return dataclasses.replace(s, overall=make(s.overall))

        return Mistake(part="overall", words=words, change=change)

    turned = "a multiplier here, used as a divisor" if stored.version.endswith("multiplier") else ""
    turned = turned or "a divisor here, used as a multiplier"
    yield overall("its global scale dropped", lambda _: None)
    yield overall(f"its global scale inverted ({turned})", lambda v: 1 / v)
    yield overall("its global scale applied twice", lambda v: v * v)
    yield overall("its global scale divided away twice", lambda v: 1 / (v * v))
    if stored.matrices > 1:
        yield overall("the first matrix's global scale for all", lambda v: v[:1].expand(len(v)))
        yield overall("the largest global scale for all", lambda v: v.max().expand(len(v)))
        yield overall("the smallest global scale for all", lambda v: v.min().expand(len(v)))


def _grid(words: str, make: Callable[..., Tensor], *given: Any) -> Mistake:
    """Return a mistake with which factor belongs to which block. make: [matrices, Gr, Gc], given -> the same shape."""

    def change(s: Stored) -> Stored:
        matrices = s.scale.shape[0]
        values = s.grid.values.reshape(matrices, -1, s.grid.values.shape[-1])
        return dataclasses.replace(
            s, grid=dataclasses.replace(s.grid, values=make(values, *given).reshape(s.grid.values.shape))
        )

    return Mistake(part="scales", words=words, change=change)


def _exchanged(stored: Stored) -> Iterator[Mistake]:
    _, high, wide = stored.scale.shape
    if stored.scale.numel() == 1:
        return
    if high > 1 and wide > 1:
        if high == wide:
            yield _grid("the scale grid transposed", lambda v: v.transpose(1, 2))
        else:
            words = "the scale grid transposed: read with its axes exchanged"
            yield _grid(words, lambda v: v.reshape(-1, wide, high).transpose(1, 2))
            yield _grid(words, lambda v: v.transpose(1, 2).reshape(-1, high, wide))
            yield _grid("the scale grid transposed, and cut to fit", _cut_transposed)
            yield _grid("the scale grid transposed, and repeated to fit", _repeated_transposed)
    for axis, size, what in (
        (2, wide, "block of columns"),
        (1, high, "block of rows" if stored.block[0] > 1 else "row"),
    ):
        if size > 1:
            yield _grid(f"the scales of the next {what} (shifted by one)", _shifted, -1, axis)
            yield _grid(f"the scales of the {what} before (shifted by one)", _shifted, 1, axis)
            yield _grid(f"the scales of the next {what} (rolled by one)", torch.roll, -1, axis)
            yield _grid(f"the scales of the {what} before (rolled by one)", torch.roll, 1, axis)
            yield _grid(f"the scales of each {what} in reversed order", torch.flip, (axis,))
            yield _grid(f"the scale of the first {what} for all", _first_for_all, axis)
    yield _grid("one scale for the whole (its first)", lambda v: v.flatten()[:1].reshape(1, 1, 1).expand_as(v))
    yield _grid("one scale for the whole (its largest)", lambda v: v.max().reshape(1, 1, 1).expand_as(v))
    if wide > 1:
        yield _grid("one scale a row (its largest)", lambda v: v.amax(2, keepdim=True).expand_as(v))
        yield _grid("one scale a row (their mean)", lambda v: v.mean(2, keepdim=True).expand_as(v))
    if stored.scale.shape[0] > 1:
        yield _grid("the first matrix's scales for all", lambda v: v[:1].expand_as(v))
        yield _grid("the next matrix's scales (experts off by one)", lambda v: v.roll(-1, 0))
        yield _grid("the scales of the matrix before (experts off by one)", lambda v: v.roll(1, 0))


def _first_for_all(value: Tensor, axis: int) -> Tensor:
    return value.narrow(axis, 0, 1).expand_as(value)


def _shifted(value: Tensor, by: int, axis: int) -> Tensor:
    """Shift without coming in at the other end: the last stays."""
    size = value.shape[axis]
    return value.index_select(axis, (torch.arange(size) - by).clamp(0, size - 1))


def _cut_transposed(value: Tensor) -> Tensor:
    _, high, wide = value.shape
    turned = value.transpose(1, 2)
    rows, columns = torch.arange(high).clamp(max=wide - 1), torch.arange(wide).clamp(max=high - 1)
    return turned.index_select(1, rows).index_select(2, columns)


def _repeated_transposed(value: Tensor) -> Tensor:
    _, high, wide = value.shape
    turned = value.transpose(1, 2)
    return turned.index_select(1, torch.arange(high) % wide).index_select(2, torch.arange(wide) % high)


def _placed(words: str, row: Tensor, column: Tensor) -> Mistake:
    """Return a mistake with where blocks begin and end; zero points go with their scales."""

    def change(s: Stored) -> Stored:
        zeros = None if s.zeros is None else Grid(values=s.zeros.values, row=row, column=column)
        return dataclasses.replace(s, grid=Grid(values=s.grid.values, row=row, column=column), zeros=zeros)

    return Mistake(part="blocks", words=words, change=change)


def _other_blocks(stored: Stored) -> Iterator[Mistake]:
    """Yield blocks of another size: from the shape, or of another format; and a group index that is not looked at."""
    matrices, high, wide = stored.scale.shape
    each = stored.shape[0] // stored.matrices
    grid, offset = stored.grid, torch.arange(stored.matrices).repeat_interleave(each) * high
    plain = (torch.arange(stored.shape[1]) // stored.block[1]).clamp(max=wide - 1)
    if not torch.equal(plain, grid.column):
        yield _placed("its group index ignored (g_idx)", grid.row, plain)
    for axis, size, count, own in ((0, each, high, stored.block[0]), (1, stored.shape[1], wide, stored.block[1])):
        if count < 2 or matrices != stored.matrices:
            continue
        from_shape = {size // count, -(-size // count)} - {0, own}
        for other in [*sorted(from_shape), *(s for s in _SIZES if s != own and s not in from_shape)]:
            at = (torch.arange(size) // other).clamp(max=count - 1)
            why = " (block size taken from the shape)" if other in from_shape else f" instead of {own}"
            what = "rows" if axis == 0 else "columns"
            row = at.repeat(stored.matrices) + offset if axis == 0 else grid.row
            yield _placed(f"blocks of {other} {what}{why}", row, at if axis else grid.column)
    if stored.kind != "float8" or min(high, wide) < 2:
        return
    row, column = (
        (torch.arange(n) // max(1, n // c)).clamp(max=c - 1) for n, c in ((each, high), (stored.shape[1], wide))
    )
    yield _placed(
        f"blocks of {each // high} by {stored.shape[1] // wide} (block size taken from the shape)",
        row.repeat(stored.matrices) + offset, column,
    )  # fmt: skip


def _cut(stored: Stored) -> Iterator[Mistake]:
    """Yield scales that were not cut as the codes were, over ranks along either axis."""
    _, high, wide = stored.scale.shape
    each, columns, grid = stored.shape[0] // stored.matrices, stored.shape[1], stored.grid
    offset = torch.arange(stored.matrices).repeat_interleave(each) * high
    for ranks in _SLICES:
        for axis, size, count, block in ((0, each, high, stored.block[0]), (1, columns, wide, stored.block[1])):
            if count < 2 or size % ranks or stored.scale.shape[0] != stored.matrices:
                continue
            local, rank = torch.arange(size) % (size // ranks), torch.arange(size) // (size // ranks)
            what = f"{ranks} slices of {'rows' if axis == 0 else 'columns'}"
            ways = {f"the scales of the first of {what} for each (scales not cut with the weight)": local // block}
            if size // ranks % block:
                start = rank * (size // ranks) // block
                share = rank * -(-count // ranks)
                words = f"blocks counted anew in each of {what} (cut through a block)"
                ways[words] = start + local // block
                ways[words + ", scales shared out evenly"] = share + local // block
            for words, at in ways.items():
                at = at.clamp(max=count - 1)
                row = at.repeat(stored.matrices) + offset if axis == 0 else grid.row
                yield _placed(words, row, at if axis else grid.column)
