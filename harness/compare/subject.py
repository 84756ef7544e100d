"""What one comparison is about, and the measurements it makes. Knows records only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from harness.metrics.names import METRICS
from harness.taps import level_of
from harness.types import Layout, Measurement, Run, Tap, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One run seen by all sides. `order` is the oracle's execution order, `dtype` the port's precision, `heads` the
    model's attention heads (0 if unknown).
    """

    stage: str
    run: Run
    oracle: Trace
    floors: Sequence[Trace]
    accel: Trace
    dtype: str
    order: Mapping[str, int]
    heads: int = 0

    @property
    def first_token(self) -> int:
        """First token that is compared: a phase may start with a prefill that another run judges."""
        return int(self.run.options.get("compare_from", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """One tap's tensor of each side, all in the oracle's shape. `floors` leaves out those that lack the tap."""

    tap: Tap
    oracle: Tensor
    floors: Sequence[Tensor]
    accel: Tensor


@lru_cache(maxsize=256)
def _written(layout: Layout) -> str:
    return str(layout)


def measured(
    stage: str,
    run: Run,
    metric: str,
    value: float | None,
    *,
    subject: str,
    order: int = 0,
    n: int = 1,
    kind: str = "",
    problem: str = "",
    where: Mapping[str, Any] | None = None,
    detail: Mapping[str, Any] | None = None,
) -> Measurement:
    """Return a measurement of one tap of one run; the unit is that of the metric."""
    place = {
        "level": run.level,
        "kind": kind,
        "tap_level": level_of(subject),
        "phase": run.options.get("phase", "prefill"),
        "precision": run.dtype or "declared",
        "layout": _written(run.layout),
        **(where or {}),
    }
    return Measurement(
        metric=metric,
        value=value,
        unit=METRICS[metric],
        subject=subject,
        stage=stage,
        case=run.case.id if run.case else "",
        run=run.id,
        n=n,
        order=order,
        problem=problem,
        where=place,
        detail=detail or {},
    )
