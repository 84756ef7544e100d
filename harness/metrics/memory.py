"""Memory against plan. Knows bytes; must not know devices."""

from __future__ import annotations

import math


def peak_over_plan(*, peak_bytes: float, planned_bytes: float) -> float:
    """Return the observed peak over the planned one; NaN without a plan, since a vacuous plan proves nothing."""
    return peak_bytes / planned_bytes if planned_bytes > 0 and peak_bytes > 0 else math.nan


def growth_bytes_per_token(*, peaks_bytes: list[float], lengths_tokens: list[int]) -> float:
    """Return the least-squares slope of peak memory over length; NaN with fewer than two different lengths."""
    if len(set(lengths_tokens)) < 2:
        return math.nan
    mean_x = sum(lengths_tokens) / len(lengths_tokens)
    mean_y = sum(peaks_bytes) / len(peaks_bytes)
    over = sum((x - mean_x) * (y - mean_y) for x, y in zip(lengths_tokens, peaks_bytes, strict=True))
    return over / sum((x - mean_x) ** 2 for x in lengths_tokens)
