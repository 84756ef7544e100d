"""Error ratios of one tap: whole, by token, position, head, channel. Knows metrics, neither decisions nor limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.metrics.real import Squares, error_sums, is_narrow

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
    """The worst error ratio of one kind of slice. `at` is its index (a range for positions), `n` its elements."""

    slice: str
    value: float
    n: int
    at: Any = None


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


def floor_of(*, floors: Sequence[Tensor], expected: Tensor, dtype: torch.dtype) -> Floor:
    """Return the floor of a tap [T, E]; that of a token is never below the tap's relative floor times its norm."""
    least = (WIDE_HALF_ULPS if dtype in (torch.float32, torch.float64) else HALF_ULPS) ** 2
    narrow = is_narrow(expected)
    rounding = Squares(expected=expected, dtype=dtype, narrow=narrow)
    errors = [Squares(actual=f, expected=expected, narrow=narrow) for f in floors]
    tokens = torch.stack([least * rounding.token(), *(e.token() for e in errors)])
    signal = Squares(expected=expected, narrow=narrow).token()
    whole, power = float(tokens.sum(dim=1).max()), float(signal.sum())
    relative = whole / power if power else 0.0
    token = torch.maximum(tokens.amax(dim=0), relative * signal)
    token = token.clamp(min=EXPECTED_SHARE**2 * float(token.mean()))
    weight = torch.where(token > 0, 1 / token, torch.zeros_like(token))
    channels = torch.stack([least * rounding.channel(weight), *(e.channel(weight) for e in errors)])
    channel = channels.amax(dim=0)
    channel = channel.clamp(min=EXPECTED_SHARE**2 * float(channel.mean()))
    return Floor(token=token, channel=channel, weight=weight, whole=whole)


def error_ratios(
    *, actual: Tensor, expected: Tensor, floor: Floor, heads: int, tokens: bool, rows: Tensor, buckets: int
) -> list[Ratio]:
    """Return the worst ratio of every kind of slice that is large enough.

    R = ||accel - oracle|| / floor, by token; that of the whole, and of a stretch of positions, is the mean over tokens,
    so that one outlier neither hides nor fakes the rest.
    Shapes: actual, expected [T, E]; rows [T] holds the token index of each row.
    """
    error = error_sums(actual=actual, expected=expected, weight=floor.weight)
    count, width = expected.shape
    if not tokens:
        return [Ratio(slice="whole", value=_ratio(error.whole, floor.whole), n=count * width)]
    by_token = _ratios(error.token, floor.token)
    ratios = [Ratio(slice="whole", value=float(by_token.mean()), n=count * width)]
    if width >= SMALLEST_SLICE:
        ratios.append(_worst("token", by_token, width, rows))
    ratios += _positions(by_token, width, rows, buckets)
    if heads > 1 and count * (width // heads) >= SMALLEST_SLICE:
        by_head = _ratios(error.by_head(heads), floor.channel.reshape(heads, -1).sum(dim=1))
        ratios.append(_worst("head", by_head, count * (width // heads), torch.arange(heads)))
    if count >= SMALLEST_SLICE:
        ratios.append(_worst("channel", _ratios(error.channel, floor.channel), count, torch.arange(width)))
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


def _worst(name: str, ratio: Tensor, n: int, index: Tensor) -> Ratio:
    """Return the largest ratio; a NaN anywhere is the largest."""
    place = int(ratio.argmax())
    return Ratio(slice=name, value=float(ratio[place]), n=n, at=int(index[place]))


def _ratio(error: float, floor: float) -> float:
    if error == 0:
        return 0.0
    return float((torch.tensor(error, dtype=torch.float64) / torch.tensor(floor, dtype=torch.float64)).sqrt())


def median_ratio(*, actual: Tensor, expected: Tensor, floor: Floor) -> float:
    """Return the ratio of median token errors, accel over floor: the loose measure of a free run. Shapes: [T, E]."""
    error = Squares(actual=actual, expected=expected).token()
    if torch.isnan(error).any():
        return float("nan")
    return _ratio(float(error.quantile(0.5)), float(floor.token.quantile(0.5)))
