"""Structure that noise does not have: a mean of its own sign, a size that rises. Knows tensors; must not know limits.

Both are told in units of the floor, and count only as far as they lie beyond an interval that is wide enough for the
number of places that are looked at (the same family's rate as slopes).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.metrics.slopes import sigmas

CLUSTERS = 64
"""Most samples that a mean's spread is taken from: longer sequences are cut into so many stretches, one sample each."""
SPLITS = 16
"""Most places at which an error is asked whether it begins there."""
FEWEST_BESIDE = 8
"""Tokens on each side of a place where an error may begin; half of them where there are fewer than twice as many."""
OUTLIER = 4.0
"""Token errors count as at most so many times the median one: a single token is no trend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beyond:
    """An effect [G] in units of the floor, and its interval [G]: `effect - interval` is what noise does not explain."""

    effect: Tensor
    interval: Tensor

    @property
    def excess(self) -> Tensor:
        """Return effect minus interval, never below 0; NaN stays NaN."""
        return (self.effect - self.interval).clamp(min=0)


def clustered(z: Tensor) -> Tensor:
    """Return rows [T, E] as at most `CLUSTERS` rows, each the mean of a stretch of equally many."""
    tokens = len(z)
    if tokens <= CLUSTERS:
        return z
    which = torch.arange(tokens) * CLUSTERS // tokens
    total = torch.zeros(CLUSTERS, z.shape[1], dtype=z.dtype).index_add_(0, which, z)
    return total / torch.bincount(which, minlength=CLUSTERS)[:, None].to(z.dtype)


def mean_by_channel(z: Tensor, *, tests: int) -> Beyond:
    """Return the absolute mean error of each channel and its interval. Shapes: z [S, E], in floors; the result [E]."""
    samples = len(z)
    spread = (z.double().var(dim=0) / samples).sqrt()
    return Beyond(effect=z.double().mean(dim=0).abs(), interval=sigmas(tests, samples) * spread)


def mean_by_group(z: Tensor, *, groups: int, tests: int) -> Beyond:
    """Return the root mean square of the mean errors of each group of channels, and its interval, [G].

    A mean error in many channels at once shows far below what one channel tells. Under noise alone, samples x |mean|^2
    over the variance is chi-square with as many degrees of freedom as the group has independent directions, which are
    counted from how alike the errors of two samples are.
    Source: Satterthwaite's degrees of freedom; Wilson & Hilferty's quantile, its normal one widened as Student's t.
    """
    samples, width = z.shape
    mean = z.double().mean(dim=0)
    inner = (z - mean.to(z.dtype)).reshape(samples, groups, -1).transpose(0, 1)
    alike = torch.bmm(inner, inner.transpose(1, 2)).double()
    own = alike.diagonal(dim1=1, dim2=2)
    total = own.sum(dim=1) / (samples - 1)
    cross = (alike.square().sum(dim=(1, 2)) - own.square().sum(dim=1)) / (samples * (samples - 1))
    # No error at all has one direction: 0 / 0 is no number.
    freedom = (total.square() / cross.clamp(min=1e-300)).clamp(min=1.0, max=float(width // groups))
    spread = 2 / (9 * freedom)
    quantile = (1 - spread + sigmas(tests, samples) * spread.sqrt()) ** 3
    size = mean.square().reshape(groups, -1)
    noise = total / samples
    return Beyond(
        effect=size.mean(dim=1).sqrt(), interval=(quantile * noise / size.shape[1]).sqrt(),
    )  # fmt: skip


def honest_mean(z: Tensor, *, groups: int) -> Tensor:
    """Return the root mean square of the mean errors of each group, [G], without what chance alone gives."""
    samples = len(z)
    size = z.double().mean(dim=0).square() - z.double().var(dim=0) / samples
    return size.reshape(groups, -1).mean(dim=1).clamp(min=0).sqrt()


def rise(ratio: Tensor, *, splits: Tensor, tests: int) -> Beyond:
    """Return by how much the mean token error is larger from each split on than before it, [K].

    An error that grows steadily shows as well, from the middle on. Shapes: ratio [T], token errors in floors; splits
    [K]. The spread is that of tokens about the means of both sides.
    """
    y = _tamed(ratio)
    tokens = len(y)
    sums = torch.cat([y.new_zeros(1), y.cumsum(0)])
    before, after = splits.double(), tokens - splits.double()
    low, high = sums[splits] / before, (sums[-1] - sums[splits]) / after
    rest = (y.square().sum() - before * low.square() - after * high.square()).clamp(min=0) / (tokens - 2)
    spread = (rest * (1 / before + 1 / after)).sqrt()
    return Beyond(effect=high - low, interval=sigmas(tests * SPLITS, tokens - 1) * spread)


def splits_of(tokens: int) -> Tensor:
    """Return where errors may begin: at most `SPLITS` places, each with enough tokens before and after it."""
    first = min(FEWEST_BESIDE, tokens // 2)
    last = tokens - first
    count = min(SPLITS, last - first + 1)
    return torch.linspace(first, last, count, dtype=torch.float64).round().long()


def _tamed(ratio: Tensor) -> Tensor:
    """Return token errors with outliers cut, so that one ill-conditioned token is no trend; NaN stays NaN."""
    y = ratio.double()
    most = OUTLIER * y.quantile(0.5)
    return torch.where(y > most, most, y)
