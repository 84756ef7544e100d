"""Latency statistics. Knows lists of seconds; must not know who measured them. A p90 needs 64 samples, a p99 662."""

from __future__ import annotations

import math
from collections.abc import Sequence

P90_SAMPLES, P99_SAMPLES = 64, 662
"""Fewest samples for which the quantile is stated at all.

Source: with n samples the chance that none exceeds the true quantile q is q^n; 0.9^64 and 0.99^662 are about 0.0012.
"""


def quantile(samples: Sequence[float], q: float) -> float:
    """Return the q-quantile, linear between order statistics; NaN without samples or with a NaN among them."""
    if not samples or any(math.isnan(s) for s in samples):
        return math.nan
    ordered = sorted(samples)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(samples: Sequence[float]) -> float:
    """Return the median."""
    return quantile(samples, 0.5)


def p90(samples: Sequence[float]) -> float | None:
    """Return the 90th percentile, or None with fewer than `P90_SAMPLES` samples."""
    return quantile(samples, 0.9) if len(samples) >= P90_SAMPLES else None


def jitter_ratio(samples: Sequence[float]) -> float | None:
    """Return p90 over median, or None with too few samples for a p90: 1 is perfectly steady."""
    tail, middle = p90(samples), median(samples)
    return None if tail is None else (tail / middle if middle else math.nan)
