"""Rotary embedding: halves or pairs, on all or part of a head, and its table. Must not know devices.

Each value is two products and a sum; composed ones round each in the result's dtype. An angle is a product in float32,
so that its error grows with the position. Source: Su et al. 2021.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.ops.arithmetic import Units
from harness.ops.case import Given, Spec, Want
from harness.ops.inputs import lay, sweep, values

SOURCE = "Su et al. 2021; count of roundings"


def rotary_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate features i and i + R/2 of the first R features of each head. x [T, H, D], cos and sin [T, R/2]."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cos[:, None], sin[:, None]
    return torch.cat((a * c - b * s, b * c + a * s, rest), dim=-1)


def rotary_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate features 2i and 2i + 1 of the first R features of each head. x [T, H, D], cos and sin [T, R/2]."""
    width = 2 * cos.shape[-1]
    a, b = x[..., 0:width:2], x[..., 1:width:2]
    c, s = cos[:, None], sin[:, None]
    turned = torch.stack((a * c - b * s, b * c + a * s), dim=-1).flatten(-2)
    return torch.cat((turned, x[..., width:]), dim=-1)


def rotary_table(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position * frequency, in float32. positions [T] int64, frequencies [F] float32."""
    angle = positions.float()[:, None] * frequencies[None]
    return angle.cos(), angle.sin()


def _heads(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    tokens, width = (0 if content == "empty" else size), 12
    x = values(gen, dtype, (tokens, 3, width + (7 if content == "partial" else 0)))
    angle = torch.arange(tokens, dtype=torch.float64)[:, None] * 0.7 ** torch.arange(width // 2, dtype=torch.float64)
    return Given(args=(lay(x, form), angle.cos().to(dtype), angle.sin().to(dtype)))


def _turned(u: Units, x: Tensor, cos: Tensor, sin: Tensor, *, pairs: bool) -> Sequence[Want]:
    value, slack = x.clone(), torch.zeros_like(x)
    for i in range(cos.shape[-1]):
        j, k = (2 * i, 2 * i + 1) if pairs else (i, i + cos.shape[-1])
        c, s = cos[:, None, i], sin[:, None, i]
        value[..., j] = x[..., j] * c - x[..., k] * s
        value[..., k] = x[..., k] * c + x[..., j] * s
        for at, other in ((j, k), (k, j)):
            slack[..., at] = 1.02 * u.out * ((x[..., at] * c).abs() + (x[..., other] * s).abs())
    return [Want(value=value, slack=slack + (2.0**-24 if u.out == 2.0**-11 else 0.0))]


def _positions(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    first = 1_000_000 if content == "far" else 0
    frequencies = (10000.0 ** -(torch.arange(8, dtype=torch.float64) / 8)).float()
    return Given(args=(torch.arange(first, first + size), frequencies))


def _table(u: Units, positions: Tensor, frequencies: Tensor) -> Sequence[Want]:
    angle = positions.double()[:, None] * frequencies[None]
    slack = 1.5 * 2.0**-24 * angle.abs() + u.exp + 2.0**-23
    return [Want(value=angle.cos(), slack=slack), Want(value=angle.sin(), slack=slack)]


SPECS = (
    *(
        Spec(
            name=name, family="rotary", call=call, source=SOURCE, plain=False,
            truth=lambda u, x, cos, sin, pairs=pairs: _turned(u, x, cos, sin, pairs=pairs),
            cases=lambda full: sweep(
                _heads, full=full, sizes=(1, 7, 64, 129) if full else (1, 17), contents=("partial", "empty"), base=9,
            ),
        )
        for name, call, pairs in (("rotary_half", rotary_half, False), ("rotary_pairs", rotary_pairs, True))
    ),
    Spec(
        name="rotary_table", family="rotary", call=rotary_table, truth=_table, source=SOURCE, plain=False,
        cases=lambda full: sweep(_positions, full=full, sizes=(1, 129), contents=("far",), forms=("contiguous",)),
    ),
)  # fmt: skip
