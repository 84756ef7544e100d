"""What an order of rows is, in words: halves exchanged, pairs for halves, shifted, reversed. Knows numbers alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harness.checkpoint.rows import Hashes, Ints

ROTARY = "the other rotary layout, or gate and up joined otherwise"
_WAYS = (2, 3, 4)


def positions(held: Hashes, expected: Hashes) -> Ints:
    """Return for each row in memory the number of the expected row that it is, -1 for none; of equal ones the own."""
    order = np.argsort(expected, kind="stable")
    at = np.searchsorted(expected[order], held).clip(max=max(0, len(expected) - 1))
    found = np.where(expected[order][at] == held, order[at], -1)
    here = held == expected if len(held) == len(expected) else np.zeros(len(held), dtype=bool)
    return np.where(here, np.arange(len(held)), found).astype(np.int64)


def order_words(source: Ints, what: str = "rows") -> str:
    """Return what an order is, in words after "the checkpoint's values with"; "" if it is the right one, or none.

    `source[i]` is the row that stands at i, -1 for a row that is none of them.
    """
    count, known = len(source), source >= 0
    in_place = (source == np.arange(count)) | ~known
    if count < 2 or known.sum() * 10 < 9 * count or bool(in_place.all()):
        return ""
    if known.all() and len(np.unique(source)) == count:
        return _bijection(source, what)
    by = np.unique((source - np.arange(count))[known])
    if len(by) == 1:
        return f"{what} shifted by {abs(int(by[0]))}: {_which(int(by[0]), what)}"
    kinds = len(np.unique(source[known]))
    if kinds * 2 <= count:
        return f"{what} taken more than once: {kinds} of {count} are there at all"
    return f"{what} in another order, some taken twice"


def _which(by: int, what: str) -> str:
    return f"each place has {what[:-1]} i{by:+d}"


def _bijection(source: Ints, what: str) -> str:
    count, own = len(source), np.arange(len(source))
    moved = np.flatnonzero(source != own)
    if len(moved) == 2:
        return f"{what} {moved[0]} and {moved[1]} exchanged"
    if bool((source == own[::-1]).all()):
        return f"{what} in reversed order"
    by = int(source[0])
    if 2 * by != count and bool((source == np.roll(own, -by)).all()):
        return f"{what} shifted by {min(by, count - by)}, those at the end coming in again at the start"
    size = _period(source)
    return _within(source[:size], count // size, what) or _blocks(source, what) or f"{what} in another order"


def _period(source: Ints) -> int:
    """Return the size of the smallest equal blocks that are each permuted alike within themselves."""
    count = len(source)
    for size in _divisors(count):
        blocks = source.reshape(-1, size) - np.arange(0, count, size)[:, None]
        if size > 1 and bool((blocks == blocks[0]).all()) and bool((np.sort(blocks[0]) == np.arange(size)).all()):
            return size
    return count


def _divisors(count: int) -> list[int]:
    small = [i for i in range(1, int(count**0.5) + 1) if count % i == 0]
    return sorted({*small, *(count // i for i in small)})


def _within(block: Ints, times: int, what: str) -> str:
    """Name the order within a block, whose first and last places may stand still."""
    moved = np.flatnonzero(block != np.arange(len(block)))
    where = f" within each {len(block)}" if times > 1 else ""
    for first, last in _spans(moved, len(block)):
        part = block[first:last] - first
        size = last - first
        if part.min() < 0 or part.max() >= size:
            continue
        of = where + (f", of places {first} to {last - 1}" if size < len(block) else "")
        for ways in _WAYS:
            if size % ways or size == ways:
                continue
            woven = np.arange(size).reshape(ways, -1).T.flatten()
            parts, every = {2: ("halves", "second"), 3: ("thirds", "third"), 4: ("quarters", "fourth")}[ways]
            if bool((part == woven).all()):
                return f"{what} permuted{of}: {parts} woven into each other (interleaved), as in {ROTARY}"
            if bool((part == np.argsort(woven)).all()):
                gathered = f"every {every} one together ({parts} where they belong interleaved)"
                return f"{what} permuted{of}: {gathered}, as in {ROTARY}"
        if bool((part == np.arange(size)[::-1]).all()):
            return f"{what} in reversed order{of}"
        if size % 2 == 0 and bool((part == np.roll(np.arange(size), size // 2)).all()):
            if size == 2:
                return f"{what} exchanged in pairs{of}"
            if times == 1 and size < len(block):
                middle = first + size // 2
                return f"{what} {first} to {middle - 1} and {middle} to {last - 1} exchanged"
            return f"{what} permuted{of}: first and second half exchanged (gate and up, or two ranks' slices)"
        if times > 1 and bool((np.diff(part) % size == 1).all()):
            return f"{what} rotated{of} by {int(part[0])}"
    return ""


def _spans(moved: NDArray[np.int64], size: int) -> list[tuple[int, int]]:
    """Return the places among which an order is looked for: all of a block, and around those that moved."""
    first, last = int(moved[0]), int(moved[-1]) + 1
    # What is woven keeps its first and its last place.
    candidates = [(0, size), (first - 1, last + 1), (first, last), (0, last + 1), (first - 1, size)]
    return [c for i, c in enumerate(candidates) if c[0] >= 0 and c[1] <= size and c not in candidates[:i]]


def _blocks(source: Ints, what: str) -> str:
    """Name an order of blocks of consecutive rows of one size."""
    starts = np.concatenate(([0], np.flatnonzero(np.diff(source) != 1) + 1, [len(source)]))
    size = int(np.gcd.reduce(np.diff(starts)))
    size = int(np.gcd(size, np.gcd.reduce(source[starts[:-1]]))) if len(starts) > 2 else size
    count = len(source) // max(1, size)
    if size < 2 or count < 2:
        return ""
    order = source[::size] // size
    if count == 2:
        return f"{what} in exchanged halves (two parts, or two ranks' slices, in each other's place)"
    moved = np.flatnonzero(order != np.arange(count))
    if len(moved) == 2:
        return f"blocks {moved[0]} and {moved[1]} of {size} {what} exchanged"
    if bool((order == np.arange(count)[::-1]).all()):
        return f"blocks of {size} {what} in reversed order"
    if bool((order == np.roll(np.arange(count), -int(order[0]))).all()):
        return f"blocks of {size} {what} rotated by {int(order[0])}"
    inner = _within(order, 1, "blocks")
    return f"{inner} (blocks of {size} {what})" if inner else f"blocks of {size} {what} in another order"
