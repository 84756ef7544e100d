"""Arithmetic, element by element, with broadcasting and a scalar. Knows roundings; must not know devices.

One operation is one rounding; a root, a quotient or a power one more inside. Source: IEEE 754.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from harness.ops.arithmetic import Units
from harness.ops.case import Case, Given, Spec, Want
from harness.ops.inputs import lay, sweep, values

SOURCE = "IEEE 754: one rounding an operation; exp, log and powers by `exp_ulps`"
_TINY = 2.0**-126


def _pair(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    """Two tensors; of contents `broadcast` the second has one row, whose stride is 0 over the rows."""
    rows = 0 if content == "empty" else 3
    a = values(gen, dtype, (rows, size or 7), content)
    b = values(gen, dtype, (1 if content == "broadcast" else rows, size or 7), "normal")
    return Given(args=(lay(a, form), lay(b, "transposed" if form == "strided" else form)))


def _single(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    x = values(gen, dtype, (0 if content == "empty" else 3, size or 7), content)
    return Given(args=(lay(x, form),))


def _positive(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    x = values(gen, dtype, (0 if content == "empty" else 3, size or 7), content)
    return Given(args=(lay(x.abs() + (1.0 if content != "tiny" else 0.0), form),))


def _cases(make: Callable[..., Given], contents: tuple[str, ...]) -> Callable[[bool], Iterator[Case]]:
    return lambda full: sweep(make, full=full, sizes=() if full else (1, 129, 1025), contents=contents)


def _rounded(formula: Callable[..., Tensor], roundings: float, exp: float = 0.0) -> Callable[..., Sequence[Want]]:
    def truth(u: Units, *args: Tensor) -> Sequence[Want]:
        value = formula(*args)
        return [Want(value=value, slack=(roundings * u.inside + exp * u.exp) * value.abs() + (_TINY if exp else 0.0))]

    return truth


def _square_truth(u: Units, x: Tensor) -> Sequence[Want]:
    return [Want(value=x * x, slack=u.inside * x * x + _TINY)]


def _rooted(u: Units, x: Tensor) -> Sequence[Want]:
    """Narrow dtypes may round the root before it is inverted."""
    value = x**-0.5
    return [Want(value=value, slack=(4 * u.inside + 1.01 * u.out) * value)]


_TWO, _ONE = ("broadcast", "large", "nonfinite", "empty"), ("large", "tiny", "nonfinite", "empty")

SPECS = tuple(
    Spec(
        name=name, family="elementwise", call=call, source=SOURCE, truth=truth, cases=_cases(make, contents),
        into=into, strided_into=True,
    )
    for name, call, truth, make, contents, into in (
        ("add", torch.add, _rounded(lambda a, b: a + b, 1), _pair, _TWO, lambda out, a, b: torch.add(a, b, out=out)),
        ("sub", torch.sub, _rounded(lambda a, b: a - b, 1), _pair, _TWO, None),
        ("mul", torch.mul, _rounded(lambda a, b: a * b, 1), _pair, _TWO, lambda out, a, b: torch.mul(a, b, out=out)),
        ("div", torch.div, _rounded(lambda a, b: a / b, 3), _pair, _TWO, None),
        ("neg", torch.neg, _rounded(lambda x: -x, 0), _single, _ONE, None),
        ("square", lambda x: x.pow(2), _square_truth, _single, _ONE, None),
        ("rsqrt", torch.rsqrt, _rooted, _positive, ("large", "empty"), None),
        ("exp", torch.exp, _rounded(torch.exp, 1, 1), _single, _ONE, lambda out, x: torch.exp(x, out=out)),
    )
)  # fmt: skip
