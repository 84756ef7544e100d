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

from harness.metrics.real import is_narrow

FAMILY_RATE = 1e-3
"""Chance that noise alone puts any slope of one family beyond its interval."""
SPREAD = 8.0
"""Elements of one token that carry as much as one independent element. Source: errors inside a token are correlated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slopes:
    """Slopes and their standard errors, float64, each [G] (or [S, G] of several sides at once).

    `samples` [G] is what each rests on (tokens).
    """

    value: Tensor
    error: Tensor
    samples: Tensor

    def beyond(self, *, honest: Tensor, tests: int) -> Tensor:
        """Return by how much each slope lies beyond its interval and what honest runs show, [G]; 0 where it does not.

        `honest` [G] are the greatest absolute slopes of the floors. A NaN slope stays NaN.
        """
        z = torch.tensor([_sigmas(tests, int(n)) for n in self.samples.tolist()], dtype=torch.float64)
        return (self.value.abs() - honest - z * self.error).clamp(min=0)


@lru_cache(maxsize=1 << 12)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Inner products error x signal and signal x signal by token and group of channels, float64.

    Shapes: error [T, G], or [S, T, G] of several sides; signal [T, G].
    """

    error: Tensor
    signal: Tensor

    def whole(self) -> Products:
        """Return those of all channels together: one group."""
        return Products(error=self.error.sum(dim=-1, keepdim=True), signal=self.signal.sum(dim=-1, keepdim=True))

    def stretches(self, count: int) -> Products:
        """Return those of one group on `count` stretches of equally many tokens, one column each, zero elsewhere."""
        tokens = len(self.signal)
        which = torch.arange(tokens) * count // tokens
        member = torch.nn.functional.one_hot(which, count).to(torch.float64)
        return Products(error=member * self.error, signal=member * self.signal)


def inner_products(
    *, actual: Tensor, expected: Tensor, groups: int, signal: Tensor | None = None, narrow: bool | None = None
) -> Products:
    """Return the inner products by token and group. `signal` are those of the same expected values, where known."""
    narrow = is_narrow(expected) if narrow is None else narrow
    work = torch.float32 if narrow and actual.dtype is not torch.float64 else torch.float64
    e, shape = expected.to(work), (len(expected), groups, -1)
    error = (actual.to(work) - e).mul_(e).reshape(shape).sum(dim=-1).double()
    if work is torch.float32 and not torch.isfinite(error.sum()):
        return inner_products(actual=actual, expected=expected, groups=groups, signal=signal, narrow=False)
    if signal is None:
        signal = e.square().reshape(shape).sum(dim=-1).double()
    return Products(error=error, signal=signal)


def group_slopes(products: Products, *, weight: Tensor) -> Slopes:
    """Return the slope of each group, sum(error) / sum(signal), with the standard error of clusters that are tokens.

    Shapes: weight [T]; the result [G], or [S, G].
    """
    over, under = weight[:, None] * products.error, weight[:, None] * products.signal
    total = under.sum(dim=0)
    value = torch.where(total > 0, over.sum(dim=-2) / total, 0.0)
    samples = (under > 0).sum(dim=0)
    residual = over - value.unsqueeze(-2) * under
    spread = residual.square().sum(dim=-2) * samples / (samples - 1).clamp(min=1)
    error = torch.where(total > 0, spread.sqrt() / total, 0.0)
    return Slopes(value=value, error=torch.where(samples > 1, error, math.inf), samples=samples)


def joint_slopes(*, error: Tensor, parts: Tensor, owner: Tensor, weight: Tensor, owners: int) -> Slopes:
    """Return the slope of each owner's part of a sum, all fitted together.

    The model: error[t] is the sum over k of slope[owner[t, k]] times parts[t, k]. Owners that share tokens are told
    apart, because their parts point in different directions.
    Shapes: error [T, E], or [S, T, E] of several sides; parts [T, K, E]; owner [T, K], -1 for none; weight [T]; the
    result [owners], or [S, owners].
    """
    scale, known, ids = weight.sqrt(), owner >= 0, owner.clamp(min=0)
    many = error if error.dim() == 3 else error[None]
    e = many.to(torch.float64).permute(1, 2, 0) * scale[:, None, None]  # [T, E, S]
    p = parts.to(torch.float64).mul(scale[:, None, None])
    if not bool(known.all()):
        p = p * known[..., None]
    inner = p @ p.transpose(1, 2)
    rows, columns = ids[:, :, None].expand_as(inner), ids[:, None, :].expand_as(inner)
    gram = torch.zeros(owners, owners, dtype=torch.float64)
    gram.index_put_((rows.reshape(-1), columns.reshape(-1)), inner.reshape(-1), accumulate=True)
    against = torch.zeros(owners, len(many), dtype=torch.float64)
    against.index_add_(0, ids.reshape(-1), (p @ e).reshape(-1, len(many)))
    inverse = torch.linalg.pinv(gram, hermitian=True)
    value = inverse @ against
    residual = e - p.transpose(1, 2) @ value[ids]
    used = gram.diagonal() > 0
    freedom = max(1.0, residual[..., 0].numel() / SPREAD - float(used.sum()))
    sigma = residual.square().sum(dim=(0, 1)) / freedom
    spread = (sigma[:, None] * inverse.diagonal().clamp(min=0)).sqrt()
    found = (value.T, torch.where(used, spread, math.inf))
    whole, uncertain = found if error.dim() == 3 else (found[0][0], found[1][0])
    return Slopes(value=whole, error=uncertain, samples=torch.full((owners,), int(freedom) + 1))
