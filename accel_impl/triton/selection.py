"""The best keys of each query, chosen by a kernel without sorting. Knows scores; must not know what they mean.

The k-th greatest score is found bit by bit on whole numbers of the same order; then one pass writes the places of what
lies above it, and of the first that equal it: ascending, ties to the lower place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
"""Keys that are looked at together."""


def choose_keys(scores_BTS: Tensor, count: int, *, block: int = BLOCK) -> Tensor:
    """Return places [B, T, count] of the highest scores, -1 where there are fewer candidates."""
    scores = scores_BTS.float().contiguous()
    out = torch.full((*scores.shape[:-1], count), -1, dtype=torch.int64, device=scores.device)
    rows = scores.numel() // max(1, scores.shape[-1])
    if rows and count:
        _choose[(rows,)](scores, out, scores.shape[-1], count, BLOCK=block)
    return out


@triton.jit
def _order(row, start, keys, BLOCK: tl.constexpr):
    """Return whole numbers in the order of the scores, from 0 to 2^32, -1 for what is no candidate."""
    at = start + tl.arange(0, BLOCK)
    score = tl.load(row + at, mask=at < keys, other=float("-inf"))
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    signed = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)
    return tl.where(score == float("-inf"), -1, signed + 2147483648)


@triton.jit
def _choose(scores, out, keys, count, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    row = scores + number * keys
    one = tl.full((), 1, tl.int64)
    least = tl.full((), 0, tl.int64)
    for bit in range(32):
        wanted = least | (one << (31 - bit))
        found = tl.full((), 0, tl.int32)
        for start in range(0, keys, BLOCK):
            found += tl.sum((_order(row, start, keys, BLOCK) >= wanted).to(tl.int32), axis=0)
        least = tl.where(found >= count, wanted, least)
    above = tl.full((), 0, tl.int32)
    for start in range(0, keys, BLOCK):
        above += tl.sum((_order(row, start, keys, BLOCK) > least).to(tl.int32), axis=0)
    placed = tl.full((), 0, tl.int32)
    equal = tl.full((), 0, tl.int32)
    for start in range(0, keys, BLOCK):
        order = _order(row, start, keys, BLOCK)
        tie = (order == least).to(tl.int32)
        first = equal + tl.cumsum(tie, axis=0) <= count - above
        taken = ((order > least) | ((tie == 1) & first)).to(tl.int32)
        place = placed + tl.cumsum(taken, axis=0) - 1
        at = (start + tl.arange(0, BLOCK)).to(tl.int64)
        tl.store(out + number * count + place, at, mask=taken == 1)
        placed += tl.sum(taken, axis=0)
        equal += tl.sum(tie, axis=0)
