"""Operators that the CPU has not in float64, or not at all, by their formula. Knows torch operators only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor


def grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Multiply the rows up to each end in `offs` by the matrix of their group. Shapes: a [T, K], b [G, K, N]."""
    if a.dim() != 2 or b.dim() != 3 or offs is None or bias is not None:
        raise NotImplementedError("a grouped product of other shapes than rows by groups")
    wide = a.dtype if a.dtype is torch.float64 else torch.float32
    out = torch.zeros(a.shape[0], b.shape[2], dtype=wide)
    start = 0
    for group, end in enumerate(offs.tolist()):
        out[start:end] = a[start:end].to(wide) @ b[group].to(wide)
        start = end
    return out.to(a.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """Return softmax(q k^T scale + bias) v. Shapes: [B, H, T, D]; keys may have fewer heads."""
    wide = q.dtype if q.dtype is torch.float64 else torch.float32
    times = q.shape[1] // k.shape[1]
    k, v = (x.to(wide).repeat_interleave(times, 1) for x in (k, v))
    scores = q.to(wide) @ k.transpose(-1, -2) * (scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
    if bias is not None:
        scores = scores + bias.to(wide)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v).to(q.dtype)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, *_: Any, scale: Any = None, **__: Any
) -> Tensor:
    _no_dropout(dropout)
    return attention(q, k, v, None, causal, scale)


def _with_bias(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, _: bool, dropout: float = 0.0, causal: bool = False, *__: Any,
    scale: Any = None, **___: Any,
) -> Tensor:  # fmt: skip
    _no_dropout(dropout)
    return attention(q, k, v, bias, causal, scale)


def _overrideable(
    q: Tensor, k: Tensor, v: Tensor, bias: Any = None, dropout: float = 0.0, causal: bool = False, *_: Any,
    scale: Any = None, **__: Any,
) -> Tensor:  # fmt: skip
    _no_dropout(dropout)
    return attention(q, k, v, bias, causal, scale)


def _no_dropout(share: float) -> None:
    if share:
        raise NotImplementedError("attention with dropout draws random numbers")


OTHERWISE: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        "_grouped_mm": grouped_mm,
        "_scaled_dot_product_flash_attention": _flash,
        "_scaled_dot_product_efficient_attention": _with_bias,
        "_scaled_dot_product_cudnn_attention": _with_bias,
        "_scaled_dot_product_fused_attention_overrideable": _overrideable,
    }
)
"""Formulas by the plain name of an operator; they return what is judged, which is the first output."""
