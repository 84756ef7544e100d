"""Signed projection slopes: error that is not noise but a share of the signal. Knows tensors; must not know limits.

Noise has no correlation with the signal that it sits on; an error of +1 % in a head or an expert has a slope of 0.01,
long before it moves a norm. A slope counts only as far as it lies beyond its confidence interval, which is wide enough
for the number of slopes that are looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FAMILY_RATE = 1e-3
"""Chance that noise alone puts any slope of one family beyond its interval."""
SPREAD = 8.0
"""Elements of one token that carry as much as one independent element. Source: errors inside a token are correlated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slopes:
    """Slopes and their standard errors, float64, each [G]; `samples` is what each rests on (tokens), [G]."""

    value: Tensor
    error: Tensor
    samples: Tensor

    def beyond(self, *, honest: Tensor, tests: int) -> Tensor:
        """Return by how much each slope lies beyond its interval and what honest runs show, [G]; 0 where it does not.

        `honest` [G] are the greatest absolute slopes of the floors. A NaN slope stays NaN.
        """
        z = torch.tensor([_sigmas(tests, int(n)) for n in self.samples], dtype=torch.float64)
        return (self.value.abs() - honest - z * self.error).clamp(min=0)


def _sigmas(tests: int, samples: int) -> float:
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


def channel_slopes(*, actual: Tensor, expected: Tensor, weight: Tensor, groups: int) -> Slopes:
    """Return the slope of each group of consecutive channels, standard errors clustered by token.

    Shapes: actual, expected [T, E]; weight [T], one over a token's honest squared error; the result [groups].
    """
    error, signal = _grouped(actual, expected, groups)
    over, under = (weight[:, None] * x for x in (error, signal))
    return _clustered(over, under)


def position_slopes(*, actual: Tensor, expected: Tensor, weight: Tensor, buckets: int) -> Slopes:
    """Return the slope of each of `buckets` stretches of equally many tokens. Shapes: as `channel_slopes`."""
    error, signal = _grouped(actual, expected, 1)
    over, under = weight * error[:, 0], weight * signal[:, 0]
    which = torch.arange(len(over)) * buckets // len(over)
    member = torch.nn.functional.one_hot(which, buckets).to(torch.float64)
    return _clustered(member * over[:, None], member * under[:, None])


def _grouped(actual: Tensor, expected: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return the inner products error x signal and signal x signal by token and group, each [T, groups]."""
    e = expected.to(torch.float64)
    error = (actual.to(torch.float64) - e) * e
    shape = (len(e), groups, -1)
    return error.reshape(shape).sum(dim=-1), e.square().reshape(shape).sum(dim=-1)


def _clustered(over: Tensor, under: Tensor) -> Slopes:
    """Return sum(over) / sum(under) by column, with the standard error of clusters that are rows. Shapes: [T, G]."""
    total = under.sum(dim=0)
    value = torch.where(total > 0, over.sum(dim=0) / total, torch.zeros_like(total))
    samples = (under > 0).sum(dim=0)
    spread = (over - value * under).square().sum(dim=0) * samples / (samples - 1).clamp(min=1)
    error = torch.where(total > 0, spread.sqrt() / total, torch.zeros_like(total))
    return Slopes(value=value, error=torch.where(samples > 1, error, torch.full_like(error, math.inf)), samples=samples)


def joint_slopes(*, error: Tensor, parts: Tensor, owner: Tensor, weight: Tensor, owners: int) -> Slopes:
    """Return the slope of each owner's part of a sum, all fitted together.

    The model: error[t] is the sum over k of slope[owner[t, k]] times parts[t, k]. Owners that share tokens are told
    apart, because their parts point in different directions.
    Shapes: error [T, E]; parts [T, K, E]; owner [T, K], -1 for none; weight [T]; the result [owners].
    """
    scale = weight.sqrt()
    e = error.to(torch.float64) * scale[:, None]
    p = parts.to(torch.float64) * scale[:, None, None]
    gram, against = torch.zeros(owners, owners, dtype=torch.float64), torch.zeros(owners, dtype=torch.float64)
    known = owner >= 0
    ids = owner.clamp(min=0)
    p = p * known[..., None]
    inner = p @ p.transpose(1, 2)
    rows, columns = ids[:, :, None].expand_as(inner), ids[:, None, :].expand_as(inner)
    gram.index_put_((rows.reshape(-1), columns.reshape(-1)), inner.reshape(-1), accumulate=True)
    against.index_add_(0, ids.reshape(-1), (p @ e[:, :, None]).reshape(-1))
    inverse = torch.linalg.pinv(gram, hermitian=True)
    value = inverse @ against
    residual = e - (p * value[ids][..., None]).sum(dim=1)
    used = gram.diagonal() > 0
    freedom = max(1.0, residual.numel() / SPREAD - float(used.sum()))
    sigma = residual.square().sum() / freedom
    return Slopes(
        value=value,
        error=torch.where(used, (sigma * inverse.diagonal().clamp(min=0)).sqrt(), math.inf),
        samples=torch.full((owners,), int(freedom) + 1),
    )


def greatest(slopes: list[Slopes], like: Slopes) -> Tensor:
    """Return the greatest absolute slope of several honest runs by place, zeros without any. Shape: as `like.value`."""
    return torch.stack([torch.zeros_like(like.value), *(s.value.abs() for s in slopes)]).amax(dim=0)
