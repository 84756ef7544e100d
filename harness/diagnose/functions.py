"""Functions that a unit may have applied instead of its own. Knows tensors and formulas; no taps, traces or limits.

Another function of an input is only named where the unit's own is recognised first: the expected values must be what
one of the known functions gives of that input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from harness.diagnose.matrix import Made, Matrix, every, odd, odd_channels, relative

OWN = 0.02
"""Relative difference below which the expected values are what a function gives: roundings of a 16-bit input."""

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SiLU": functional.silu,
    "GELU": functional.gelu,
    "ReLU": torch.relu,
    "squared ReLU": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": functional.softplus,
    "a softmax over channels": lambda x: torch.softmax(x, -1),
}


def applied(matrix: Matrix) -> Made:
    """Another function of what the unit was given."""
    inputs = {**{n: matrix.others[n] for n in matrix.inputs}, **matrix.around}
    for name, x in inputs.items():
        if x.shape != matrix.expected.shape:
            continue
        for own, call in FUNCTIONS.items():
            bias = (matrix.expected - call(x)).mean(0)  # a correction bias, or nothing
            if relative(call(x) + bias - matrix.expected.mean(0), matrix.expected - matrix.expected.mean(0)) > OWN:
                continue
            for other, change in FUNCTIONS.items():
                if other != own:
                    yield f"{other} of {name}, where {own} is due", change(x) + bias, every(matrix)
            return
    if bool(((matrix.expected > 0) & (matrix.expected < 1)).all()):
        given = torch.logit(matrix.expected)
        yield "a softmax over channels, where a sigmoid of each is due", torch.softmax(given, -1), every(matrix)


def capped(matrix: Matrix) -> Made:
    """A soft cap c * tanh(x / c) that should not be there, or is missing."""
    for words, small, large in (
        ("a soft cap of {cap:.4g} that does not belong there", matrix.actual, matrix.expected),
        ("no soft cap, where one of {cap:.4g} is due", matrix.expected, matrix.actual),
    ):
        at = int(large.abs().argmax())
        top, got = float(large.flatten()[at].abs()), float(small.flatten()[at].abs())
        if not 0 < got < 0.999 * top or not bool((small.abs() <= large.abs() * 1.02 + 1e-6).all()):
            continue
        cap = _cap(top, got)
        inner = (matrix.expected / cap).clamp(-1 + 1e-12, 1 - 1e-12)
        changed = cap * (torch.tanh(matrix.expected / cap) if small is matrix.actual else torch.atanh(inner))
        yield words.format(cap=cap), changed, every(matrix)


def _cap(top: float, got: float) -> float:
    """Return c with c * tanh(top / c) = got, 0 < got < top."""
    x = torch.tensor(top, dtype=torch.float64)
    low, high = got * 0.5, top * 1e4
    for _ in range(200):
        middle = float((low * high) ** 0.5)
        low, high = (middle, high) if float(middle * torch.tanh(x / middle)) < got else (low, middle)
    return float((low * high) ** 0.5)


def by_token(matrix: Matrix) -> Made:
    """A factor of its own for each token (and head): a normalisation that is other, missing or applied twice."""
    width = matrix.actual.shape[1]
    for count, where in {1: "", **({matrix.heads: " in each head"} if matrix.heads > 1 else {})}.items():
        if len(matrix.actual) < 4 or width < 8 * count:
            continue
        a, e = (x.reshape(len(x), count, -1) for x in (matrix.actual, matrix.expected))
        ratio = (a * e)[..., ::2].sum(-1) / e[..., ::2].square().sum(-1).clamp(min=1e-300)
        words = f"a factor of its own for each token{where} ({float(ratio.min()):.3g} to {float(ratio.max()):.3g})"
        usual = (
            "a softmax's denominator, a sink, or a norm of each head" if where else "a norm's epsilon or denominator"
        )
        yield f"{words}: {usual}", (e * ratio[..., None]).flatten(1), odd_channels(matrix)


_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "{name} itself": lambda x: x,
    "a sigmoid of {name}": torch.sigmoid,
    "a softmax of {name} over all": lambda x: torch.softmax(x, -1),
}
_CHOSEN: dict[str, Callable[[Tensor], Tensor]] = {
    "not normalised": lambda x: x,
    "divided by their sum": lambda x: x / x.sum(-1, keepdim=True),
    "as a softmax of the chosen": lambda x: torch.softmax(x, -1),
}


def routed(matrix: Matrix) -> Made:
    """Weights of what was chosen that come from the scores in another way, times one factor."""
    fit = ~odd(matrix)
    found: list[tuple[str, Tensor]] = []
    for name, (scores, ids) in matrix.chosen.items():
        if ids.shape != matrix.expected.shape:
            continue
        for first, before in _SCORES.items():
            taken = before(scores).gather(-1, ids)
            for then, after in _CHOSEN.items():
                value = after(taken)
                if bool(torch.isfinite(value).all()) and bool(value.any()):
                    found.append((f"{first.format(name=name)}, {then}", value))
    own = min(found, key=lambda f: _fitted(f[1], matrix.expected, fit)[1], default=("", torch.zeros(())))
    if len(matrix.expected) < 8 or not found or _fitted(own[1], matrix.expected, fit)[1] > OWN:
        return
    due = f"; due is {own[0]}"
    for words, value in found:
        factor = _fitted(value, matrix.actual, fit)[0]
        times = "" if abs(factor - 1) < 1e-3 else f" times {factor:.4g}"
        yield f"the weights of the chosen as {words}{times}{due}", value * factor, odd(matrix)


def _fitted(value: Tensor, target: Tensor, fit: Tensor) -> tuple[float, float]:
    """Return the one factor that brings a value nearest to a target, fitted on some tokens, and what is left there."""
    v, t = value[fit], target[fit]
    factor = float((v * t).sum() / v.square().sum().clamp(min=1e-300))
    return factor, relative(v * factor, t)
