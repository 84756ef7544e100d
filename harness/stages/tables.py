"""The port's own tables against the reference's, and what is odd in the reference. Knows facts; no limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from harness.stages import measured
from harness.stages.weights import or_none_found
from harness.types import Measurement, Run

NAME = "load"
SMALL = 1e-5
"""Relative size below which two values of a table are one. Source: float32 powers differ by a few parts in 1e7."""


def tables_of(run: Run, actual: Mapping[str, Any], expected: Mapping[str, Any]) -> list[Measurement]:
    """Hold the port's own tables against the reference's, and look for what is suspicious in the reference itself."""
    ours, theirs = actual.get("tables", {}), expected.get("tables", {})
    wrong = []
    for name in sorted(set(ours) & set(theirs)):
        off = _furthest(ours[name], theirs[name])
        if not off <= SMALL:
            words = "; its values are those of bfloat16" if _narrow(ours[name]) else ""
            message = f"{name}: off by {off:.3g} of its size from the reference's{words}"
            wrong.append(measured(NAME, run, "table_mismatches", 1.0, name, detail={"message": message}))
    suspects = [
        measured(
            NAME, run, "suspect_reference", 1.0, name,
            detail={"message": f"{name}: the reference's own table holds values of bfloat16 only: it was rounded"},
        )
        for name in sorted(theirs) if _narrow(theirs[name])
    ]  # fmt: skip
    audit = expected.get("audit", {})
    for name in audit.get("unfilled", ()):
        message = f"{name}: the reference itself fills it from no checkpoint tensor"
        suspects.append(measured(NAME, run, "suspect_reference", 1.0, name, detail={"message": message}))
    return [
        *or_none_found(run, "table_mismatches", wrong, max(1, len(ours))),
        *or_none_found(run, "suspect_reference", suspects, max(1, len(theirs))),
    ]


def _furthest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest relative difference of two tables; infinite where they have different lengths."""
    if len(ours) != len(theirs):
        return math.inf
    return max((abs(a - b) / (abs(b) or 1.0) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def _narrow(table: Sequence[float]) -> bool:
    """Say whether a table of several values, not all powers of two, needs no more than bfloat16's 8 bits for any."""
    mantissas = [math.frexp(abs(x))[0] for x in table if x and math.isfinite(x)]
    telling = [m for m in mantissas if m != 0.5]
    return len(telling) >= 4 and all((m * 256).is_integer() for m in telling)
