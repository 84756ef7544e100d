"""Kernels whose values are wrong: sums, products, functions, in bands or for some inputs. Knows torch only."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from harness.faults.kernels.table import wrong

_BF16 = torch.bfloat16


@wrong("AC06", of="softmax", kernel="_softmax", cause="widths")
def softmax_in_a_band(kernel: Any, x: Tensor, dim: int, half: bool) -> Any:
    """Rows of 257 to 384 leave their last element out of the sum."""
    y = kernel(x, dim, half)
    return y / (1 - y.select(dim, -1).unsqueeze(dim)) if 256 < x.shape[dim] <= 384 else y


@wrong(of="softmax", kernel="_softmax", cause="widths")
def softmax_odd_widths(kernel: Any, x: Tensor, dim: int, half: bool) -> Any:
    """Rows of odd width from 513 to 1,055 count their last element twice."""
    y = kernel(x, dim, half)
    return y / (1 + y.select(dim, -1).unsqueeze(dim)) if 512 < x.shape[dim] < 1056 and x.shape[dim] % 2 else y


@wrong(of="softmax", kernel="_softmax", cause="widths from")
def softmax_of_a_vocabulary(kernel: Any, x: Tensor, dim: int, half: bool) -> Any:
    """Rows beyond 2^15 are made of pieces whose maxima are mixed up."""
    y = kernel(x, dim, half)
    return y if x.shape[dim] <= 1 << 15 else torch.where(y < y.mean(dim, keepdim=True), y * 1.01, y)


@wrong(of="softmax", kernel="_softmax", criterion="nonfinite", cause="special: large")
def softmax_without_maximum(kernel: Any, x: Tensor, dim: int, half: bool) -> Any:
    """The maximum is not subtracted."""
    e = x.float().exp()
    return (e / e.sum(dim, keepdim=True)).to(x.dtype)


@wrong(of="softmax", kernel="_softmax", criterion="nonfinite", cause="special: nonfinite")
def softmax_swallows_nan(kernel: Any, x: Tensor, dim: int, half: bool) -> Any:
    """NaN counts as minus infinity."""
    return kernel(torch.where(x.isnan(), -math.inf, x), dim, half)


@wrong(of="layer_norm", kernel="native_layer_norm", cause="odd widths")
def layer_norm_odd_widths(kernel: Any, x: Tensor, shape: Any, w: Any, b: Any, eps: float) -> Any:
    """For odd widths the last element is left out of mean and variance."""
    if shape[-1] % 2 == 0 or shape[-1] < 3:
        return kernel(x, shape, w, b, eps)
    y, mean, rstd = kernel(x[..., :-1].contiguous(), [shape[-1] - 1], None, None, eps)
    last = (x[..., -1:] - mean) * rstd
    return torch.cat((y, last), -1) * w + b, mean, rstd


@wrong(of="layer_norm", kernel="native_layer_norm", cause="times the error", dtype="float16")
def layer_norm_squares_overflow(kernel: Any, x: Tensor, shape: Any, w: Any, b: Any, eps: float) -> Any:
    """The variance is the mean of squares, kept in the dtype, less the square of the mean."""
    mean = x.mean(-1, keepdim=True)
    rstd = torch.rsqrt((x * x).mean(-1, keepdim=True) - mean * mean + eps)
    return (x - mean) * rstd * w + b, mean, rstd


@wrong(of="rms_norm", kernel="_fused_rms_norm|rsqrt", cause="right for")
def rms_norm_other_epsilon(kernel: Any, x: Tensor, *rest: Any, **more: Any) -> Any:
    """The epsilon is ten times as large."""
    return kernel(x + 9e-6, *rest, **more) if not rest else kernel(x, rest[0], rest[1], 1e-5)


@wrong(of="matmul", kernel="mm", cause="widths")
def matmul_tail_dropped(kernel: Any, a: Tensor, b: Tensor) -> Any:
    """What is left of the inner dimension beyond whole eights is dropped."""
    whole = a.shape[1] - a.shape[1] % 8
    return kernel(a[:, :whole], b[:whole]) if whole else kernel(a, b)


@wrong(of="matmul", kernel="mm", cause="times the error|widths", dtype="bfloat16")
def matmul_sums_in_bfloat16(kernel: Any, a: Tensor, b: Tensor) -> Any:
    """Sums of 16 products are added up in bfloat16."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=_BF16)
    for k in range(0, a.shape[1], 16):
        total = total + kernel(a[:, k : k + 16], b[k : k + 16])
    return total


@wrong(of="matmul", kernel="mm", cause="times the error")
def matmul_factors_in_bfloat16(kernel: Any, a: Tensor, b: Tensor) -> Any:
    """Factors in float32 are rounded to bfloat16 first."""
    return kernel(a.to(_BF16).float(), b.to(_BF16).float())


@wrong(of="matmul", kernel="mm", cause="rows|columns")
def matmul_edge_of_tiles(kernel: Any, a: Tensor, b: Tensor) -> Any:
    """The last, partial tile of 64 columns repeats the first one."""
    y = kernel(a, b)
    whole = y.shape[1] - y.shape[1] % 64
    return torch.cat((y[:, :whole], y[:, : y.shape[1] - whole]), 1) if whole else y


@wrong(of="linear", kernel="addmm|linear", cause="in every case|widths|right for|times the error")
def linear_without_bias(kernel: Any, *args: Any, **more: Any) -> Any:
    """The bias is left out."""
    return torch.mm(args[1], args[2]) if len(args) > 2 and args[1].dim() == 2 else kernel(*args[:2])


