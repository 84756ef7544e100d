"""Memory against plan. Knows bytes; must not know devices."""

from __future__ import annotations

import math


def peak_over_plan(*, peak_bytes: float, planned_bytes: float) -> float:
    """Return the observed peak over the planned one; NaN without a plan, since a vacuous plan proves nothing."""
    return peak_bytes / planned_bytes if planned_bytes > 0 and peak_bytes > 0 else math.nan
