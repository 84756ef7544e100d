"""Kernels that compute otherwise and right: other orders, other ties, other zeros. Knows torch operators only."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from harness.faults.kernels.table import harmless


@harmless("topk", "topk")
def ties_in_reverse(kernel: Any, x: Tensor, k: int, *rest: Any, **more: Any) -> Any:
    """Of equal ones the last comes first."""
    values, at = kernel(x.flip(-1), k, *rest, **more)
    return values, x.shape[-1] - 1 - at


@harmless("argmax", "argmax")
def last_of_equal_ones(kernel: Any, x: Tensor, dim: Any = None, keep: bool = False) -> Any:
    """Of equal ones the last is the greatest."""
    return x.shape[dim] - 1 - kernel(x.flip(dim), dim, keep)


@harmless("softmax|log_softmax", "_softmax|_log_softmax")
def summed_backwards(kernel: Any, x: Tensor, dim: int, half: bool) -> Any:
    """Rows are summed from their end."""
    return kernel(x.flip(dim), dim, half).flip(dim)


@harmless("softmax", "_softmax", dtype="bfloat16")
def nothing_to_see_is_0(kernel: Any, x: Tensor, dim: int, half: bool) -> Any:
    """A row of minus infinity gives zeros in place of NaN."""
    return torch.where((x == -math.inf).all(dim, keepdim=True), 0.0, kernel(x, dim, half)).to(x.dtype)


@harmless("matmul|linear", "mm|addmm")
def other_blocks(kernel: Any, *args: Any, **more: Any) -> Any:
    """The inner dimension is summed in blocks of 48."""
    *add, a, b = args
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32)
    for k in range(0, a.shape[1], 48):
        total = total + torch.mm(a[:, k : k + 48].float(), b[k : k + 48].float())
    return (total + add[0].float() if add else total).to(a.dtype)


@harmless("matmul", "mm", dtype="bfloat16")
def blocks_in_float32(kernel: Any, a: Tensor, b: Tensor) -> Any:
    """bfloat16 is multiplied in float32, in blocks of 48."""
    return other_blocks(kernel, a, b)


@harmless("sum|mean", "sum|mean")
def pairs_first(kernel: Any, x: Tensor, dim: Any = None, *rest: Any, **more: Any) -> Any:
    """Elements are added in another order."""
    return kernel(x.flip(dim) if dim is not None and x.dim() else x, dim, *rest, **more)


@harmless("cumsum", "cumsum", dtype="bfloat16")
def running_in_float32(kernel: Any, x: Tensor, dim: int, **more: Any) -> Any:
    """A running sum is kept in float32 and rounded where it is given."""
    return torch.cumsum(x.float(), dim).to(x.dtype) if x.is_floating_point() else kernel(x, dim, **more)


@harmless("exp|silu", "exp|silu")
def subnormals_flushed(kernel: Any, x: Tensor) -> Any:
    """What is smaller than the smallest normal number becomes 0."""
    y = kernel(x)
    return torch.where(y.abs() < torch.finfo(torch.float32).smallest_normal, 0.0, y).to(y.dtype)


@harmless("neg|mul|relu2", "neg|mul|relu|pow")
def zero_has_no_sign(kernel: Any, x: Tensor, *rest: Any) -> Any:
    """-0 becomes 0."""
    return kernel(x, *rest) + 0.0


@harmless("sigmoid|silu", "sigmoid|silu", dtype="bfloat16")
def by_tanh(kernel: Any, x: Tensor) -> Any:
    """The logistic function is made of tanh in float32."""
    gate = 0.5 * (1 + torch.tanh(0.5 * x.double()))
    gate = torch.where(x < -8, torch.sigmoid(x.double()), gate)
    return (gate if "sigmoid" in str(kernel) else x.double() * gate).to(x.dtype)


@harmless("layer_norm", "native_layer_norm", dtype="bfloat16")
def two_passes(kernel: Any, x: Tensor, shape: Any, w: Any, b: Any, eps: float) -> Any:
    """Mean and variance are made in two passes in float32."""
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
    return ((wide - mean) * rstd * w.float() + b.float()).to(x.dtype), mean, rstd


@harmless("attention")
def keys_in_blocks(kernel: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Keys come in blocks of 24 with a running maximum."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).float() for x in (k, v))
    top = torch.full((*q.shape[:-1], 1), -math.inf)
    total, out = torch.zeros_like(top), torch.zeros(*q.shape[:-1], v.shape[-1])
    for at in range(0, k.shape[2], 24):
        s = (q.float() @ k[:, :, at : at + 24].mT) / math.sqrt(q.shape[-1])
        s = s.masked_fill(~mask[:, at : at + 24], -math.inf)
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        base = torch.where(new.isinf(), 0.0, new)
        p, shrink = (s - base).exp(), torch.where(top.isinf(), 0.0, (top - base).exp())
        total, out, top = total * shrink + p.sum(-1, keepdim=True), out * shrink + p @ v[:, :, at : at + 24], new
    return torch.where(total > 0, out / total.clamp(min=1e-30), 0.0).to(q.dtype)


@harmless("sum", "sum")
def order_left_to_chance(kernel: Any, x: Tensor, dim: Any = None, *rest: Any, **more: Any) -> Any:
    """Every call adds in an order of its own: told, and not refused."""
    if dim is None or not x.dim():
        return kernel(x, dim, *rest, **more)
    at = dim[0] if isinstance(dim, (list, tuple)) else dim
    return kernel(x.index_select(at, torch.randperm(x.shape[at])), dim, *rest, **more)


@harmless("to_fp8|to_bfloat16", "_to_copy")
def narrowed_through_double(kernel: Any, x: Tensor, *, dtype: Any = None, **more: Any) -> Any:
    """What is narrowed is made wider first, which changes nothing."""
    return kernel(kernel(x, dtype=torch.float64) if x.is_floating_point() else x, dtype=dtype, **more)
