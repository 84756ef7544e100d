"""Signed projection slopes: error that is not noise but a share of the signal. Knows tensors; must not know limits.

Noise has no correlation with the signal that it sits on; an error of +1 % in a head or an expert has a slope of 0.01,
long before it moves a norm. A slope counts only as far as it lies beyond its confidence interval, which is wide enough
for the number of slopes that are looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

FAMILY_RATE = 1e-3
"""Chance that noise alone puts any slope of one family beyond its interval."""
SPREAD = 8.0
"""Elements of one token that carry as much as one independent element. Source: errors inside a token are correlated."""
_BLOCK_ELEMENTS = 1 << 17
"""Elements of parts worked on at a time, so that they stay in a core's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slopes:
    """Slopes and their standard errors, float64, each [S, G] of S sides, or [G] of one.

    `samples` [G] is what each rests on (tokens).
    """

    value: Tensor
    error: Tensor
    samples: Tensor

    def beyond(self, *, honest: Tensor, tests: int) -> Tensor:
        """Return by how much each slope lies beyond its interval and what honest runs show, [G]; 0 where it does not.

        `honest` [G] are the greatest absolute slopes of the floors. A NaN slope stays NaN.
        """
        z = torch.tensor([sigmas(tests, int(n)) for n in self.samples.tolist()], dtype=torch.float64)
        return (self.value.abs() - honest - z * self.error).clamp(min=0)


@lru_cache(maxsize=1 << 12)
def sigmas(tests: int, samples: int) -> float:
    """Return the two-sided quantile of Student's t for `tests` tests at the family's rate.

    Source: Abramowitz & Stegun 26.2.23 (normal quantile) and 26.7.5 (expansion of t about it).
    """
    tail = math.sqrt(-2.0 * math.log(FAMILY_RATE / (2.0 * max(1, tests))))
    z = tail - (2.515517 + 0.802853 * tail + 0.010328 * tail**2) / (
        1 + 1.432788 * tail + 0.189269 * tail**2 + 0.001308 * tail**3
    )
    freedom = max(1, samples - 1)
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return z + first + second


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Inner products error x signal and signal x signal by token and group of channels, float64.

    Shapes: error [S, T, G] of S sides; signal [T, G].
    """

    error: Tensor
    signal: Tensor

    def whole(self) -> Products:
        """Return those of all channels together: one group."""
        return Products(error=self.error.sum(dim=-1, keepdim=True), signal=self.signal.sum(dim=-1, keepdim=True))

    def stretches(self, count: int) -> Products:
        """Return those of one group on `count` stretches of equally many tokens, one column each, zero elsewhere."""
        member = _membership(len(self.signal), count)
        return Products(error=member * self.error, signal=member * self.signal)


@lru_cache(maxsize=64)
def _membership(tokens: int, count: int) -> Tensor:
    which = torch.arange(tokens) * count // tokens
    return torch.nn.functional.one_hot(which, count).to(torch.float64)


def group_slopes(products: Products, *, weight: Tensor) -> Slopes:
    """Return the slope of each group, sum(error) / sum(signal), with the standard error of clusters that are tokens.

    Shapes: weight [T]; the result [S, G].
    """
    over, under = weight[:, None] * products.error, weight[:, None] * products.signal
    total = under.sum(dim=0)
    value = torch.where(total > 0, over.sum(dim=1) / total, 0.0)
    samples = (under > 0).sum(dim=0)
    residual = over.sub_(value[:, None] * under)
    spread = residual.square_().sum(dim=1) * samples / (samples - 1).clamp(min=1)
    error = torch.where(total > 0, spread.sqrt() / total, 0.0)
    return Slopes(value=value, error=torch.where(samples > 1, error, math.inf), samples=samples)


def joint_slopes(*, error: Tensor, parts: Tensor, owner: Tensor, weight: Tensor, owners: int) -> Slopes:
    """Return the slope of each owner's part of a sum, all fitted together.

    The model: error[s, t] is the sum over k of slope[s, owner[t, k]] times parts[t, k]. Owners that share tokens are
    told apart, because their parts point in different directions. Inner products are made in float32 where parts and
    errors are; a fit in float64 gives slopes that differ by a millionth of their own interval.
    Shapes: error [S, T, E] of S sides; parts [T, K, E]; owner [T, K], -1 for none; weight [T]; the result [S, owners].
    """
    sides, choices = len(error), parts.shape[1]
    known, ids = owner >= 0, owner.clamp(min=0)
    inner = _inner_products(error, parts, weight)
    among = inner[:, :choices, :choices] * (known[:, :, None] & known[:, None, :])
    pairs = ids[:, :, None] * owners + ids[:, None, :]
    gram = torch.zeros(owners * owners, dtype=torch.float64)
    gram = gram.index_add_(0, pairs.reshape(-1), among.reshape(-1)).reshape(owners, owners)
    against = torch.zeros(owners, sides, dtype=torch.float64)
    against.index_add_(0, ids.reshape(-1), (inner[:, :choices, choices:] * known[..., None]).reshape(-1, sides))
    inverse = torch.linalg.pinv(gram, hermitian=True)
    value = inverse @ against
    power = inner[:, choices:, choices:].diagonal(dim1=1, dim2=2).sum(dim=0)
    left = (power - (value * against).sum(dim=0)).clamp(min=0)  # what the fit does not explain, at its optimum
    used = gram.diagonal() > 0
    freedom = max(1.0, error[0].numel() / SPREAD - float(used.sum()))
    spread = (left[:, None] / freedom * inverse.diagonal().clamp(min=0)).sqrt()
    uncertain = torch.where(used, spread, math.inf)
    return Slopes(value=value.T, error=uncertain, samples=torch.full((owners,), int(freedom) + 1))


def _inner_products(error: Tensor, parts: Tensor, weight: Tensor) -> Tensor:
    """Return by token the inner products of its K parts and S errors with each other, weighted: [T, K + S, K + S]."""
    (tokens, choices, width), count = parts.shape, parts.shape[1] + len(error)
    step = max(1, _BLOCK_ELEMENTS // max(1, count * width))
    both = torch.empty(min(step, tokens), count, width, dtype=error.dtype)
    inner = torch.empty(tokens, count, count, dtype=torch.float64)
    for start in range(0, tokens, step):
        block = both[: min(step, tokens - start)]
        block[:, :choices] = parts[start : start + step]
        block[:, choices:] = error[:, start : start + step].transpose(0, 1)
        inner[start : start + step] = block @ block.transpose(1, 2)
    return inner * (weight / weight.max().clamp(min=1e-300))[:, None, None]