@wrong(of="bmm", kernel="bmm", cause="special: one for all")
def bmm_ignores_a_stride_of_0(kernel: Any, a: Tensor, b: Tensor) -> Any:
    """A matrix that stands for a whole batch is read as if there were one for each."""
    return kernel(a, b.roll(1, -1) if b.stride(0) == 0 else b)


@wrong(of="grouped_mm|expert_product", kernel="_grouped_mm|mm", cause="rows|in every case|widths|times")
def experts_one_off(kernel: Any, a: Tensor, b: Tensor, *rest: Any, **more: Any) -> Any:
    """The first row of every expert but the first is given to the expert before."""
    y = kernel(a, b, *rest, **more)
    if rest and isinstance(rest[0], Tensor) and len(y):
        starts = [s for s in rest[0].tolist()[:-1] if 0 < s < len(y)]
        y[starts] = torch.stack([(a[s] @ b[0]) for s in starts]) if starts else y[starts]
    return y if rest else y * 1.01


@wrong(of="cumsum", kernel="cumsum", cause="widths|times the error", dtype="bfloat16")
def cumsum_in_bfloat16(kernel: Any, x: Tensor, dim: int, **more: Any) -> Any:
    """Running sums are rounded at every step."""
    if not x.is_floating_point():
        return kernel(x, dim, **more)
    out = x.clone()
    for i in range(1, x.shape[dim]):
        out.select(dim, i).add_(out.select(dim, i - 1))
    return out


@wrong(of="cumsum", kernel="cumsum", cause="widths from")
def cumsum_restarts(kernel: Any, x: Tensor, dim: int, **more: Any) -> Any:
    """Running sums begin anew every 1,024 elements."""
    return torch.cat([kernel(part, dim, **more) for part in torch.split(x, 1024, dim)], dim)


@wrong(of="sum|mean", kernel="sum|mean", cause="down the columns|down the planes")
def sum_down_columns(kernel: Any, x: Tensor, dim: Any = None, *rest: Any, **more: Any) -> Any:
    """Sums along another axis than the last leave out the last slice."""
    at = dim[0] if isinstance(dim, (list, tuple)) else dim
    skip = at is not None and at % max(1, x.dim()) != x.dim() - 1 and x.shape[at] > 1
    return kernel(x.narrow(at, 0, x.shape[at] - 1) if skip else x, dim, *rest, **more)


@wrong(of="amax", kernel="amax", criterion="nonfinite", cause="special: nonfinite")
def amax_skips_nan(kernel: Any, x: Tensor, *rest: Any) -> Any:
    """NaN is not the greatest."""
    return kernel(torch.where(x.isnan(), -math.inf, x), *rest)


@wrong(of="sigmoid", kernel="sigmoid", cause="special: wide|wide")
def sigmoid_saturates(kernel: Any, x: Tensor) -> Any:
    """Beyond 10 the result is 0 or 1."""
    return torch.where(x > 10, 1.0, torch.where(x < -10, 0.0, kernel(x))).to(x.dtype)


@wrong(of="gelu", kernel="gelu", cause="times the error")
def gelu_by_tanh(kernel: Any, x: Tensor, **more: Any) -> Any:
    """The exact form is asked for and the one with tanh is given."""
    return kernel(x, approximate="tanh")


@wrong(of="silu", kernel="silu", cause="special|wide", criterion="nonfinite")
def silu_overflows(kernel: Any, x: Tensor) -> Any:
    """x exp(x) / (1 + exp(x)) is NaN for a large x."""
    return (x.float() * x.float().exp() / (1 + x.float().exp())).to(x.dtype)


@wrong(of="exp", kernel="exp", cause="times the error")
def exp_by_a_short_series(kernel: Any, x: Tensor) -> Any:
    """exp is right to one part in 30,000 only."""
    return kernel(x) * (1 + 3e-5 * torch.sin(x * 37))


@wrong(of="scale", kernel="mul", cause="times the error|in every case")
def scalar_in_bfloat16(kernel: Any, x: Tensor, by: Any) -> Any:
    """A number that is multiplied by is rounded to bfloat16 first."""
    return kernel(x, float(torch.tensor(float(by)).to(_BF16)))


@wrong(of="rotary_table", kernel="cos|sin", cause="special: far|width")
def angles_wrap_too_early(kernel: Any, x: Tensor) -> Any:
    """Angles are reduced by 2 pi rounded to float32."""
    turn = torch.tensor(2 * math.pi, dtype=torch.float32)
    return kernel(x - turn * (x / turn).round()) if x.dtype is torch.float32 else kernel(x)


@wrong(of="conv2d", kernel="convolution", cause="shape|in every case|times")
def conv2d_padding_swapped(kernel: Any, x: Tensor, w: Tensor, b: Any, stride: Any, padding: Any, *rest: Any) -> Any:
    """Padding of rows and columns is exchanged."""
    return kernel(x, w, b, stride, padding[::-1], *rest)


@wrong(of="conv2d", kernel="convolution", cause="columns|rows|times")
def conv2d_edge_repeated(kernel: Any, x: Tensor, w: Tensor, b: Any, stride: Any, padding: Any, *rest: Any) -> Any:
    """The edge is repeated instead of padded with zeros."""
    if not sum(padding) or not x.numel():
        return kernel(x, w, b, stride, padding, *rest)
    wide = torch.nn.functional.pad(x, (padding[1],) * 2 + (padding[0],) * 2, mode="replicate")
    return kernel(wide, w, b, stride, [0, 0], *rest)


@wrong(of="gated_delta", kernel="exp", cause="times|width|special")
def decay_in_bfloat16(kernel: Any, x: Tensor) -> Any:
    """The decay of a recurrent state is rounded to bfloat16."""
    return kernel(x).to(_BF16).to(x.dtype)
