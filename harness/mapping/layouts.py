"""Which columns of recorded tensors a tap's columns are, as an expression. Knows matrices of rows only."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

CORRELATION = 0.95
"""Least correlation over tokens of a column and the same column in another precision. Source: free bf16 runs of small
random models read 0.99 and more; two different columns of 61 tokens exceed 0.6 in one of a million."""
SHARE = 0.9
_FIRST, _SAMPLED, _SOURCES, _PIECES, _TAKEN = 12, 48, 4, 64, 256


class Seen(Protocol):
    """A recorded tensor as rows [T, E], and the expression that makes them."""

    @property
    def source(self) -> str:
        """The tensor's name."""

    @property
    def expr(self) -> str:
        """What makes the rows of it."""

    @property
    def rows(self) -> Tensor:
        """The rows [T, E]."""

    @property
    def units(self) -> Tensor:
        """The rows, columns centred and of unit length."""

    @property
    def batch(self) -> bool:
        """Whether the expression keeps a batch of one in front of the rows."""


def layouts(target: Tensor, views: Sequence[Seen], *, alike: Callable[[str], float]) -> Iterator[tuple[str, str, bool]]:
    """Yield (source, expression, batch) for what a target [T, E] may be of the columns of views, likeliest first."""
    usable = [v for v in views if v.rows.is_floating_point() and v.rows.shape[1] > 1]
    if not target.is_floating_point() or not usable:
        return
    chosen = _sources(target, usable, alike)
    if not chosen:
        return
    columns = _best(target, torch.cat([v.units for v in chosen], dim=1))
    if columns is None:
        return
    first = chosen[0]
    if len(chosen) == 1:
        yield from ((first.source, text, first.batch) for text in _within(first.expr, columns, first.rows.shape[1]))
    yield first.source, _pieced(chosen, columns), all(v.batch for v in chosen)


def unit_columns(rows: Tensor) -> Tensor:
    """Return columns centred, of unit length; constant ones are zero."""
    wide = torch.nan_to_num(rows.float(), nan=0.0, posinf=0.0, neginf=0.0)
    wide = wide - wide.mean(dim=0)
    length: Tensor = wide.norm(dim=0)
    return wide / length.clamp(min=1e-12)


