"""What would turn the expected values into those found: tried one by one. Knows tensors; no taps, traces or limits.

A pattern is a hypothesis about a matrix [T, E] of expected values. It explains an error in the measure in which what is
left over, after the expected values were changed that way, is nothing but noise. Whatever a pattern has to fit, it fits
on every second token (or channel) and is tried on the others, so that a rich pattern gains nothing by being rich.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from harness.diagnose.functions import applied, by_token, capped, routed
from harness.diagnose.matrix import Made, Matrix, Pattern, every, factor_words, odd
from harness.diagnose.mixing import mixed
from harness.diagnose.shares import shared_out

__all__ = ["Matrix", "Pattern", "best_pattern"]

MOST_CHANNELS = 4096
"""Channels (or rows) above which no general permutation is looked for."""
FEWEST = 16
"""Values below which anything explains anything."""
ENOUGH = 0.02
"""What may be left over under a pattern for no other one to be looked for."""
LEAST = 0.1
"""Part of its share of the error that must lie where a pattern is tried: else it says nothing of the rest."""
CLEAR = 0.9
"""Correlation above which a channel or a row is recognised as another one."""


def best_pattern(matrix: Matrix) -> Pattern | None:
    """Return the pattern that leaves least; simple ones come first and are only left for one that is twice as good."""
    error = float((matrix.actual - matrix.expected).norm())
    if not math.isfinite(error) or error == 0 or matrix.actual.numel() < FEWEST:
        return None
    best: Pattern | None = None
    for make in _PATTERNS:
        for words, changed, tried in make(matrix):
            rest, whole = (matrix.actual - changed)[tried], (matrix.actual - matrix.expected)[tried]
            share = (whole.numel() / matrix.actual.numel()) ** 0.5
            if float(whole.norm()) <= LEAST * share * error:
                continue
            left = float(rest.norm() / whole.norm())
            if math.isfinite(left) and (best is None or (best.left > ENOUGH and left * 2 < best.left)):
                best = Pattern(words=words, left=left)
    return best


def _constant(matrix: Matrix) -> Made:
    """Nothing written, or one value everywhere."""
    if not bool(matrix.actual.any()):
        yield "zero everywhere: never written, or masked away", torch.zeros_like(matrix.expected), every(matrix)
    elif len(matrix.actual) > 1 and bool((matrix.actual == matrix.actual[:1]).all()):
        same = matrix.actual[:1].expand_as(matrix.actual)
        yield "the same for every token: one row was written for all", same, every(matrix)


def _emptied(matrix: Matrix) -> Made:
    """Nothing at some tokens, the right values at the others."""
    empty = ~matrix.actual.any(dim=1) & matrix.expected.any(dim=1)
    if bool(empty.any()) and not bool(empty.all()):
        words = f"zero at {int(empty.sum())} of {len(empty)} tokens, the first one {int(empty.nonzero()[0])}: left out"
        yield words, matrix.expected * ~empty[:, None], every(matrix)


def _handed_on(matrix: Matrix) -> Made:
    """What another place should hold; the unit's own input first."""
    for name in matrix.inputs:
        yield f"its input {name}, unchanged: the unit does nothing", matrix.others[name], every(matrix)
    for name, other in matrix.others.items():
        if name not in matrix.inputs:
            yield f"what {name} should hold", other, every(matrix)


def _scaled(matrix: Matrix) -> Made:
    """A constant ratio, to all or by head."""
    fit = ~odd(matrix) if len(matrix.actual) > 1 else every(matrix)
    a, e = matrix.actual[fit], matrix.expected[fit]
    ratio = float((a * e).sum() / e.square().sum()) if bool(e.any()) else 1.0
    yield f"{factor_words(ratio)} the expected values", matrix.expected * ratio, odd(matrix)
    if matrix.heads > 1:
        shape = (len(e), matrix.heads, -1)
        over, under = ((a * e).reshape(shape).sum((0, 2)), e.square().reshape(shape).sum((0, 2)).clamp(min=1e-300))
        ratios = over / under
        changed = (matrix.expected.reshape(len(matrix.expected), matrix.heads, -1) * ratios[:, None]).flatten(1)
        off = int((ratios - 1).abs().argmax())
        yield (
            f"a factor of its own in each head; head {off} is {factor_words(float(ratios[off]))} it",
            changed,
            odd(matrix),
        )


