"""One tap of both sides as matrices, and what a hypothesis about it is. Knows tensors; no taps, traces or limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One tap of both sides, [T, E] float64. `heads` 0 if unknown.

    `others` are the reference's own values elsewhere, of the same shape, by tap; `inputs` names those of them that the
    unit was given. `around` are its values earlier in the unit around this one, [T, any width]. `chosen` holds a choice
    made there: by tap, what was chosen from [T, N], and the ids [T, K] of what was chosen. `parts` [T, K, C] are the
    terms that the expected values are the sum of, at every `part_step`-th channel; `owner` [T, K] whose they are.
    """

    actual: Tensor
    expected: Tensor
    heads: int = 0
    others: Mapping[str, Tensor] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    around: Mapping[str, Tensor] = field(default_factory=dict)
    chosen: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    parts: Tensor | None = None
    owner: Tensor | None = None
    part_step: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A hypothesis in words, and the share of the error's norm that is left over under it (0 explains everything)."""

    words: str
    left: float


Made = Iterator[tuple[str, Tensor, Tensor]]
"""Words, what the expected values become, and the tokens [T], or the values [T, E], that this is tried on."""


def every(matrix: Matrix) -> Tensor:
    """Return every token."""
    return torch.ones(len(matrix.actual), dtype=torch.bool)


def odd(matrix: Matrix) -> Tensor:
    """Return every second token; a pattern is fitted on the others."""
    return torch.arange(len(matrix.actual)) % 2 == 1


def odd_channels(matrix: Matrix) -> Tensor:
    """Return every second channel of all tokens, [T, E]."""
    return (torch.arange(matrix.actual.shape[1]) % 2 == 1).expand_as(matrix.actual)


def factor_words(ratio: float) -> str:
    """Return a factor as a person says it."""
    if abs(ratio + 1) < 1e-2:
        return "-1 times (the sign is turned)"
    return f"{ratio:.4g} times"


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return ||actual - expected|| / ||expected||."""
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-300))