def _sources(target: Tensor, views: Sequence[Seen], alike: Callable[[str], float]) -> list[Seen]:
    """Return the views that sampled columns of the target are found in, in the order of their columns."""
    places = torch.linspace(0, target.shape[1] - 1, min(_SAMPLED, target.shape[1])).long()
    wanted = unit_columns(target[:, places])
    few = wanted[:, :: max(1, len(places) // _FIRST)]
    views = [v for v in views if float((few.T @ v.units).max()) >= CORRELATION]
    if not views:
        return []
    scores = torch.stack([(wanted.T @ v.units).max(dim=1).values for v in views])
    names = torch.tensor([[alike(v.source)] for v in views])
    best = scores.max(dim=0).values
    if float((best >= CORRELATION).float().mean()) < SHARE:
        return []
    near = scores >= best - 0.002  # the same values under several names: the likeliest name
    owner = torch.where(near, names.expand_as(scores), -1.0).argmax(dim=0)[best >= CORRELATION]
    first: dict[int, int] = {}
    for place, number in enumerate(owner.tolist()):
        first.setdefault(number, place)
    counts = torch.bincount(owner, minlength=len(views))
    kept = [n for n in first if int(counts[n]) * 12 >= len(owner)]
    return [views[n] for n in kept[:_SOURCES]]


def _best(target: Tensor, units: Tensor) -> list[int] | None:
    """Return for each column of the target the column of `units` that it is, or None where too few are found."""
    score, columns = (unit_columns(target).T @ units).max(dim=1)
    if float((score >= CORRELATION).float().mean()) < SHARE:
        return None
    return [int(c) for c in columns]


def _within(expr: str, columns: Sequence[int], width: int) -> Iterator[str]:
    """Yield what columns of one tensor may be: a range of it, halves and pairs exchanged, blocks in another order."""
    size = len(columns)
    starts = [c - i for i, c in enumerate(columns)]
    start = max(set(starts), key=starts.count)
    if starts.count(start) >= SHARE * size and 0 <= start <= width - size:
        yield expr if size == width else _slice(expr, start, start + size)
    low = min(columns)
    inner = expr if size == width else _slice(expr, low, low + size)
    local = [c - low for c in columns]
    for heads in [h for h in range(1, size // 2 + 1) if size % (2 * h) == 0]:
        half = size // heads // 2
        pairs = [h * 2 * half + 2 * i + k for h in range(heads) for k in range(2) for i in range(half)]
        turns = [h * 2 * half + k * half + i for h in range(heads) for i in range(half) for k in range(2)]
        for name, order in (("halves", pairs), ("interleave", turns)):
            if order != list(range(size)) and _same(local, order) >= SHARE:
                yield f"{name}({inner}, heads={heads})"
    yield from _reordered(inner, local)


def _reordered(expr: str, columns: Sequence[int]) -> Iterator[str]:
    """Yield the largest equal blocks whose order gives the columns."""
    size = len(columns)
    for block in [size // n for n in range(2, _PIECES + 1) if size % n == 0 and size // n > 1]:
        order = []
        for at in range(0, size, block):
            starts = [columns[at + i] - i for i in range(block)]
            order.append(max(set(starts), key=starts.count))
        numbers = [s // block for s in order]
        if sorted(numbers) == list(range(size // block)) and all(s % block == 0 for s in order):
            whole = [n * block + i for n in numbers for i in range(block)]
            if _same(columns, whole) >= SHARE:
                yield f"blocks({expr}, {numbers})"
                return


def _same(found: Sequence[int], order: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(found, order, strict=True)) / len(order)


def _slice(expr: str, start: int, stop: int) -> str:
    return f"{f'({expr})' if ' + ' in expr else expr}[..., {start}:{stop}]"


def _pieced(chosen: Sequence[Seen], columns: Sequence[int]) -> str:
    """Return the columns as a concatenation of ranges of their tensors, or as a list where there are too many."""
    edges = [0]
    for view in chosen:
        edges.append(edges[-1] + view.rows.shape[1])
    pieces: list[tuple[int, int, int]] = []
    for column in columns:
        owner = next(i for i, edge in enumerate(edges[1:]) if column < edge)
        local = column - edges[owner]
        if pieces and pieces[-1][0] == owner and pieces[-1][2] == local:
            pieces[-1] = (owner, pieces[-1][1], local + 1)
        else:
            pieces.append((owner, local, local + 1))
    first = chosen[0].source
    uneven = len({v.batch for v in chosen}) > 1
    texts = [_named(v, first) for v in chosen]
    texts = [f"squeeze({t}, 0)" if uneven and v.batch else t for t, v in zip(texts, chosen, strict=True)]
    if len(pieces) > _PIECES:
        whole = texts[0] if len(texts) == 1 else f"cat({', '.join(texts)}, axis=-1)"
        return f"take({whole}, {list(columns)}, axis=-1)" if len(columns) <= _TAKEN else whole
    parts = [
        texts[o] if (a, b) == (0, chosen[o].rows.shape[1]) else _slice(texts[o], a, b) for o, a, b in pieces
    ]  # fmt: skip
    return parts[0] if len(parts) == 1 else f"cat({', '.join(parts)}, axis=-1)"


def _named(view: Seen, first: str) -> str:
    """Return a view's expression with its tensors by name, where it is not the row's own tensor."""
    if view.source == first:
        return view.expr

    def name(match: re.Match[str]) -> str:
        return f'tap("{view.source}{f".out.{match[1]}" if match[1] not in (None, "0") else ""}")'

    return re.sub(r"\bout\b(?:\[(\d+)\])?", name, view.expr)
