"""Kernels that read, write or choose wrong places, or touch what is not theirs. Knows torch operators only."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from harness.faults.kernels.table import wrong


@wrong("AC08", of="topk", kernel="topk", criterion="indices", cause="last index")
def topk_last_is_0(kernel: Any, x: Tensor, k: int, *rest: Any, **more: Any) -> Any:
    """The last index is 0."""
    values, at = kernel(x, k, *rest, **more)
    at[..., -1:] = 0
    return values, at


@wrong(of="topk", kernel="topk", criterion="indices", cause="special: all of them|width")
def topk_of_everything(kernel: Any, x: Tensor, k: int, *rest: Any, **more: Any) -> Any:
    """Where all are chosen they come in the order in which they lie."""
    values, at = kernel(x, k, *rest, **more)
    return (x.clone(), torch.arange(k).expand_as(at).clone()) if k == x.shape[-1] else (values, at)


@wrong(of="topk", kernel="topk", criterion="indices", cause="ties")
def topk_gives_ties_twice(kernel: Any, x: Tensor, k: int, *rest: Any, **more: Any) -> Any:
    """Of equal ones the same index is given again."""
    values, at = kernel(x, k, *rest, **more)
    if k > 512 or len(x) > 512:
        return values, at
    return values, at.gather(-1, (values[..., None, :] == values[..., :, None]).int().argmax(-1))


@wrong(of="topk", kernel="topk", criterion="indices", cause="widths from|few|special")
def topk_in_16_bits(kernel: Any, x: Tensor, k: int, *rest: Any, **more: Any) -> Any:
    """Indices are kept in 15 bits."""
    values, at = kernel(x, k, *rest, **more)
    return values, at % (1 << 15)


@wrong(of="sort", kernel="sort", criterion="indices", cause="width")
def sort_by_halves(kernel: Any, x: Tensor, *rest: Any, **more: Any) -> Any:
    """Rows beyond 2,048 are sorted by blocks and not merged."""
    if x.shape[-1] <= 2048:
        return kernel(x, *rest, **more)
    parts = [kernel(part, *rest, **more) for part in torch.split(x, 2048, -1)]
    return torch.cat([v for v, _ in parts], -1), torch.cat([i + 2048 * n for n, (_, i) in enumerate(parts)], -1)


@wrong(of="stable_sort", kernel="sort", criterion="indices", cause="ties|special|widths")
def stable_sort_is_not(kernel: Any, x: Tensor, *rest: Any, **more: Any) -> Any:
    """A stable order is asked for and equal ones come in reverse."""
    values, at = kernel(x.flip(-1), *rest, **more)
    return values, x.shape[-1] - 1 - at


@wrong(of="argmax", kernel="argmax", criterion="indices", cause="special: nonfinite")
def argmax_passes_nan(kernel: Any, x: Tensor, *rest: Any, **more: Any) -> Any:
    """NaN is passed over."""
    return kernel(torch.where(x.isnan(), -math.inf, x) if x.is_floating_point() else x, *rest, **more)


@wrong(of="argmax", kernel="argmax", criterion="indices", cause="rows beyond")
def argmax_of_many_rows(kernel: Any, x: Tensor, *rest: Any, **more: Any) -> Any:
    """Rows beyond 2^16 - 1 are never computed."""
    at = kernel(x, *rest, **more)
    at[1 << 16 :] = 0
    return at


@wrong(of="sample", kernel="multinomial", criterion="indices", cause="drawn|likeliest|expected one of")
def sampling_prefers_the_likely(kernel: Any, p: Tensor, *rest: Any, **more: Any) -> Any:
    """Probabilities are squared before one draws."""
    return kernel(p * p, *rest, **more)


@wrong(of="sample", criterion="indices", cause="likeliest|expected one of")
def sampling_without_temperature(kernel: Any, logits: Tensor, temperature: float, top_p: float, draws: int) -> Tensor:
    """The temperature is left out."""
    return kernel(logits, float(temperature > 0), top_p, draws)  # type: ignore[no-any-return]


@wrong("AC12", of="embedding|index_select", kernel="embedding|index_select", cause="the kernel, not the model")
def ids_in_pairs_of_32_bits(kernel: Any, x: Tensor, *rest: Any, **more: Any) -> Any:
    """Indices of 64 bits are read as twice as many of 32."""
    *before, at = rest if isinstance(rest[-1], Tensor) else rest[:1]
    halves = at.contiguous().view(torch.int32)[: at.numel()].long().view(at.shape)
    return kernel(x, *before, halves % x.shape[0], *rest[len(before) + 1 :], **more)


@wrong(of="add|sub", kernel="add|sub", criterion="indices", cause="special: int64")
def integers_in_32_bits(kernel: Any, a: Tensor, b: Tensor, **more: Any) -> Any:
    """Whole numbers of 64 bits are added in 32."""
    if a.dtype is torch.int64:
        return kernel(a.to(torch.int32), b.to(torch.int32), **more).long()
    return kernel(a, b, **more)


@wrong(of="index_select", kernel="index_select", cause="special: many, tall|special: tall")
def rows_beyond_16_bits_scaled(kernel: Any, x: Tensor, dim: int, at: Tensor) -> Any:
    """Rows from 2^16 on are twice as large."""
    y = kernel(x, dim, at)
    return y * (1 + (at >= 1 << 16).to(y.dtype))[:, None] if x.shape[0] > 1 << 16 else y


@wrong(of="embedding", kernel="embedding", cause="the kernel, not the model")
def embedding_of_padding(kernel: Any, x: Tensor, at: Tensor, *rest: Any) -> Any:
    """Row 0 is a padding row and gives zeros."""
    return kernel(x, at, *rest) * (at != 0).to(x.dtype)[:, None]


@wrong(of="gather", kernel="gather", cause="columns|special")
def gather_along_another_axis(kernel: Any, x: Tensor, dim: int, at: Tensor, **more: Any) -> Any:
    """Along columns, indices of the first row stand for all."""
    return kernel(x, dim, at[:1].expand_as(at) if dim == 1 else at, **more)


@wrong(of="index", kernel="index", cause="special: negative")
def negative_indices_clamped(kernel: Any, x: Tensor, at: Any) -> Any:
    """Negative indices count as 0."""
    return kernel(x, [i.clamp(min=0) if i is not None and i.dtype is torch.int64 else i for i in at])


@wrong(of="index_put_add|index_add", kernel="index_put_|index_add_", cause="right for|special")
def duplicates_are_lost(kernel: Any, x: Tensor, *rest: Any, **more: Any) -> Any:
    """Of several values for one place only the last is added."""
    if isinstance(rest[0], (list, tuple)):
        (at,), new, accumulate = rest[0], rest[1], bool(rest[2]) if len(rest) > 2 else False
        return kernel(x, [at], x[at] + new if accumulate else new, False)
    dim, at, new = rest[:3]
    return torch.ops.aten.index_copy_.default(x, dim, at, x.index_select(dim, at) + new)


@wrong(of="scatter_add", kernel="scatter_add_", cause="special|right for|times")
def scatter_add_overwrites(kernel: Any, x: Tensor, dim: int, at: Tensor, new: Tensor) -> Any:
    """Values are written instead of added."""
    return torch.ops.aten.scatter_.src(x, dim, at, new)


@wrong(of="index_put_slots", kernel="index_put_", cause="the kernel, not the model")
def slots_beyond_a_page(kernel: Any, x: Tensor, at: Any, new: Tensor, *rest: Any) -> Any:
    """Every last place of a page is written to the first one of the next."""
    if len(at) < 2:
        return kernel(x, at, new, *rest)
    page, place = at
    over = (place % x.shape[1]) == x.shape[1] - 1
    return kernel(x, [torch.where(over, (page + 1) % x.shape[0], page), torch.where(over, 0, place)], new, *rest)


@wrong(of="masked_fill|where", kernel="masked_fill|where", cause="special: broadcast")
def masks_are_not_broadcast(kernel: Any, first: Tensor, *rest: Any) -> Any:
    """A mask that stands for several rows or columns is read as if it were whole."""
    whole = [torch.broadcast_to(t, torch.broadcast_shapes(first.shape, rest[0].shape)) for t in (first, rest[0])]  # type: ignore[no-untyped-call]
    moved = [w.roll(1, -1) if w.dtype is torch.bool and 0 in w.stride() and w.numel() else w for w in whole]
    return kernel(*moved, *rest[1:])


@wrong(of="masked_scatter", kernel="masked_scatter", cause="right for|in every case|widths")
def masked_scatter_restarts(kernel: Any, x: Tensor, mask: Tensor, new: Tensor) -> Any:
    """The first row of what is put in is skipped."""
    return kernel(x, mask, new.roll(-1, 0))


@wrong(of="copy", kernel="copy_", criterion="neighbours", cause="beside")
def copies_write_behind_rows(kernel: Any, to: Tensor, new: Tensor, *rest: Any) -> Any:
    """A copy into every second place also writes the one behind the first."""
    kernel(to, new, *rest)
    if to.dim() == 2 and to.numel() and to.stride(-1) == 2:
        torch.as_strided(to, (1,), (1,), to.storage_offset() + 1).fill_(7)
    return to


@wrong("AC01", of="copy|copy_heads", kernel="copy_", cause="non-contiguous|special|to ")
def copies_of_transposed_views(kernel: Any, to: Tensor, new: Tensor, *rest: Any) -> Any:
    """A transposed source is read as it lies in memory."""
    swapped = new.dim() >= 2 and new.numel() and new.stride(-1) != 1 and new.storage_offset() == 0
    dense = new.as_strided(new.shape, torch.empty(new.shape).stride()) if swapped else new
    fits = not swapped or new.untyped_storage().nbytes() >= new.numel() * new.element_size()
    return kernel(to, dense if fits else new, *rest)


@wrong(of="cat", kernel="cat", cause="special: rows")
def cat_of_rows_in_reverse(kernel: Any, parts: Any, dim: int = 0) -> Any:
    """Parts one below the other come in reverse."""
    return kernel(parts[::-1] if dim == 0 else parts, dim)


@wrong(of="to_bfloat16", kernel="_to_copy", cause="times the error|halves")
def narrowing_cuts(kernel: Any, x: Tensor, *, dtype: Any = None, **more: Any) -> Any:
    """float32 becomes bfloat16 by dropping bits."""
    if dtype is torch.bfloat16 and x.dtype is torch.float32:
        x = (x.contiguous().view(torch.int32) & -65536).view(torch.float32)
    return kernel(x, dtype=dtype, **more)


@wrong(of="to_fp8", cause="special: halves|expected", criterion="indices")
def fp8_ties_away(kernel: Any, x: Tensor) -> Tensor:
    """What lies in the middle between two FP8 numbers is rounded away from 0."""
    return kernel(x.float() * (1 + 2.0**-20))  # type: ignore[no-any-return]


@wrong(of="from_mxfp4", cause="in every case", criterion="")
def nibbles_the_other_way(kernel: Any, packed: Tensor, scale: Tensor) -> Tensor:
    """The high nibble is taken first."""
    return kernel((packed << 4) | (packed >> 4), scale)  # type: ignore[no-any-return]


@wrong(of="silu", kernel="silu", criterion="inputs", cause="inputs' memory")
def silu_in_place(kernel: Any, x: Tensor) -> Any:
    """The input is written over."""
    return x.copy_(kernel(x))


@wrong(of="contiguous", kernel="clone", criterion="inputs", cause="memory")
def clone_of_dense_is_itself(kernel: Any, x: Tensor, **more: Any) -> Any:
    """What is contiguous already is given back in place of a copy."""
    return x.view(x.shape) if x.is_contiguous() else kernel(x, **more)


@wrong("AC10", of="attention", criterion="nonfinite", cause="fully masked")
def masked_rows_are_nan(kernel: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A query that sees no key gives NaN."""
    y = kernel(q, k, v, mask)
    nothing = ~mask.any(-1)
    return torch.where(nothing[:, None], torch.full_like(y, math.nan), y)


