"""What would turn the expected values into those found: tried one by one. Knows tensors; no taps, traces or limits.

A pattern is a hypothesis about a matrix [T, E] of expected values. It explains an error in the measure in which what is
left over, after the expected values were changed that way, is nothing but noise. Whatever a pattern has to fit, it fits
on every second token and is tried on the others, so that a rich pattern gains nothing by being rich.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

MOST_CHANNELS = 4096
"""Channels (or rows) above which no general permutation is looked for."""
CLEAR = 0.9
"""Correlation above which a channel or a row is recognised as another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One tap of both sides, [T, E] float64. `heads` 0 if unknown. `others` are the reference's own values elsewhere,
    of the same shape, by tap; `inputs` names those of them that the unit was given.
    """

    actual: Tensor
    expected: Tensor
    heads: int = 0
    others: Mapping[str, Tensor] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A hypothesis in words, and the share of the error's norm that is left over under it (0 explains everything)."""

    words: str
    left: float


def best_pattern(matrix: Matrix) -> Pattern | None:
    """Return the pattern that leaves least; simple ones come first and are only left for one that is twice as good."""
    error = float((matrix.actual - matrix.expected).norm())
    if not math.isfinite(error) or error == 0:
        return None
    best: Pattern | None = None
    for make in _PATTERNS:
        for words, changed, tried in make(matrix):
            rest, whole = (matrix.actual - changed)[tried], (matrix.actual - matrix.expected)[tried]
            left = float(rest.norm() / whole.norm()) if float(whole.norm()) else 1.0
            if best is None or left * 2 < best.left:
                best = Pattern(words=words, left=left)
    return best


Made = Iterator[tuple[str, Tensor, Tensor]]
"""Words, what the expected values become, and the tokens that this is tried on."""


def _all(matrix: Matrix) -> Tensor:
    return torch.ones(len(matrix.actual), dtype=torch.bool)


def _odd(matrix: Matrix) -> Tensor:
    return torch.arange(len(matrix.actual)) % 2 == 1


def _constant(matrix: Matrix) -> Made:
    """Nothing written, or one value everywhere."""
    if not bool(matrix.actual.any()):
        yield "zero everywhere: never written, or masked away", torch.zeros_like(matrix.expected), _all(matrix)
    elif len(matrix.actual) > 1 and bool((matrix.actual == matrix.actual[:1]).all()):
        same = matrix.actual[:1].expand_as(matrix.actual)
        yield "the same for every token: one row was written for all", same, _all(matrix)


def _handed_on(matrix: Matrix) -> Made:
    """What another place should hold; the unit's own input first."""
    for name in matrix.inputs:
        yield f"its input {name}, unchanged: the unit does nothing", matrix.others[name], _all(matrix)
    for name, other in matrix.others.items():
        if name not in matrix.inputs:
            yield f"what {name} should hold", other, _all(matrix)


def _scaled(matrix: Matrix) -> Made:
    """A constant ratio, to all or by head."""
    fit = ~_odd(matrix) if len(matrix.actual) > 1 else _all(matrix)
    a, e = matrix.actual[fit], matrix.expected[fit]
    ratio = float((a * e).sum() / e.square().sum()) if bool(e.any()) else 1.0
    yield f"{_factor(ratio)} the expected values", matrix.expected * ratio, _odd(matrix)
    if matrix.heads > 1:
        shape = (len(e), matrix.heads, -1)
        over, under = ((a * e).reshape(shape).sum((0, 2)), e.square().reshape(shape).sum((0, 2)).clamp(min=1e-300))
        ratios = over / under
        changed = (matrix.expected.reshape(len(matrix.expected), matrix.heads, -1) * ratios[:, None]).flatten(1)
        off = int((ratios - 1).abs().argmax())
        yield f"a factor of its own in each head; head {off} is {_factor(float(ratios[off]))} it", changed, _odd(matrix)


def _factor(ratio: float) -> str:
    if abs(ratio + 1) < 1e-2:
        return "-1 times (the sign is turned)"
    return f"{ratio:.4g} times"


