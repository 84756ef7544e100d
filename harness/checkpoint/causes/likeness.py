"""How far wrong values are like the right ones: moved, scaled by blocks, rounded, foreign. Knows numbers; no codes.

What is told here follows from a part of the evidence only: the words say what the values look like.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.checkpoint.causes.pair import SAMPLED, Pair, same
from harness.checkpoint.causes.permuted import order_words, positions
from harness.checkpoint.rows import row_hashes

UNRELATED = ("zeros", "the constant", "NaN", "infinity", "values unlike", "values drawn")
"""How the words begin that say that nothing of the checkpoint is there."""
_BLOCK = 16
"""Columns that share a scale in every block format that is known (16, 32, 128) share it in blocks of 16 too."""
_ROUNDED = 0.99
"""Likeness of wrong values to the right ones above which they are the same, rounded: four bits reach 0.995."""
_SHIFTS = (1, 2, 3, 4, 8, 16, 32, 64, 128)
_SORTED = 1 << 24
"""Elements up to which a wrong weight is worth a sort."""


def few_words(held: Tensor, due: Tensor) -> str:
    """Say how a handful of values differ: in one bit each, in their sign; "" if in nothing so simple."""
    held, due = held.flatten(), due.flatten().to(held.dtype)
    if not held.is_floating_point() or held.element_size() not in (1, 2, 4):
        return ""
    ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[held.element_size()]
    width = 8 * held.element_size()
    apart = [
        (a ^ b) & ((1 << width) - 1) for a, b in zip(held.view(ints).tolist(), due.view(ints).tolist(), strict=True)
    ]
    if all(x.bit_count() == 1 for x in apart):
        bits = sorted({x.bit_length() - 1 for x in apart})
        sign = " (the sign)" if bits == [width - 1] else ""
        return (
            f"values that differ in one bit each, bit {', '.join(map(str, bits[:4]))} of {width}{sign}: a flipped bit"
        )
    return ""


def moved_words(pair: Pair) -> str:
    """Say in which other order the right values stand: rows, columns, elements; "" if they do not."""
    held, expected = pair.held, pair.expected.to(pair.held.dtype)
    if held.numel() < 4:
        return ""
    if held.shape[0] == 1:
        held, expected = held.reshape(-1, 1), expected.reshape(-1, 1)
        return order_words(positions(row_hashes(held), row_hashes(expected)), "elements")
    words = order_words(positions(row_hashes(held), row_hashes(expected))) or _flat_shift(held, expected)
    if words:
        return words
    if held.shape[1] > 1:
        words = order_words(
            positions(row_hashes(held.t().contiguous()), row_hashes(expected.t().contiguous())), "columns"
        )
    return words or _reshaped(held, expected) or _sorted_alike(held, expected)


def _reshaped(held: Tensor, expected: Tensor) -> str:
    """Say whether the numbers are read with other strides: a view where a transposition is due, or the reverse."""
    rows, columns = held.shape
    for words, value in (
        ("its axes exchanged (transposed) where they must not be", expected.t()),
        ("its axes exchanged and then read with the right shape (transposed)", expected.t().reshape(rows, columns)),
        (
            "its numbers read as the transposed shape (a view where a transposition is due)",
            expected.reshape(columns, rows).t(),
        ),
    ):
        if value.shape == held.shape and bool(same(held, value).all()):
            return words
    return ""


def _flat_shift(held: Tensor, expected: Tensor) -> str:
    flat, due = held.flatten()[:SAMPLED], expected.flatten()[:SAMPLED]
    for by in (*_SHIFTS, held.shape[1]):
        if by * 4 > len(flat):
            continue
        for words, a, b in ((f"{by} too late", flat[:-by], due[by:]), (f"{by} too early", flat[by:], due[:-by])):
            if bool(same(a, b).all()):
                return f"elements shifted: the reading starts {words} (a wrong offset)"
    return ""


def _sorted_alike(held: Tensor, expected: Tensor) -> str:
    if held.numel() > _SORTED or held.element_size() == 1:
        return ""
    alike = torch.equal(held.flatten().sort().values, expected.flatten().sort().values)
    return "all of them in another order: a permutation or transposition" if alike else ""


def likeness_words(few: Pair, mask: Tensor, where: str, drawn: str) -> str:
    """Say what wrong values of a few rows look like beside the right ones, in words after "memory holds".

    `drawn`: what they look like if they have nothing to do with the right ones.
    """
    a, e = few.held.to(torch.float64), few.expected.to(torch.float64)
    fine = a.isfinite() & e.isfinite() & mask
    if not bool(fine.any()):
        return ""
    held, due = a[fine], e[fine]
    factor = _factor(held, due)
    if factor is not None:
        return f"{factor:.3g} times the checkpoint's values{where}: a scale"
    if _scaled_by_block(a.nan_to_num(), e.nan_to_num()):
        return "the checkpoint's values times another factor in each block: block scales misread or in another order"
    likeness = float(held @ due / (held.norm() * due.norm()).clamp(min=1e-300))
    if likeness < 0.2:
        return (
            f"{drawn}{where}"
            if drawn
            else f"values unlike the checkpoint's{where}: another tensor's, or first random ones"
        )
    off = float((held - due).norm() / due.norm().clamp(min=1e-300))
    if likeness > _ROUNDED and _coarse(few.held):
        return f"the checkpoint's values{where}, each off by about {off:.2g}: rounded through a narrower format"
    if likeness > _ROUNDED:
        return (
            f"the checkpoint's values{where}, each off by about {off:.2g}: rounded through a narrower format, or those "
            "of another export"
        )
    if likeness > 0.5:
        return (
            f"values like the checkpoint's{where} (likeness {likeness:.2g}) and none of them: from another export or "
            "training step, or a decoder that is off"
        )
    return ""


def _coarse(held: Tensor) -> bool:
    """Say whether a row has far fewer different magnitudes than elements: it came through few codes."""
    row = held[0].float().abs()
    return len(row) >= 32 and int(row.sort().values.diff().count_nonzero() + 1) * 2 < min(len(row), 256)


def _factor(held: Tensor, due: Tensor) -> float | None:
    """Return the one factor between two vectors, if there is one."""
    factor = float(held @ due / (due @ due).clamp(min=1e-300))
    left = float((held - factor * due).norm())
    explains = left <= 0.5 * float((held - due).norm())  # of what was rounded, a factor explains nothing
    return factor if factor and explains and left <= 0.02 * float(held.norm()) else None


def _scaled_by_block(a: Tensor, e: Tensor) -> bool:
    """Say whether blocks of a row are the expected ones times a factor of their own, which is mostly not 1."""
    if a.dim() != 2 or a.shape[1] < _BLOCK:
        return False
    whole = a.shape[1] - a.shape[1] % _BLOCK
    a, e = (t[:, :whole].reshape(len(t), -1, _BLOCK) for t in (a, e))
    factor = (a * e).sum(-1, keepdim=True) / (e * e).sum(-1, keepdim=True).clamp(min=1e-300)
    close = float((a - factor * e).norm()) <= 0.05 * float(a.norm())
    return close and float(((factor - 1).abs() > 0.05).double().mean()) > 0.5