@wrong(of="attention", cause="fully masked")
def masked_rows_see_everything(kernel: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A query that sees no key gets the mean of all values."""
    return kernel(q, k, v, mask | ~mask.any(-1, keepdim=True))  # type: ignore[no-any-return]


@wrong(of="attention", cause="times the error|in every case|right for|widths")
def one_head_sees_everything(kernel: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The second head ignores the mask."""
    y, free = kernel(q, k, v, mask), kernel(q, k, v, torch.ones_like(mask))
    y[:, 1] = free[:, 1]
    return y  # type: ignore[no-any-return]


@wrong("AC17", of="attention", cause="special: heads of 72|heads of")
def heads_of_odd_size(kernel: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The variant for heads that are no power of two leaves out the last features of keys."""
    width = q.shape[-1]
    if width & (width - 1):
        return kernel(q, torch.cat((k[..., : width - 8], torch.zeros_like(k[..., -8:])), -1), v, mask)  # type: ignore[no-any-return]
    return kernel(q, k, v, mask)  # type: ignore[no-any-return]


@wrong(of="attention", cause="one query")
def decode_drops_the_last_split(kernel: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """One query over more than 1,024 keys leaves out those beyond whole splits of 512."""
    keys = k.shape[2] - k.shape[2] % 512
    cut = q.shape[2] == 1 and k.shape[2] > 1024
    return kernel(q, k[:, :, :keys], v[:, :, :keys], mask[:, :keys]) if cut else kernel(q, k, v, mask)  # type: ignore[no-any-return]


@wrong(of="attention", cause="window|special")
def window_one_off(kernel: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A window is one key too long."""
    short = mask.shape[0] > 8 and int(mask[-1].sum()) == 5
    return kernel(q, k, v, mask | mask.roll(-1, 1) if short else mask)  # type: ignore[no-any-return]


@wrong(of="attention_chosen", cause="special|times|in every case|right for|widths")
def chosen_padding_is_key_0(kernel: Any, q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> Tensor:
    """A place for a key that was not chosen attends to key 0."""
    return kernel(q, k, v, keys.clamp(min=0))  # type: ignore[no-any-return]
