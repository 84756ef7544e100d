"""What one comparison is about, and the measurements it makes. Knows records only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from harness.metrics.names import METRICS
from harness.taps import DECISION_KINDS, EXACT_KINDS, child_of, layer_of, level_of
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

    def under(self, unit: str) -> Sequence[str]:
        """Return the oracle's taps that lie inside a layer or a layer's child, in execution order."""
        return _under(tuple(self.oracle.taps)).get(unit, ())

    @property
    def first_token(self) -> int:
        """First token that is compared: a phase may start with a prefill that another run judges."""
        return int(self.run.options.get("compare_from", 0))


@lru_cache(maxsize=4)
def _under(taps: tuple[str, ...]) -> Mapping[str, Sequence[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for tap in taps:
        layer = layer_of(tap)
        if tap.startswith(layer + "."):
            found[layer].append(tap)
            found[child_of(tap)].append(tap)
    return found


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


def number(scene: Scene, tap: Tap, metric: str, value: float, n: int, **where: object) -> Measurement:
    """Return a number measured of one tap of a scene's run."""
    return measured(
        scene.stage, scene.run, metric, value, subject=tap.name, order=scene.order[tap.name], n=n, kind=tap.kind,
        where=where,
    )  # fmt: skip


def problem(scene: Scene, tap: Tap, kind: str, message: str) -> Measurement:
    """Return what stands for a tap that was promised and could not be measured."""
    return measured(
        scene.stage, scene.run, promised(scene.run, tap), None, subject=tap.name, order=scene.order[tap.name],
        kind=tap.kind, problem=kind, detail={"message": message},
    )  # fmt: skip


def shapes_differ(scene: Scene, tap: Tap) -> Measurement:
    """Return the problem of a tap whose tensor has another shape than the reference's."""
    found, expected = (tuple(side.tensors[tap.name].shape) for side in (scene.accel, scene.oracle))
    return problem(scene, tap, "error", f"expected the shape {expected} of the reference, found {found}")


def promised(run: Run, tap: Tap) -> str:
    """Return the metric that a tap's comparison would have led to."""
    if tap.kind in EXACT_KINDS:
        return "exact_mismatches"
    if tap.kind in DECISION_KINDS:
        return "decision_margin_z" if run.level else "agreeing_share"
    if run.level:
        return "error_ratio"
    return "logits_kl_ratio" if tap.kind == "logits" else "accumulated_ratio"
