"""Distributions over the vocabulary and greedy tokens. Knows logits; must not know taps, traces or limits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def kl_nats(*, actual: Tensor, expected: Tensor) -> Tensor:
    """Return KL(expected || actual) of each row, in nats. Shapes: logits [T, V]; the result [T], float64."""
    rows = []
    for start in range(0, expected.shape[0], 64):
        a, e = actual[start : start + 64], expected[start : start + 64]
        log_a, log_e = a.to(torch.float64).log_softmax(dim=-1), e.to(torch.float64).log_softmax(dim=-1)
        rows.append((log_e.exp() * (log_e - log_a)).nan_to_num(nan=torch.nan, posinf=torch.inf).sum(dim=-1))
    return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.float64)


def kl_nats_per_token(*, actual: Tensor, expected: Tensor) -> float:
    """Return the mean over tokens of KL(expected || actual), in nats: summed over the vocabulary, never averaged."""
    return float(kl_nats(actual=actual, expected=expected).mean())


def top1_agreement(*, actual: Tensor, expected: Tensor) -> float:
    """Return the share of rows whose largest logit is the same. Shapes: [T, V]."""
    return float((actual.argmax(dim=-1) == expected.argmax(dim=-1)).to(torch.float64).mean())


def padding_probability(logits: Tensor, *, vocab: int) -> float:
    """Return the largest probability that a row gives to columns from `vocab` on, which stand for no token.

    Shapes: logits [T, V]. 0 where there are none, or where they are masked.
    """
    if logits.shape[-1] <= vocab:
        return 0.0
    return float(logits.to(torch.float64).softmax(dim=-1)[..., vocab:].sum(dim=-1).max())


def greedy_margin_z(
    *, actual: Sequence[int], expected: Sequence[int], logits: Tensor, uncertainty: float
) -> tuple[float, int]:
    """Return how far the first differing greedy token is outside what the logits' uncertainty explains, and its index.

    `logits` [n, V] are the oracle's own, row i the one that chose `expected[i]`. After the first difference the two
    texts go different ways and nothing more can be said. Equal texts give (0, their length); a text that ends early
    without choosing another token gives infinity.
    """
    for i, (a, e) in enumerate(zip(actual, expected, strict=False)):
        if a == e:
            continue
        if i >= logits.shape[0] or not 0 <= a < logits.shape[1]:
            return math.inf, i
        gap = float(logits[i, e].to(torch.float64) - logits[i, a].to(torch.float64))
        if gap <= 0:
            return 0.0, i
        return (gap / uncertainty if uncertainty else math.inf), i
    shorter = min(len(actual), len(expected))
    return (0.0 if len(actual) == len(expected) else math.inf), shorter
