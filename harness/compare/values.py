"""Error ratios of one tap: whole, by token, position, head, channel. Knows metrics, neither decisions nor limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.metrics.real import SquaredSums, error_sums, rounding_sums, signal_sums

SMALLEST_SLICE = 16
"""Elements below which a slice is not looked at. Source: honest single decode steps and tiny slices reach 2."""
HALF_ULPS = 2.0
"""A port may round once more than the floor at any place, so its floor is never below two roundings."""
EXPECTED_SHARE = 0.02
"""A slice's floor is never below this share of the tap's own rms floor, so that a nearly silent channel has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The worst error ratio of one kind of slice. `at` is its index (a range for positions), `n` its elements."""

    slice: str
    value: float
    n: int
    at: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Squared floor norms by token and channel, and of the whole: the worst of the floors, each slice by itself."""

    token: Tensor
    channel: Tensor
    sums: Sequence[SquaredSums]
    rounding: SquaredSums
    whole: float
    elements: int

    def pooled(self, n: int) -> float:
        """Squared floor norm that `n` elements would have if the floor's error were spread evenly."""
        return self.whole * n / max(1, self.elements)


def floor_of(*, floors: Sequence[Tensor], expected: Tensor, dtype: torch.dtype) -> Floor:
    """Return the floor of a tap [T, E] from several honest runs of it."""
    rounding = rounding_sums(expected=expected, dtype=dtype)
    sums = [error_sums(actual=f, expected=expected) for f in floors]
    least = HALF_ULPS**2
    token, channel, whole = least * rounding.token, least * rounding.channel, least * rounding.whole
    for one in sums:
        token, channel = torch.maximum(token, one.token), torch.maximum(channel, one.channel)
        whole = _larger(whole, one.whole)
    return Floor(
        token=token, channel=channel, sums=sums, rounding=rounding, whole=whole, elements=int(expected.numel())
    )


def _larger(first: float, second: float) -> float:
    """Return the larger one, or NaN if either is (the built-in max does not promise that)."""
    return float(torch.maximum(torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64)))


def error_ratios(
    *, actual: Tensor, expected: Tensor, floor: Floor, heads: int, tokens: bool, rows: Tensor, buckets: int
) -> list[Ratio]:
    """Return the worst ratio of every kind of slice that is large enough.

    Shapes: actual, expected [T, E]; rows [T] holds the token index of each row. R = ||accel - oracle|| / floor.
    """
    error = error_sums(actual=actual, expected=expected)
    count, width = expected.shape
    ratios = [Ratio(slice="whole", value=_ratio(error.whole, floor.whole), n=count * width)]
    if tokens:
        signal = signal_sums(expected=expected)
        least = signal.token * (floor.whole / signal.whole if signal.whole else 0.0)
        by_token = torch.maximum(floor.token, least)
        if width >= SMALLEST_SLICE:
            ratios.append(_worst("token", error.token, by_token, width, rows))
        ratios += _positions(_ratios(error.token, by_token), width, rows, buckets)
    if heads > 1 and count * (width // heads) >= SMALLEST_SLICE:
        n = count * (width // heads)
        squares = torch.stack([s.by_head(heads) for s in floor.sums] or [torch.zeros(heads, dtype=torch.float64)])
        least = HALF_ULPS**2 * floor.rounding.by_head(heads)
        worst = torch.maximum(squares.amax(dim=0), least).clamp(min=EXPECTED_SHARE**2 * floor.pooled(n))
        ratios.append(_worst("head", error.by_head(heads), worst, n, torch.arange(heads)))
    if tokens and count >= SMALLEST_SLICE:
        worst = floor.channel.clamp(min=EXPECTED_SHARE**2 * floor.pooled(count))
        ratios.append(_worst("channel", error.channel, worst, count, torch.arange(width)))
    return ratios


def _positions(token_ratio: Tensor, width: int, rows: Tensor, buckets: int) -> list[Ratio]:
    """Return the worst mean ratio of consecutive buckets of equally many tokens.

    The mean of ratios, not the ratio of norms: one ill-conditioned token is the token slice's business, and must not
    stand for its neighbours.
    """
    count = int(rows.numel())
    buckets = min(buckets, count, count * width // SMALLEST_SLICE)
    if buckets < 2:
        return []
    which = torch.arange(count) * buckets // count
    size = torch.bincount(which, minlength=buckets)
    mean = torch.zeros(buckets, dtype=torch.float64).index_add_(0, which, token_ratio) / size
    place = int(mean.argmax())
    inside = rows[which == place]
    at = f"{int(inside.min())}-{int(inside.max())}"
    return [Ratio(slice="position", value=float(mean[place]), n=int(size.min()) * width, at=at)]


def _ratios(error: Tensor, floor: Tensor) -> Tensor:
    """Return the roots of error / floor; nothing over nothing is 0, NaN stays NaN."""
    ratio = torch.where(error == 0, torch.zeros_like(error), (error / floor).sqrt())
    return torch.where(torch.isnan(floor), torch.nan, ratio)


def _worst(name: str, error: Tensor, floor: Tensor, n: int, index: Tensor) -> Ratio:
    """Return the largest ratio; a NaN anywhere is the largest."""
    ratio = _ratios(error, floor)
    place = int(ratio.argmax())
    return Ratio(slice=name, value=float(ratio[place]), n=n, at=int(index[place]))


def _ratio(error: float, floor: float) -> float:
    if error == 0:
        return 0.0
    return float((torch.tensor(error, dtype=torch.float64) / torch.tensor(floor, dtype=torch.float64)).sqrt())


def median_ratio(*, actual: Tensor, expected: Tensor, floor: Floor) -> float:
    """Return the ratio of median token errors, accel over floor: the loose measure of a free run. Shapes: [T, E]."""
    error = error_sums(actual=actual, expected=expected).token
    if torch.isnan(error).any():
        return float("nan")
    return _ratio(float(error.quantile(0.5)), float(floor.token.quantile(0.5)))
