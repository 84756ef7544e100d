"""The stated rules by which a buffer needs no tensor of the checkpoint: what a model computes for itself. No weights.

Each rule looks at the values themselves, so that a buffer is explained by what it holds and not by what it is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_CLOSE = 1e-4
"""Relative distance of a computed table from its rule. Source: float32 powers and cosines differ by parts in 1e6."""
_LARGEST = 1 << 22
"""Elements of a table that is looked at whole; of a larger one, the first rows."""
_USUAL_BASE = 10000.0


def rule_of(value: Tensor, config: Mapping[str, Any]) -> str:
    """Return the rule that explains a computed buffer, in words; "" where none does."""
    if not value.numel():
        return "no elements"
    if value.dim() and value.numel() > _LARGEST:
        value = value[: max(3, _LARGEST // max(1, value[0].numel()))]
    plain = value.detach().to(torch.float64) if value.dtype != torch.bool else value.to(torch.float64)
    if bool((plain == plain.flatten()[0]).all()):
        return f"a constant ({float(plain.flatten()[0]):.6g})"
    if not plain.isnan().any() and _triangular(plain):
        return "a causal mask"
    if not value.is_floating_point():
        counted = bool((plain == torch.arange(plain.shape[-1], dtype=torch.float64)).all())
        return "positions 0, 1, 2, .." if counted else "a table of whole numbers (places, not values)"
    if not bool(plain.isfinite().all()):
        return ""
    return _frequencies(plain, config) or _cosines(plain)


def _triangular(value: Tensor) -> bool:
    """Say whether a square holds one value on and below its diagonal, and another above."""
    if value.dim() < 2 or value.shape[-1] < 2 or value.shape[-1] < value.shape[-2]:
        return False
    square = value.reshape(-1, *value.shape[-2:])[0]
    lower = torch.ones_like(square, dtype=torch.bool).tril()
    below, above = square[lower], square[~lower]
    return bool((below == below[0]).all() and (above == above[0]).all() and below[0] != above[0])


def _frequencies(value: Tensor, config: Mapping[str, Any]) -> str:
    """Recognise rotary frequencies base^(-2i/d), or those that a configured scaling made of them."""
    if value.dim() != 1 or len(value) < 2 or not bool((value > 0).all() and (value.diff() <= 0).all()):
        return ""
    count = len(value)
    base = float(value[1] / value[0]) ** -count
    expected = value[0] * base ** (-torch.arange(count, dtype=torch.float64) / count)
    said = set(_numbers(config, ("theta", "rotary_emb_base", "rope_base")))
    if bool(((value - expected).abs() <= 3 * count * _CLOSE * expected).all()):
        known = any(abs(base / b - 1) < 0.01 for b in (*said, _USUAL_BASE))
        return f"rotary frequencies of base {base:.5g}" if known or not said else ""
    scaled = any(True for _ in _numbers(config, ("factor", "scaling", "original_max_position")))
    return "rotary frequencies, scaled as the configuration says" if scaled else ""


def _numbers(config: Mapping[str, Any], words: tuple[str, ...], depth: int = 0) -> Iterator[float]:
    for key, value in config.items():
        if isinstance(value, Mapping) and depth < 4:
            yield from _numbers(value, words, depth + 1)
        elif any(w in key for w in words) and isinstance(value, (int, float)) and value > 1:
            yield float(value)


def _cosines(value: Tensor) -> str:
    """Recognise cosines and sines of positions times frequencies: their second row follows from their first."""
    rows = value.reshape(-1, value.shape[-1]) if value.dim() > 1 else value[None]
    if len(rows) < 3 or float(rows.abs().max()) > 1 + _CLOSE:
        return ""
    zero, one, two = rows[0], rows[1], rows[2]
    if bool((zero == 1).all()) and bool((two - (2 * one * one - 1)).abs().max() <= 0.02):
        return "cosines of positions times frequencies"
    double = 2 * (one * (1 - one * one).clamp(min=0).sqrt()).abs()
    if bool((zero == 0).all()) and bool((two.abs() - double).abs().max() <= 0.02):
        return "sines of positions times frequencies"
    return ""