def _by_channel(matrix: Matrix) -> Made:
    """A factor or an offset of its own in each channel."""
    if len(matrix.actual) < 8:
        return
    fit = ~odd(matrix)
    a, e = matrix.actual[fit], matrix.expected[fit]
    offset = (a - e).mean(dim=0)
    words = "the expected values plus a constant in each channel: a bias that is missing, doubled or of another unit"
    yield words, matrix.expected + offset, odd(matrix)
    ratio = (a * e).sum(dim=0) / e.square().sum(dim=0).clamp(min=1e-300)
    least, most = float(ratio.min()), float(ratio.max())
    words = f"a factor of its own in each channel ({least:.3g} to {most:.3g}): a norm's weight, or a scale by channel"
    yield words, matrix.expected * ratio, odd(matrix)


def _added(matrix: Matrix) -> Made:
    """Another value added or left out: a residual taken twice or not at all."""
    fit = ~odd(matrix)
    error = (matrix.actual - matrix.expected)[fit]
    for name in matrix.inputs:
        other = matrix.others[name]
        share = float((error * other[fit]).sum() / other[fit].square().sum().clamp(min=1e-300))
        words = f"the expected values and {share:+.3g} times {name}: a residual that is missing or added again"
        yield words, matrix.expected + share * other, odd(matrix)


def _clamped(matrix: Matrix) -> Made:
    """Values cut at a bound."""
    for bound in (float(matrix.actual.abs().max()), float(matrix.actual.max())):
        cut = matrix.expected.clamp(-bound, bound)
        if bound > 0 and bool((cut != matrix.expected).any()):
            yield f"the expected values cut at {bound:.4g}: a clamp, or the end of a number format", cut, every(matrix)


def _shifted(matrix: Matrix) -> Made:
    """Every token holds a neighbour's value."""
    for by in (1, -1, 2, -2):
        if len(matrix.actual) > 4 * abs(by):
            whose = f"the token {abs(by)} {'before' if by > 0 else 'after'} it"
            inside = every(matrix)
            inside[: max(by, 0)] = False
            inside[len(inside) + min(by, 0) :] = False
            yield f"at each token the value of {whose}: a shift by {abs(by)}", matrix.expected.roll(by, 0), inside


