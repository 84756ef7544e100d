"""Softmax, running sums and reductions. Knows formulas and budgets; must not know devices.

exp(x - m) is right to |x - m| u, since the difference is rounded once; a sum of W positive terms to W u. A running sum
of n terms is right to n u of the sum of their sizes in any order. Source: Higham, section 3.1 and 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from harness.ops.arithmetic import Units
from harness.ops.case import Case, Given, Spec, Want
from harness.ops.inputs import ODD_ROWS, lay, long_widths, one, sweep, values

SOURCE = "Higham, Accuracy and Stability, 3.1 and 4.2; Blanchard, Higham and Higham 2021 for softmax"
_TINY = 2.0**-126


def _rows(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    rows = {"empty": 0, "many rows": 65539}.get(content, ODD_ROWS)
    size = 3 if content == "many rows" else size
    x = values(gen, dtype, (rows, size or 7), content) * (1 if content in ("large", "far from 0") else 3)
    if content == "masked":
        x[:, 1::2] = -math.inf
        x[-1] = -math.inf
    return Given(args=(lay(x, form), -1))


def _softmax_cases(full: bool) -> Iterator[Case]:
    contents = ("large", "masked", "nonfinite", "empty")
    yield from sweep(_rows, full=full, sizes=long_widths(full), contents=contents)
    yield one(_rows, 3, "contiguous", "many rows")
    for size in (7, 1025):
        yield one(_columns, size, "contiguous", "down the columns")


def _columns(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    return Given(args=(lay(values(gen, dtype, (size, 5), "normal"), form), 0))


def _softmax(u: Units, x: Tensor, dim: int) -> Sequence[Want]:
    below = x - x.amax(dim, keepdim=True)
    e = below.exp()
    value = e / e.sum(dim, keepdim=True)
    depth = below.nan_to_num(0.0, 0.0, 0.0).abs().clamp(max=200)
    worst = (depth + (value * depth).sum(dim, keepdim=True)).nan_to_num(0.0)
    kept = 2.02 * u.out if dim != -1 else 0.0  # down a column, libraries keep what they sum up in the dtype
    steps = (worst + 4) * u.inside + 2 * u.exp + x.shape[dim] * u.acc + kept
    nothing = torch.where(x.amax(dim, keepdim=True) == -math.inf, 0.0, value)  # NaN in torch, 0 on some devices
    return [Want(value=value, slack=steps * value.abs() + _TINY, also=nothing)]


def _log_softmax(u: Units, x: Tensor, dim: int) -> Sequence[Want]:
    top = x.amax(dim, keepdim=True)
    total = (x - top).exp().sum(dim, keepdim=True).log()
    value = x - top - total
    parts = (x - top).nan_to_num(0.0, 0.0, 0.0).abs() + total.nan_to_num(0.0).abs() + 1
    slack = (4 * u.inside + 2 * u.exp + x.shape[dim] * u.acc) * parts
    return [Want(value=value, slack=slack + 2.02 * u.out * (parts + top.nan_to_num(0.0, 0.0, 0.0).abs()))]


def running(u: Units, x: Tensor, dim: int) -> Sequence[Want]:
    """Return what a running sum must be; of integers exactly."""
    if not x.is_floating_point():
        return [Want(value=_summed(x, dim))]
    value, size = _summed(x, dim), _summed(x.abs(), dim)
    shape = [1] * x.dim()
    shape[dim] = -1
    count = torch.arange(1, x.shape[dim] + 1, dtype=torch.float64).view(shape)
    spread = count.sqrt() * u.acc * size
    return [Want(value=value, slack=count * u.acc * size, spread=spread)]


def _summed(x: Tensor, dim: int) -> Tensor:
    """Return running sums, one term after the other."""
    return torch.from_numpy(np.cumsum(x.numpy(), axis=dim))


def _cumsum_cases(full: bool) -> Iterator[Case]:
    sizes = long_widths(full)
    yield from sweep(_rows, full=full, sizes=sizes, contents=("far from 0", "nonfinite", "empty"))
    yield one(_columns, 1025, "contiguous", "down the columns")
    yield one(_whole, 1025, "contiguous", "int64")


def _whole(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    return Given(args=(lay(values(gen, torch.int64, (ODD_ROWS, size), content), form), -1))


def _reduced(u: Units, x: Tensor, dim: int, *, mean: bool = False) -> Sequence[Want]:
    width = x.shape[dim]
    with np.errstate(all="ignore"):
        value, size = (torch.from_numpy(np.asarray(part.numpy().sum(dim))) for part in (x, x.abs()))
    if mean:
        value, size = value / width, size / width
    rounded = u.inside * value.abs()
    return [Want(value=value, slack=width * u.acc * size + rounded, spread=width**0.5 * u.acc * size + rounded)]


def _extreme(u: Units, x: Tensor, dim: int) -> Sequence[Want]:
    return [Want(value=torch.from_numpy(x.numpy().max(dim)))]


def _reduce_cases(full: bool) -> Iterator[Case]:
    sizes = long_widths(full)
    yield from sweep(_rows, full=full, sizes=sizes, contents=("far from 0", "nonfinite", "empty", "many rows"))
    for size in (7, 1025):
        yield one(_columns, size, "contiguous", "down the columns")
    yield one(_planes, 33, "contiguous", "down the planes")


def _sum_cases(full: bool) -> Iterator[Case]:
    yield from _reduce_cases(full)
    yield one(_whole, 1025, "contiguous", "int64")


def _planes(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    """Three axes, the one in the middle reduced: as over heads, or over the choices of a token."""
    return Given(args=(lay(values(gen, dtype, (3, size, 17), "normal"), form), 1))


SPECS = (
    Spec(
        name="softmax", family="softmax", call=torch.softmax, truth=_softmax, cases=_softmax_cases, source=SOURCE,
        into=lambda out, x, dim: torch.ops.aten._softmax.out(x, dim, False, out=out),
    ),
    Spec(
        name="log_softmax", family="softmax", call=torch.log_softmax, truth=_log_softmax, cases=_softmax_cases,
        source=SOURCE,
    ),
    Spec(
        name="cumsum", family="sums", call=torch.cumsum, truth=running, cases=_cumsum_cases, source=SOURCE,
    ),
    Spec(
        name="sum", family="sums", call=torch.sum, truth=_reduced, cases=_sum_cases, source=SOURCE,
        into=lambda out, x, dim: torch.sum(x, dim, out=out), strided_into=True,
    ),
    Spec(
        name="mean", family="sums", call=torch.mean, truth=lambda u, x, dim: _reduced(u, x, dim, mean=True),
        cases=_reduce_cases, source=SOURCE,
    ),
    Spec(
        name="amax", family="sums", call=torch.amax, truth=_extreme, cases=_reduce_cases, source="equality",
    ),
)  # fmt: skip
