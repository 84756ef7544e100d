"""Statistics against statistics, where a side kept no tensors: where to look closer. Must not know limits.

A few numbers of a tensor can show a gross difference and its place; that values are right they cannot show, so nothing
passes by them. What is not finite on the port alone has failed: no ratio of it could be a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from harness.compare.subject import measured
from harness.statistics import as_facts, statistics_of
from harness.taps import kind_of
from harness.types import Measurement, Trace

GROSS = 0.25
"""Share of the expected rms from which on a difference is worth a look. Source: accumulated roundings of 24 layers in
bfloat16 move an rms by less than 0.02, and the median of a sketch by less than 0.1."""
HONEST = 10.0
"""A difference is gross only beyond so many times what the worst floor shows."""
SHOWN = 16
"""Taps that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A tap's numbers over all its calls; `sketch` and `shape` (without axes of size 1) only of a single call."""

    n: int
    rms: float
    nonfinite: int
    shape: tuple[int, ...] = ()
    sketch: tuple[float, ...] = ()


def holds_statistics_alone(trace: Trace) -> bool:
    """Say whether a trace has statistics of real values, and no tensor of them."""
    real = any(kind_of(n) != "input" and trace.tensors[n].is_floating_point() for n in trace.tensors)
    return bool(trace.facts.get("statistics")) and not real


def triage(stage: str, accel: Trace, oracle: Trace, floors: Sequence[Trace]) -> list[Measurement]:
    """Return what is not finite as failed, gross differences by tap, and that the rest is not judged."""
    mine, theirs, usual = told_of(accel), told_of(oracle), [told_of(f) for f in floors]
    metric = "error_ratio" if accel.run.level else "accumulated_ratio"
    broken, gross, seen = list[Measurement](), list[Measurement](), 0
    for order, (name, expected) in enumerate(theirs.items()):
        actual = mine.get(name)
        if actual is None or actual.n != expected.n or expected.nonfinite:
            continue
        seen += 1
        if actual.nonfinite:
            broken.append(measured(
                stage, accel.run, metric, math.nan, subject=name, order=order, n=actual.n, kind=kind_of(name),
                detail={"message": f"{actual.nonfinite} of {actual.n} values are not finite (statistics only)"},
            ))  # fmt: skip
            continue
        said = _gross(actual, expected, [f[name] for f in usual if name in f and f[name].n == expected.n])
        if said:
            gross.append(_unjudged(stage, accel, metric, name, f"statistics only, look here: {said}", order))
    message = (
        f"statistics only: {seen} taps can be set side by side, {len(broken) + len(gross)} differ grossly; a verdict "
        "needs their tensors"
    )
    return [*broken, *gross[:SHOWN], _unjudged(stage, accel, metric, "*", message, len(theirs))]


def _unjudged(stage: str, accel: Trace, metric: str, subject: str, message: str, order: int) -> Measurement:
    return measured(
        stage, accel.run, metric, None, subject=subject, order=order, problem="statistics", detail={"message": message}
    )


def _gross(actual: Told, expected: Told, floors: Sequence[Told]) -> str:
    """Return what differs by more than honest runs could, or nothing."""
    if not expected.rms > 0:
        return f"rms {actual.rms:.3g} where all is zero" if actual.rms > 0 else ""
    size = abs(actual.rms - expected.rms) / expected.rms
    usual = max((abs(f.rms - expected.rms) / expected.rms for f in floors), default=0.0)
    if size > max(GROSS, HONEST * usual):
        return f"rms {actual.rms:.4g} where {expected.rms:.4g} is expected"
    apart = _apart(actual, expected)
    if apart > max(GROSS, HONEST * max((_apart(f, expected) for f in floors), default=0.0)):
        return f"half of the sketched values are off by {apart:.2g} of their rms and more"
    return ""


def _apart(actual: Told, expected: Told) -> float:
    """Return the median difference of the values at the same places, in units of the expected rms; 0 if not known.

    The median: a token whose experts flip honestly may be as far off as it likes.
    """
    if not actual.sketch or not expected.sketch or actual.shape != expected.shape:
        return 0.0
    return median(abs(a - e) for a, e in zip(actual.sketch, expected.sketch, strict=False)) / expected.rms


def told_of(trace: Trace) -> dict[str, Told]:
    """Return what is told of each real-valued tap: its statistics, else those of its tensor."""
    columns = trace.facts.get("statistics") or {}
    made = {
        name: [statistics_of(tensor)] for name, tensor in trace.tensors.items()
        if tensor.is_floating_point() and name not in columns.get("tap", ())
    }  # fmt: skip
    found: dict[str, list[dict[str, Any]]] = {}
    for table in (columns, as_facts(made)):
        for values in zip(*table.values(), strict=True):
            row = dict(zip(table, values, strict=True))
            if row["n"] and "float" in row["dtype"]:
                found.setdefault(row["tap"], []).append(row)
    return {name: _together(rows) for name, rows in found.items()}


def _together(rows: Sequence[Mapping[str, Any]]) -> Told:
    count = sum(row["n"] for row in rows)
    words = rows[0]["sketch"].split() if isinstance(rows[0]["sketch"], str) else rows[0]["sketch"]
    alone = len(rows) == 1
    return Told(
        n=count,
        rms=math.sqrt(sum(row["n"] * float(row["rms"]) ** 2 for row in rows) / count),
        nonfinite=sum(row["nonfinite"] for row in rows),
        shape=tuple(s for s in rows[0]["shape"] if s != 1) if alone else (),
        sketch=tuple(float(w) for w in words) if alone else (),
    )