def _reordered(matrix: Matrix) -> Made:
    """Known orders of channels: halves against interleaved, heads against features, halves exchanged, reversed."""
    width = matrix.expected.shape[1]
    sizes = {width: "", **({width // matrix.heads: " in each head"} if matrix.heads > 1 else {})}
    for size, where in sizes.items():
        blocks = matrix.expected.reshape(len(matrix.expected), -1, size)
        if size % 2 == 0 and size > 2:
            count = len(blocks)
            pairs = blocks.reshape(count, -1, size // 2, 2).transpose(-1, -2).flatten(1)
            halves = blocks.reshape(count, -1, 2, size // 2).transpose(-1, -2).flatten(1)
            yield (
                f"the expected channels, even ones before odd ones{where} (interleaved read as halves)",
                pairs,
                every(matrix),
            )
            yield (
                f"the expected channels, first and second half by turns{where} (halves read as interleaved)",
                halves,
                every(matrix),
            )
            yield (
                f"the expected channels with their halves exchanged{where}: two parts or heads in each other's place",
                blocks.roll(size // 2, -1).flatten(1),
                every(matrix),
            )
        yield f"the expected channels in reverse{where}", blocks.flip(-1).flatten(1), every(matrix)
    if matrix.heads > 1:
        count = len(matrix.expected)
        turned = matrix.expected.reshape(count, matrix.heads, -1).transpose(1, 2).flatten(1)
        back = matrix.expected.reshape(count, -1, matrix.heads).transpose(1, 2).flatten(1)
        yield "the expected channels with heads and features exchanged", turned, every(matrix)
        yield "the expected channels with features and heads exchanged", back, every(matrix)


def _permuted(matrix: Matrix) -> Made:
    """Any other order of heads, channels or rows, read off the correlations."""
    width, rows = matrix.expected.shape[1], len(matrix.expected)
    if matrix.heads > 1 and rows >= 4:
        split = (rows, matrix.heads, -1)
        order = _matched(*(x.reshape(split).transpose(1, 2).reshape(-1, matrix.heads) for x in _both(matrix)))
        if order is not None:
            changed = matrix.expected.reshape(split)[:, order].flatten(1)
            yield f"the expected heads in another order ({_listed(order)})", changed, every(matrix)
    if 4 <= width <= MOST_CHANNELS and rows >= 16:
        order = _matched(*_both(matrix))
        if order is not None:
            yield f"the expected channels in another order ({_listed(order)})", matrix.expected[:, order], every(matrix)
    if 4 <= rows <= MOST_CHANNELS and width >= 16:
        order = _matched(*(x.T for x in _both(matrix)))
        if order is not None:
            yield f"the expected rows in another order ({_listed(order)})", matrix.expected[order], every(matrix)


def _both(matrix: Matrix) -> tuple[Tensor, Tensor]:
    return matrix.actual, matrix.expected


def _matched(actual: Tensor, expected: Tensor) -> Tensor | None:
    """Return which expected column each actual column is, if all but a few are clear and none is taken twice."""
    a, e = (torch.nn.functional.normalize(x - x.mean(0), dim=0) for x in (actual, expected))
    likeness = a.T @ e
    score, order = likeness.max(dim=1)
    clear = score > CLEAR
    if float(clear.to(torch.float64).mean()) < CLEAR or len(set(order.tolist())) < len(order) * CLEAR:
        return None
    order = torch.where(clear, order, torch.arange(len(order)))
    return None if bool((order == torch.arange(len(order))).all()) else order


def _listed(order: Tensor) -> str:
    moved = [(i, int(o)) for i, o in enumerate(order) if i != int(o)]
    more = f" and {len(moved) - 3} more" if len(moved) > 3 else ""
    return "; ".join(f"{i} holds {o}" for i, o in moved[:3]) + more


def _turned(matrix: Matrix) -> Made:
    """Pairs of channels turned by another angle: what a rotary embedding does, and does wrongly."""
    width = matrix.expected.shape[1]
    size = width // matrix.heads if matrix.heads else width
    if size % 2 or size < 8 or len(matrix.actual) < 8:  # two pairs may be turned into anything
        return
    for style, apart in (("halves", True), ("neighbours", False)):
        shape = (len(matrix.actual), -1, *((2, size // 2) if apart else (size // 2, 2)))
        first, second = ((x.reshape(shape).movedim(2 if apart else 3, 0)) for x in _both(matrix))
        a, e = (torch.complex(x[0].contiguous(), x[1].contiguous()) for x in (first, second))
        length = (a.abs() - e.abs()).norm() / (a - e).norm().clamp(min=1e-300)
        turn = (a * e.conj()).sum(dim=1)  # one angle for all heads, by token and pair
        turned = e * (turn / turn.abs().clamp(min=1e-300))[:, None]
        if float(length) > 0.5:
            continue
        parts = torch.stack((turned.real, turned.imag), dim=2 if apart else 3)
        words = f"the expected pairs of channels ({style}) turned by another angle{_growing(turn.angle())}"
        yield f"{words}: rotary base, scaling, or positions", parts.reshape(matrix.expected.shape), every(matrix)


def _growing(angle: Tensor) -> str:
    """Say whether angles [T, P] grow with position or are the same everywhere."""
    step = torch.atan2(*(f(angle[1:] - angle[:-1]).mean(0) for f in (torch.sin, torch.cos)))
    steady = torch.cos(angle[1:] - angle[:-1] - step).mean(0)
    clear = (steady > CLEAR) & (step.abs() > 1e-4)
    return ", which grows with the position" if bool(clear.any()) else ""


def _coarse(matrix: Matrix) -> Made:
    """Values of a coarser number format."""
    for name in ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"):
        dtype = getattr(torch, name, None)
        if dtype is None or not bool(torch.isfinite(matrix.actual).all()):
            continue
        if bool((matrix.actual.to(torch.float32).to(dtype).to(torch.float64) == matrix.actual).all()):
            near = matrix.expected.to(torch.float32).to(dtype)
            yield f"rounded to {name}: a coarser format than declared", near.to(torch.float64), every(matrix)
            yield f"cut to {name} instead of rounded", _cut(near, matrix.expected), every(matrix)


def _cut(near: Tensor, exact: Tensor) -> Tensor:
    """Return the nearest representable values that are no larger than the exact ones."""
    bits = {1: torch.int8, 2: torch.int16}[near.element_size()]
    inward = (near.view(bits) - 1).view(near.dtype).to(torch.float64)  # one step towards zero: sign and magnitude
    beyond = near.to(torch.float64).abs() > exact.abs()
    return torch.where(beyond, inward, near.to(torch.float64))


_PATTERNS: tuple[Callable[[Matrix], Made], ...] = (
    _constant, _scaled, _handed_on, _coarse, _clamped, capped, _emptied, _shifted, _reordered, _added, applied, routed,
    _by_channel, by_token, _permuted, _turned, mixed, shared_out,
)  # fmt: skip
