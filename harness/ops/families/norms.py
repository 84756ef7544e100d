"""Root-mean-square and layer norms over the last axis. Knows formulas and budgets; must not know devices.

A sum of W squares is right to W u of itself in any order, its root to half of that; scaling adds a few roundings, and
one more in the result's own dtype where the weight is multiplied after it. Source: Higham, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.ops.arithmetic import Units
from harness.ops.case import Given, Spec, Want
from harness.ops.inputs import ODD_ROWS, lay, sweep, values

SOURCE = "Higham, Accuracy and Stability, 3.1; Zhang and Sennrich 2019; Ba, Kiros and Hinton 2016"
EPS = 1e-6


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def rms_norm_plus_one(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * (1 + weight), in float32, rounded once."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1.0 + weight.float())).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias."""
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(sum(x^2) + eps), in float32, rounded once."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _inputs(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    rows = {"empty": 0, "many rows": 65539}.get(content, ODD_ROWS)
    size = 8 if content == "many rows" else size
    width = size or 7
    x = values(gen, dtype, (rows, width), content)
    if content == "zeros":
        x = x * 0
    weight = values(gen, dtype, (width,), "normal")
    return Given(args=(lay(x, form), weight, EPS))


def _with_bias(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    x, weight, eps = _inputs(gen, dtype, size, form, content).args
    return Given(args=(x, weight, values(gen, dtype, weight.shape, "normal"), eps))


def _rms_truth(u: Units, x: Tensor, weight: Tensor, eps: float) -> Sequence[Want]:
    value = x * (x.square().mean(-1, keepdim=True) + eps) ** -0.5 * weight
    return [_scaled(u, value, x.shape[-1])]


def _l2_truth(u: Units, x: Tensor, eps: float) -> Sequence[Want]:
    return [_scaled(u, x * (x.square().sum(-1, keepdim=True) + eps) ** -0.5, x.shape[-1])]


def _bare(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    x, _, eps = _inputs(gen, dtype, size, form, content).args
    return Given(args=(x, eps))


def _scaled(u: Units, value: Tensor, width: int) -> Want:
    size = value.abs()
    return Want(
        value=value, slack=(0.5 * width * u.acc + 8 * u.inside + 1.01 * u.out) * size,
        spread=(0.5 * width**0.5 * u.acc + 4 * u.inside + u.out) * size,
    )  # fmt: skip


def _layer_truth(u: Units, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Sequence[Want]:
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    var = centred.square().mean(-1, keepdim=True)
    scale = (var + eps) ** -0.5
    value = centred * scale * weight
    width = x.shape[-1]
    off = (width * u.acc + 2 * u.inside) * x.abs().mean(-1, keepdim=True)  # of the mean
    far = (1 + mean.square() / (var + eps)).sqrt()
    slack = off * scale * weight.abs() + ((width + 2) * u.acc * far + 8 * u.inside + u.out) * value.abs()
    return [Want(value=value + bias, slack=slack + (u.inside + u.out) * (value.abs() + bias.abs()))]


SPECS = (
    Spec(
        name="rms_norm", family="norms", call=rms_norm, truth=_rms_truth, source=SOURCE,
        cases=lambda full: sweep(
            _inputs, full=full, contents=("large", "tiny", "zeros", "nonfinite", "many rows", "empty")
        ),
    ),
    Spec(
        name="rms_norm_plus_one", family="norms", call=rms_norm_plus_one, source=SOURCE, plain=False,
        truth=lambda u, x, weight, eps: _rms_truth(u, x, 1.0 + weight, eps),
        cases=lambda full: sweep(_inputs, full=full, sizes=() if full else (7, 64, 129, 1025), contents=("large",)),
    ),
    Spec(
        name="l2_norm", family="norms", call=l2_norm, truth=_l2_truth, source=SOURCE, plain=False,
        cases=lambda full: sweep(
            _bare, full=full, sizes=() if full else (7, 64, 129), contents=("large", "zeros", "nonfinite", "empty")
        ),
    ),
    Spec(
        name="layer_norm", family="norms", call=layer_norm, truth=_layer_truth, source=SOURCE,
        cases=lambda full: sweep(
            _with_bias, full=full, contents=("large", "far from 0", "nonfinite", "many rows", "empty"),
        ),
    ),
)  # fmt: skip
