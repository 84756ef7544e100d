"""What every stage is given and must provide. Knows records only; must not know limits, files or processes.

A stage is a module with `NAME`, `NEEDS` (what must be in scope), `plan(context) -> list[Run]` and
`measure(view) -> list[Measurement]`. Which roles record a run is decided by `harness.schedule`;
a run that failed is in the view as a `Failure` and must be measured as missing, never left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from harness.cases import ModelInfo
from harness.metrics.names import METRICS
from harness.types import STAGES, Failure, Measurement, Run, Scope, Trace

FLOORS = ("floor", *(f"floor_j{number}" for number in range(1, 13)))
"""Keys of the floor traces in a view: the plain floor, and replays with jittered inputs (levels >= 1 only): two, or
more where the port declares formats that are rounded to as it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """What planning may depend on: the model, what is claimed, the profile and the port's precision."""

    info: ModelInfo
    scope: Scope
    capabilities: frozenset[str]
    reference_capabilities: frozenset[str]
    profile: str
    dtype: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        """True for the full profile."""
        return self.profile == "full"

    def both(self, capability: str) -> bool:
        """Say whether both sides have a capability (the reference must, to be compared with)."""
        return capability in self.capabilities and capability in self.reference_capabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """The traces of one stage. `trace(role, run_id)` gives a Trace, a Failure, or None if not planned for it."""

    context: StageContext
    runs: Sequence[Run]
    trace: Callable[[str, str], Trace | Failure | None]


def stage_module(name: str) -> ModuleType:
    """Import a stage by its id (one of `STAGES`)."""
    assert name in STAGES, name
    return importlib.import_module(f"harness.stages.{name}")


def measured(
    stage: str,
    run: Run,
    metric: str,
    value: float | None,
    subject: str,
    *,
    order: int = 0,
    n: int = 1,
    problem: str = "",
    where: Mapping[str, Any] | None = None,
    detail: Mapping[str, Any] | None = None,
) -> Measurement:
    """Return a measurement of one run that is about no tap; the unit is that of the metric."""
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
        where=where or {},
        detail=detail or {},
    )


def loss(failure: Failure | None) -> dict[str, str]:
    """Return what a lost run leaves to tell: where it was, and how it ended."""
    return {"last_tap": failure.last_tap, "kind": failure.kind} if failure is not None else {"last_tap": "", "kind": ""}
