"""Elementwise functions of networks. Knows formulas and budgets; must not know devices.

Each is exp, erf or tanh and a few products: `exp_ulps` of what a device declares, and some roundings. A difference
that cancels (gelu of a negative number) is right to a few u of its terms. Composed ones round in the dtype between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from harness.ops.arithmetic import Units
from harness.ops.case import Case, Given, Spec, Want
from harness.ops.families.elementwise import MANY
from harness.ops.inputs import lay, one, sweep, values

SOURCE = "count of roundings; Hendrycks and Gimpel 2016; Shazeer 2020; the clamped form as in gpt-oss"
_EDGES = (0.0, -0.0, 1.0, -1.0, 20.0, -20.0, 88.0, -88.0, 104.0, -104.0, 1e-6, -1e-6)
ALPHA, LIMIT = 1.702, 7.0


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    return F.silu(gate) * up


def swiglu_clamped(gate: Tensor, up: Tensor, alpha: float = ALPHA, limit: float = LIMIT) -> Tensor:
    """Return g sigmoid(alpha g) (u + 1), with g at most `limit` and u within it."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


def relu2(x: Tensor) -> Tensor:
    """Return relu(x)^2."""
    return F.relu(x).square()


def _x(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Tensor:
    if content == "wide":
        x = torch.linspace(-30, 30, size, dtype=torch.float64).to(dtype)
        x[: len(_EDGES)] = torch.tensor(_EDGES, dtype=torch.float64).to(dtype)[:size]
        return lay(x[None], form)
    return lay(values(gen, dtype, (0 if content == "empty" else 3, size or 7), content), form)


def _single(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    return Given(args=(_x(gen, dtype, size, form, content),))


def _double(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    """Gate and up as halves of one fused product: each is a view with strides of the whole."""
    if form == "sliced":
        whole = values(gen, dtype, (3, 2 * size), content)
        return Given(args=tuple(whole.chunk(2, dim=-1)))
    second = "normal" if content in ("nonfinite", "large") else content
    return Given(args=(_x(gen, dtype, size, form, content), _x(gen, dtype, size, form, second)))


def _cases(
    make: Callable[..., Given], forms: tuple[str, ...] = (), odd: str = "nonfinite"
) -> Callable[[bool], Iterator[Case]]:
    def cases(full: bool) -> Iterator[Case]:
        sizes = () if full else (1, 7, 63, 129, 1025)
        yield from sweep(make, full=full, sizes=sizes, contents=("wide", "large", odd, "empty"), forms=forms)
        yield one(make, MANY, "contiguous", "many")

    return cases


def _want(value: Tensor, slack: Tensor) -> Sequence[Want]:
    return [Want(value=value, slack=slack)]


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def _silu(u: Units, x: Tensor) -> Sequence[Want]:
    value = torch.where(x == -math.inf, math.nan, x * _sigmoid(x))
    return _want(value, (u.exp + 6 * u.inside) * value.abs() + _TINY * (1 + x.abs()))


_TINY = 2.0**-126
"""exp below the smallest normal number of float32 may be 0."""


def _gelu(u: Units, x: Tensor) -> Sequence[Want]:
    value = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    return _want(value, (u.exp + 8 * u.inside) * x.abs())


def _gelu_tanh(u: Units, x: Tensor) -> Sequence[Want]:
    value = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return _want(value, (2 * u.exp + 12 * u.inside) * x.abs())


def _softplus(u: Units, x: Tensor) -> Sequence[Want]:
    value = torch.where(x > 20, x, torch.log1p(x.clamp(max=30).exp()))
    value = torch.where(x.isnan(), x, value)
    return _want(value, (2 * u.exp + 4 * u.inside) * value.abs() + 2.1e-9 * (x > 19) + _TINY)


def _tanh(u: Units, x: Tensor) -> Sequence[Want]:
    value = torch.sign(x) * -torch.expm1(-2 * x.abs()) / (1 + (-2 * x.abs()).exp())
    value = torch.where(x == 0, x, value)
    return _want(value, (u.exp + 4 * u.inside) * value.abs())


def _relu2(u: Units, x: Tensor) -> Sequence[Want]:
    value = torch.where(x > 0, x, torch.where(x.isnan(), x, 0.0 * x.nan_to_num(0.0, 0.0, 0.0))) ** 2
    return _want(value, u.inside * value.abs())


def _sigmoid_truth(u: Units, x: Tensor) -> Sequence[Want]:
    value = _sigmoid(x)
    return _want(value, (u.exp + 4 * u.inside) * value.abs() + _TINY)


def _swiglu(u: Units, gate: Tensor, up: Tensor) -> Sequence[Want]:
    silu = _silu(u, gate)[0]
    assert silu.slack is not None
    value = silu.value * up
    rounded = torch.maximum(u.out * silu.value.abs(), torch.full_like(value, _least(u)))
    return _want(value, (silu.slack + rounded) * up.abs() + u.inside * value.abs())


def _least(u: Units) -> float:
    """Return half of the smallest number that an intermediate of the result's dtype may keep."""
    return 2.0**-25 if u.out == 2.0**-11 else _TINY


def _swiglu_clamped(u: Units, gate: Tensor, up: Tensor) -> Sequence[Want]:
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    glu = gate * _sigmoid(ALPHA * gate)
    glu = torch.where(gate == -math.inf, math.nan, glu)
    value = glu * (up + 1)
    steps = (u.out * (4 + ALPHA * gate.abs()) + u.exp + 4 * u.inside) * value.abs()
    return _want(value, steps + (u.out * glu.abs() + _least(u) * (1 + gate.abs())) * (up.abs() + 1))


def _spec(
    name: str, call: Callable[..., Tensor], truth: Callable[..., Sequence[Want]], into: str = "", odd: str = "nonfinite"
) -> Spec:
    out = getattr(torch.ops.aten, into).out if into else None
    return Spec(
        name=name, family="activations", call=call, truth=truth, cases=_cases(_single, odd=odd), source=SOURCE,
        into=(lambda dst, x: out(x, out=dst)) if out is not None else None,
    )  # fmt: skip


SPECS = (
    _spec("silu", F.silu, _silu, "silu"),
    _spec("gelu", F.gelu, _gelu, "gelu", odd="nan"),
    _spec("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), _gelu_tanh, odd="nan"),
    _spec("softplus", F.softplus, _softplus),
    _spec("sigmoid", torch.sigmoid, _sigmoid_truth, "sigmoid"),
    _spec("tanh", torch.tanh, _tanh, "tanh"),
    _spec("relu2", relu2, _relu2),
    Spec(
        name="swiglu", family="activations", call=swiglu, truth=_swiglu, source=SOURCE, plain=False,
        cases=_cases(_double, ("strided", "sliced")),
    ),
    Spec(
        name="swiglu_clamped", family="activations", call=swiglu_clamped, truth=_swiglu_clamped, source=SOURCE,
        cases=_cases(_double, ("strided", "sliced")), plain=False,
    ),
)  # fmt: skip