def _by_channel(matrix: Matrix) -> Made:
    """A factor or an offset of its own in each channel."""
    if len(matrix.actual) < 8:
        return
    fit = ~_odd(matrix)
    a, e = matrix.actual[fit], matrix.expected[fit]
    offset = (a - e).mean(dim=0)
    words = "the expected values plus a constant in each channel: a bias that is missing, doubled or of another unit"
    yield words, matrix.expected + offset, _odd(matrix)
    ratio = (a * e).sum(dim=0) / e.square().sum(dim=0).clamp(min=1e-300)
    least, most = float(ratio.min()), float(ratio.max())
    words = f"a factor of its own in each channel ({least:.3g} to {most:.3g}): a norm's weight, or a scale by channel"
    yield words, matrix.expected * ratio, _odd(matrix)


def _added(matrix: Matrix) -> Made:
    """Another value added or left out: a residual taken twice or not at all."""
    fit = ~_odd(matrix)
    error = (matrix.actual - matrix.expected)[fit]
    for name in matrix.inputs:
        other = matrix.others[name]
        share = float((error * other[fit]).sum() / other[fit].square().sum().clamp(min=1e-300))
        words = f"the expected values and {share:+.3g} times {name}: a residual that is missing or added again"
        yield words, matrix.expected + share * other, _odd(matrix)


def _clamped(matrix: Matrix) -> Made:
    """Values cut at a bound."""
    for bound in (float(matrix.actual.abs().max()), float(matrix.actual.max())):
        cut = matrix.expected.clamp(-bound, bound)
        if bound > 0 and bool((cut != matrix.expected).any()):
            yield f"the expected values cut at {bound:.4g}: a clamp, or the end of a number format", cut, _all(matrix)


def _shifted(matrix: Matrix) -> Made:
    """Every token holds a neighbour's value."""
    for by in (1, -1, 2, -2):
        if len(matrix.actual) > 4 * abs(by):
            whose = f"the token {abs(by)} {'before' if by > 0 else 'after'} it"
            inside = _all(matrix)
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
                _all(matrix),
            )
            yield (
                f"the expected channels, first and second half by turns{where} (halves read as interleaved)",
                halves,
                _all(matrix),
            )
            yield (
                f"the expected channels with their halves exchanged{where}",
                blocks.roll(size // 2, -1).flatten(1),
                _all(matrix),
            )
        yield f"the expected channels in reverse{where}", blocks.flip(-1).flatten(1), _all(matrix)
    if matrix.heads > 1:
        count = len(matrix.expected)
        turned = matrix.expected.reshape(count, matrix.heads, -1).transpose(1, 2).flatten(1)
        back = matrix.expected.reshape(count, -1, matrix.heads).transpose(1, 2).flatten(1)
        yield "the expected channels with heads and features exchanged", turned, _all(matrix)
        yield "the expected channels with features and heads exchanged", back, _all(matrix)


def _permuted(matrix: Matrix) -> Made:
    """Any other order of heads, channels or rows, read off the correlations."""
    width, rows = matrix.expected.shape[1], len(matrix.expected)
    if matrix.heads > 1 and rows >= 4:
        split = (rows, matrix.heads, -1)
        order = _matched(*(x.reshape(split).transpose(1, 2).reshape(-1, matrix.heads) for x in _both(matrix)))
        if order is not None:
            changed = matrix.expected.reshape(split)[:, order].flatten(1)
            yield f"the expected heads in another order ({_listed(order)})", changed, _all(matrix)
    if 4 <= width <= MOST_CHANNELS and rows >= 16:
        order = _matched(*_both(matrix))
        if order is not None:
            yield f"the expected channels in another order ({_listed(order)})", matrix.expected[:, order], _all(matrix)
    if 4 <= rows <= MOST_CHANNELS and width >= 16:
        order = _matched(*(x.T for x in _both(matrix)))
        if order is not None:
            yield f"the expected rows in another order ({_listed(order)})", matrix.expected[order], _all(matrix)


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
    if size % 2 or len(matrix.actual) < 8:
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
        yield f"{words}: rotary base, scaling, or positions", parts.reshape(matrix.expected.shape), _all(matrix)


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
        narrow = matrix.expected.to(torch.float32).to(dtype).to(torch.float64)
        if bool((matrix.actual.to(torch.float32).to(dtype).to(torch.float64) == matrix.actual).all()):
            yield f"rounded to {name}: a coarser format than declared", narrow, _all(matrix)


_PATTERNS: tuple[Callable[[Matrix], Made], ...] = (
    _constant, _scaled, _handed_on, _coarse, _clamped, _shifted, _reordered, _added, _by_channel, _permuted, _turned,
)  # fmt: skip
