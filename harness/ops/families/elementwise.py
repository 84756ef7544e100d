"""Arithmetic, element by element, with broadcasting and a scalar. Knows roundings; must not know devices.

One operation is one rounding; a root, a quotient or a power one more inside. Source: IEEE 754.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.ops.arithmetic import Units
from harness.ops.case import Case, Given, Spec, Want
from harness.ops.inputs import lay, one, sweep, values

SOURCE = "IEEE 754: one rounding an operation; exp, log and powers by `exp_ulps`"
_TINY = 2.0**-126
MANY = 70001
"""A width with which there are more elements than 2^16 blocks of a few have."""


def _pair(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    """Two tensors; of contents `broadcast` the second has one row, whose stride is 0 over the rows."""
    rows, kind = 0 if content == "empty" else 3, torch.int64 if content == "int64" else dtype
    a = values(gen, kind, (rows, size or 7), content)
    b = values(gen, kind, (1 if content == "broadcast" else rows, size or 7), "normal")
    b = a.clone() if content == "ties" else b
    return Given(args=(lay(a, form), lay(b, "transposed" if form == "strided" else form)))


def _picked(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    """A mask, and two tensors to take from; of contents `broadcast` the mask has one column."""
    a, b = _pair(gen, dtype, size, form, "normal" if content == "broadcast" else content).args
    shape = (a.shape[0], 1) if content == "broadcast" else tuple(a.shape)
    return Given(args=(torch.rand(shape, generator=gen) < 0.5, a, b))


def _single(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    x = values(gen, dtype, (0 if content == "empty" else 3, size or 7), content)
    return Given(args=(lay(x, form),))


def _positive(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    x = values(gen, dtype, (0 if content == "empty" else 3, size or 7), content)
    return Given(args=(lay(x.abs() + (1.0 if content != "tiny" else 0.0), form),))


def _cases(make: Callable[..., Given], contents: tuple[str, ...]) -> Callable[[bool], Iterator[Case]]:
    def cases(full: bool) -> Iterator[Case]:
        yield from sweep(make, full=full, sizes=() if full else (1, 7, 63, 129, 1025), contents=contents)
        yield one(make, MANY, "contiguous", "many")

    return cases


def _rounded(formula: Callable[..., Any], roundings: float, exp: float = 0.0) -> Callable[..., Sequence[Want]]:
    """Return a truth by numpy: torch's own arithmetic may be what is tested."""

    def truth(u: Units, *args: Tensor) -> Sequence[Want]:
        with np.errstate(all="ignore"):
            value = torch.from_numpy(formula(*(a.numpy() for a in args)))
        return [Want(value=value, slack=(roundings * u.inside + exp * u.exp) * value.abs() + (_TINY if exp else 0.0))]

    return truth


def _same(formula: Callable[..., Tensor]) -> Callable[..., Sequence[Want]]:
    return lambda u, *args: [Want(value=formula(*args), exact=True)]


def _scaled_truth(u: Units, x: Tensor) -> Sequence[Want]:
    return [Want(value=x * FACTOR, slack=2 * 2.0**-24 * x.abs() + u.inside * (x * FACTOR).abs())]


def _square_truth(u: Units, x: Tensor) -> Sequence[Want]:
    return [Want(value=x * x, slack=u.inside * x * x + _TINY)]


def _greater(a: Tensor, b: Tensor) -> Tensor:
    if not a.is_floating_point():
        return a * (a >= b) + b * (a < b)
    return torch.where(a.isnan(), a, torch.where((b > a) | b.isnan(), b, a))


def _taken(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    mask, out = mask.expand(a.shape), b.expand(a.shape).clone()
    out[mask] = a[mask]
    return out


def _clamped(x: Tensor) -> Tensor:
    out = x.clone()
    out[x < LEAST], out[x > MOST] = LEAST, MOST
    return out


def _rooted(u: Units, x: Tensor) -> Sequence[Want]:
    """Narrow dtypes may round the root before it is inverted."""
    value = x**-0.5
    return [Want(value=value, slack=(4 * u.inside + 1.01 * u.out) * value)]


FACTOR = 0.70710678
"""A number that no narrow dtype holds: rounded to bfloat16 first, it is off by 1.1e-3 of itself."""
LEAST, MOST = -1.5, 2.0
_TWO, _ONE = ("broadcast", "large", "nonfinite", "empty"), ("large", "tiny", "nonfinite", "empty")
_SUM = (*_TWO, "int64")

SPECS = tuple(
    Spec(
        name=name, family="elementwise", call=call, source=SOURCE, truth=truth, cases=_cases(make, contents),
        into=into, strided_into=True,
    )
    for name, call, truth, make, contents, into in (
        ("add", torch.add, _rounded(lambda a, b: a + b, 1), _pair, _SUM, lambda out, a, b: torch.add(a, b, out=out)),
        ("sub", torch.sub, _rounded(lambda a, b: a - b, 1), _pair, _SUM, None),
        ("mul", torch.mul, _rounded(lambda a, b: a * b, 1), _pair, _TWO, lambda out, a, b: torch.mul(a, b, out=out)),
        ("div", torch.div, _rounded(lambda a, b: a / b, 3), _pair, (*_TWO, "ties"), None),
        ("maximum", torch.maximum, _same(_greater), _pair, _SUM, None),
        ("less", torch.lt, _same(lambda a, b: a < b), _pair, (*_SUM, "ties"), None),
        ("where", torch.where, _same(_taken), _picked, _SUM, None),
        ("scale", lambda x: x * FACTOR, _scaled_truth, _single, _ONE, None),
        ("clamp", lambda x: x.clamp(LEAST, MOST), _same(_clamped), _single, _ONE, None),
        ("sqrt", torch.sqrt, _rounded(lambda x: x**0.5, 2), _positive, ("large", "tiny", "empty"), None),
        ("neg", torch.neg, _rounded(lambda x: -x, 0), _single, _ONE, None),
        ("square", lambda x: x.pow(2), _square_truth, _single, _ONE, None),
        ("rsqrt", torch.rsqrt, _rooted, _positive, ("large", "empty"), None),
        ("exp", torch.exp, _rounded(np.exp, 1, 1), _single, _ONE, lambda out, x: torch.exp(x, out=out)),
    )
)  # fmt: skip
