"""Error ratios of one tap: whole, by token, position, head, channel. Knows metrics, neither decisions nor limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from harness.compare.samples import FEWEST_IN_A_MEAN, of_means, worst_of
from harness.metrics.real import Errors, errors_of

SMALLEST_SLICE = 16
"""Elements below which a slice is not looked at. Source: honest single decode steps and tiny slices reach 2."""
HALF_ULPS = 2.0
"""A port may round once more than the floor at any place, so its floor is never below two roundings."""
WIDE_HALF_ULPS = 8.0
"""The same where sums are rounded as coarsely as results (float32, float64): another order of a sum of K terms moves a
whole token by about sqrt(K) half ulps. Source: ONNX Runtime on a real model (K = 576) reads up to 11 half ulps on a
token of a layer, the reference's own worst 2.75 ulp; faults in float32 read 270 half ulps and more."""
EXPECTED_SHARE = 0.02
"""A slice's floor is never below this share of the mean slice's, so that a nearly silent channel or token has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The worst error ratio of one kind of slice. `at` is its index (a range for positions), `n` the independent
    numbers behind it, at most its elements (`counted`, if they are more).
    """

    slice: str
    value: float
    n: int
    at: Any = None
    counted: int = 0

    @property
    def says(self) -> str:
        """Return why n is far less than the count, or nothing."""
        if 2 * self.n > self.counted:
            return ""
        return (
            f"{self.counted} elements count as {self.n}: honest runs differ along this error, which is so many numbers"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Squared floor norms, each slice by itself the worst of several honest runs, never below two roundings.

    Shapes: token [T], channel [E]. `channel` sums rows weighted with `weight` [T], one over the token's floor: an
    ill-conditioned token, whose error is large in every honest run, then counts as one token and not as all of them.
    """

    token: Tensor
    channel: Tensor
    weight: Tensor
    whole: float


def with_floor(
    *, actual: Tensor, floors: Sequence[Tensor], expected: Tensor, dtype: torch.dtype, groups: int
) -> tuple[Errors, Floor]:
    """Return the sums of the errors of a tap [T, E], the port's first, then the floors', and its floor.

    The floor of a token is never below the tap's relative floor times its norm.
    """
    least, told = least_of(dtype), list[tuple[Tensor, float]]()

    def weigh(error: Tensor, power: Tensor, rounding: Tensor) -> Tensor:
        tokens = torch.cat([least * rounding[None], error[1:]])
        whole, signal = float(tokens.sum(dim=1).max()), float(power.sum())
        relative = whole / signal if signal else 0.0
        token = torch.maximum(tokens.amax(dim=0), relative * power)
        token = token.clamp(min=EXPECTED_SHARE**2 * float(token.mean()))
        told.append((token, whole))
        return _inverse(token)

    errors = errors_of(actual=[actual, *floors], expected=expected, dtype=dtype, groups=groups, weigh=weigh)
    token, whole = told[-1]
    channel = torch.cat([errors.column[1:-1], least * errors.column[-1:]]).amax(dim=0)
    channel = channel.clamp(min=EXPECTED_SHARE**2 * float(channel.mean()))
    return errors, Floor(token=token, channel=channel, weight=_inverse(token), whole=whole)


def _inverse(token: Tensor) -> Tensor:
    return torch.where(token > 0, 1 / token, torch.zeros_like(token))


def least_of(dtype: torch.dtype) -> float:
    """Return the squared roundings that a floor is never below in a port's precision."""
    return (WIDE_HALF_ULPS if dtype in (torch.float32, torch.float64) else HALF_ULPS) ** 2


def error_ratios(
    *, token: Tensor, channel: Tensor, floor: Floor, samples: Tensor, heads: int, tokens: bool, rows: Tensor,
    buckets: int,
) -> list[Ratio]:  # fmt: skip
    """Return the worst ratio of every kind of slice that is large enough.

    R = ||accel - oracle|| / floor, by token; that of the whole, and of a stretch of positions, is the mean over tokens,
    so that one outlier neither hides nor fakes the rest.
    Shapes: token [T] and channel [E] hold the port's squared errors, the latter weighted as the floor's; samples [T]
    the independent numbers behind a token's error, rows [T] the token index of each row.
    """
    count, width = len(token), len(channel)
    if not tokens:
        return [Ratio(slice="whole", value=_ratio(float(token.sum()), floor.whole), n=count * width)]
    by_token = _ratios(token, floor.token)
    whole = of_means(torch.tensor(count), (1 / samples).sum())
    ratios = [Ratio(slice="whole", value=float(by_token.mean()), n=max(1, round(float(whole))), counted=count * width)]
    if width >= SMALLEST_SLICE:
        for place, n in worst_of(by_token, samples, torch.full_like(samples, width)):
            at = int(rows[place])
            ratios.append(Ratio(slice="token", value=float(by_token[place]), n=n, at=at, counted=width))
    ratios += _positions(by_token, samples, width, rows, buckets)
    if heads > 1 and count * (width // heads) >= SMALLEST_SLICE:
        by_head = _ratios(channel.reshape(heads, -1).sum(dim=1), floor.channel.reshape(heads, -1).sum(dim=1))
        ratios.append(_worst("head", by_head, count * (width // heads)))
    if count >= SMALLEST_SLICE:
        ratios.append(_worst("channel", _ratios(channel, floor.channel), count))
    return ratios


def _positions(by_token: Tensor, samples: Tensor, width: int, rows: Tensor, buckets: int) -> list[Ratio]:
    """Return the worst mean ratio of consecutive buckets of equally many tokens.

    The mean of ratios, not the ratio of norms: one ill-conditioned token is the token slice's business, and must not
    stand for its neighbours.
    """
    count = int(rows.numel())
    buckets = min(buckets, count // FEWEST_IN_A_MEAN, count * width // SMALLEST_SLICE)
    if buckets < 2:
        return []
    which, size = _stretches(count, buckets)
    mean, inverse = torch.zeros(2, buckets, dtype=torch.float64).index_add_(
        1, which, torch.stack([by_token, 1 / samples])
    )  # fmt: skip
    mean, counted = mean / size, size * width
    found = []
    for place, n in worst_of(mean, of_means(size, inverse), counted):
        value, at = float(mean[place]), span_of(rows, buckets, place)
        found.append(Ratio(slice="position", value=value, n=n, at=at, counted=int(counted[place])))
    return found


@lru_cache(maxsize=64)
def _stretches(count: int, buckets: int) -> tuple[Tensor, Tensor]:
    which = torch.arange(count) * buckets // count
    return which, torch.bincount(which, minlength=buckets)


def span_of(rows: Tensor, buckets: int, place: int) -> str:
    """Return the first and the last token of one of so many stretches of equally many rows; `rows` [T] ascend."""
    first, behind = (-(-i * len(rows) // buckets) for i in (place, place + 1))
    return f"{int(rows[first])}-{int(rows[behind - 1])}"


def _ratios(error: Tensor, floor: Tensor) -> Tensor:
    """Return the roots of error / floor; nothing over nothing is 0, NaN stays NaN."""
    ratio = torch.where(error == 0, torch.zeros_like(error), (error / floor).sqrt())
    return torch.where(torch.isnan(floor), torch.nan, ratio)


def _worst(name: str, ratio: Tensor, n: int) -> Ratio:
    """Return the largest ratio and its place; a NaN anywhere is the largest."""
    place = int(ratio.argmax())
    return Ratio(slice=name, value=float(ratio[place]), n=n, at=place)


def _ratio(error: float, floor: float) -> float:
    if error == 0:
        return 0.0
    return float((torch.tensor(error, dtype=torch.float64) / torch.tensor(floor, dtype=torch.float64)).sqrt())


def median_ratio(*, token: Tensor, floor: Floor) -> float:
    """Return the ratio of median token errors, accel over floor: the loose measure of a free run. Shapes: token [T]."""
    if torch.isnan(token).any():
        return float("nan")
    return _ratio(float(token.quantile(0.5)), float(floor.token.quantile(0.5)))
