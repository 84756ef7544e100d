"""Memory that was never written: one constant, or what an initialiser draws. Knows numbers; no names, no files."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ENOUGH = 256
"""Values below which a distribution is not told."""
_DRAWN = "filled by initialisation (first random ones), or another tensor's"
_NEAR = 0.08
"""Relative distance of a deviation from the one that an initialiser draws with: 4096 values have one of 0.011."""


def constant_words(held: Tensor) -> str:
    """Say which one value nearly all of the wrong elements hold, in words after "memory holds"; "" if none."""
    flat = held.flatten().to(torch.float64)
    if bool((~flat.isfinite()).double().mean() >= 0.9):
        kind = "NaN" if bool(flat.isnan().double().mean() >= 0.9) else "infinity"
        return f"{kind}: never written, or the result of a scale that is none"
    usual = float(flat[:: max(1, flat.numel() // 4096)].mode().values)
    if int((flat == usual).sum()) * 10 < 9 * flat.numel():
        return ""
    return "zeros" if usual == 0 else f"the constant {usual:.4g}"


def unwritten_words(held: Tensor) -> str:
    """Say what a weight looks like that nothing filled, in words after "memory holds"; "" if like nothing known."""
    few = held.reshape(-1, held.shape[-1]) if held.dim() else held.reshape(1, 1)
    few = few[:: max(1, len(few) // 64)][:64, : 1 << 14].float()
    words = constant_words(few)
    if words:
        return words if ":" in words else f"{words}: never written, or still as it was made"
    rows = held.shape[-2] if held.dim() > 1 else 1
    return initialised_words(few, (rows, few.shape[1])) or "values of no checkpoint tensor"


def initialised_words(held: Tensor, shape: tuple[int, int]) -> str:
    """Say which initialiser the values look drawn by, in words after "memory holds"; "" if none.

    `shape`: rows and columns of the whole weight, from which initialisers take their bounds.
    """
    flat = held.flatten().to(torch.float64)
    if flat.numel() < _ENOUGH or not bool(flat.isfinite().all()):
        return ""
    spread, mean = float(flat.std()), float(flat.mean())
    if not spread or abs(mean) > 4 * spread / math.sqrt(flat.numel()):
        return ""
    kurtosis = float(((flat - mean) / spread).pow(4).mean())
    rows, columns = shape
    noise = 5 * math.sqrt(24 / flat.numel())
    if abs(kurtosis - 1.8) <= max(0.08, noise / 5):
        for bound, name in (
            (1 / math.sqrt(columns), "1/sqrt(inputs), the default of a linear layer"),
            (math.sqrt(6 / (rows + columns)), "sqrt(6 / (inputs + outputs)), Xavier's"),
            (math.sqrt(6 / columns), "sqrt(6 / inputs), Kaiming's"),
        ):
            if abs(spread * math.sqrt(3) / bound - 1) < _NEAR and float(flat.abs().max()) <= bound * 1.01:
                return f"values drawn evenly within {name}: {_DRAWN}"
    if abs(kurtosis - 3) <= max(0.3, noise):
        for deviation, name in (
            (0.02, "0.02"), (0.006, "0.006"), (1.0, "1"), (1 / math.sqrt(columns), "1/sqrt(inputs)"),
            (math.sqrt(2 / (5 * columns)), "sqrt(2 / (5 inputs))"), (math.sqrt(2 / (rows + columns)), "Xavier's"),
        ):  # fmt: skip
            if abs(spread / deviation - 1) < _NEAR:
                drawn = f"values drawn from a normal distribution of deviation {name}"
                return f"{drawn}: {_DRAWN}"
    return ""
