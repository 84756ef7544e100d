"""Every injection against one architecture, scored. Knows labs and the catalogue; must not know limits.

An injection is first shown to move what it claims to move, against the same port unbroken.
"""

from __future__ import annotations

import fnmatch
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from harness.errors import PortError
from harness.faults.catalogue import Injection, NoPlace
from harness.faults.lab import Judged, Lab, Traces
from harness.faults.naive import naive
from harness.faults.ports import Ports
from harness.taps import unit_of
from harness.types import STAGES, Failure, Finding, Trace

OUTCOMES = ("detected", "missed", "accepted", "alarmed", "no place", "did not move", "broke")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How one injection ended on one architecture. `outcome` is one of `OUTCOMES`.

    `moved`: whether the port gave other values than the unbroken one. `stage_right`, `place_right`, `cause_right` are
    about the first finding of the stage that refused the port; None where nothing was refused. `naive` says which
    common checks would have refused the port.
    """

    architecture: str
    name: str
    id: str
    kind: str
    says: str
    outcome: str
    stage: str = ""
    expected_stages: tuple[str, ...] = ()
    tap: str = ""
    places: tuple[str, ...] = ()
    cause: str = ""
    message: str = ""
    criteria: tuple[str, ...] = ()
    stage_right: bool | None = None
    place_right: bool | None = None
    cause_right: bool | None = None
    moved: bool | None = None
    naive: Mapping[str, bool] = field(default_factory=dict)
    note: str = ""
    wall_s: float = 0.0


class Proof:
    """One architecture under proof: its lab, and its unbroken port as the comparison."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._modules: dict[str, Any] = {}
        self._clean = Ports(lab, self._modules, None)
        self._clean_traces: Traces = {}

    def clean(self, stage: str) -> Traces:
        """Return the traces of the unbroken port, recorded once for each stage."""
        if not any(folder in self._clean_traces for folder in self._folders(stage)):
            self.lab.record(self._clean, stage, self._clean_traces)
        return self._clean_traces

    def _folders(self, stage: str) -> list[Any]:
        """Return where the port's traces of a stage lie."""
        places = self.lab.schedule.folders
        return [places["accel", run.id] for run in self.lab.runs[stage] if ("accel", run.id) in places]

    def close(self) -> None:
        """Let reference and port go."""
        self.lab.close()
        self._clean.close()

    # --- one injection ---

    def row(self, injection: Injection) -> Row:
        """Inject, record stage by stage until one is not accepted, and score."""
        begin = time.perf_counter()
        with _machine_kept():
            try:
                row = self._row(injection)
            except PortError as why:  # the reference cannot compute as this injection declares; the rest goes on
                row = self._made(injection, "broke", note=str(why))
        return replace(row, wall_s=time.perf_counter() - begin)

    def _row(self, injection: Injection) -> Row:
        ports = Ports(self.lab, self._modules, injection)
        try:
            ports(self.lab.setup)
        except NoPlace as why:
            return self._made(injection, "no place", note=str(why))
        except PortError as why:  # whatever a model raises while its inputs are being found out
            return self._made(injection, "no place" if "NoPlace" in str(why) else "broke", note=str(why))
        if ports.broke:
            return self._made(injection, "broke", note=ports.broke)
        try:
            return self._tried(injection, ports)
        finally:
            ports.close()

    def _tried(self, injection: Injection, ports: Ports) -> Row:
        traces: Traces = {}
        judged: Judged | None = None
        for stage in self._stages(injection):
            self.lab.record(ports, stage, traces)
            failure = _raised(traces)
            if failure is not None:
                outcome = "no place" if failure.message.startswith("NoPlace") else "broke"
                return self._made(injection, outcome, note=failure.message, places=ports.places)
            judged = self.lab.judge(stage, traces)
            if not judged.accepted:
                break
        moved = self._moved(ports, traces)
        if injection.kind == "fault" and not moved:
            return self._made(injection, "did not move", places=ports.places)
        assert judged is not None
        row = self._scored(injection, judged, ports.places, self._naive(judged, ports, traces))
        return replace(row, moved=moved)

    def _stages(self, injection: Injection) -> list[str]:
        """Return the stages to go through. Weights are looked at where an injection may touch them."""
        weights = injection.kind == "benign" or "load" in injection.stages
        known = [s for s in STAGES if s in self.lab.runs]
        return [s for s in known if s != "load" or weights]

    def _moved(self, ports: Ports, traces: Traces) -> bool:
        """Say whether a place that the injection names differs from the unbroken port's: a tap, a weight, memory.

        A harmless difference names none: any place counts.
        """
        places = ports.places or ("*",)
        for stage in [s for s in self.lab.runs if any(folder in traces for folder in self._folders(s))]:
            clean = self.clean(stage)
            for folder in self._folders(stage):
                mine, other = traces.get(folder), clean.get(folder)
                if any(_matches(name, places) for name in _moved_taps(mine, other)):
                    return True
            if stage == "load":
                before = self._clean.weights()
                moved = [name for name, tensor in ports.weights().items() if not _equal(tensor, before[name])]
                if any(_matches(name, places) for name in moved):
                    return True
        return "forward" in ports.places and any(_takes_more(trace) for trace in traces.values())

    def _naive(self, judged: Judged, ports: Ports, traces: Traces) -> dict[str, bool]:
        """Return what common checks say of the longest free run of the stage that was judged last."""
        stage = "text" if judged.stage == "load" else judged.stage
        whole = [run for run in self.lab.runs[stage] if run.kind == "forward" and run.observe]
        free = [run for run in whole if not run.level and not run.dtype]
        run = max(free, key=lambda r: len(r.case.token_ids or ()) if r.case else 0)
        folder = self.lab.schedule.folders["accel", run.id]
        if folder not in traces:
            self.lab.record(ports, stage, traces, only=run.id)
        accel, oracle = traces.get(folder), self.lab.goldens[self.lab.schedule.folders["oracle", run.id]]
        if not isinstance(accel, Trace) or not isinstance(oracle, Trace):
            return {}
        return naive(accel, oracle, self.lab.context.dtype)

    # --- scores ---

    def _made(self, injection: Injection, outcome: str, **more: Any) -> Row:
        return Row(
            architecture=self.lab.subject.name, name=injection.name, id=injection.id, kind=injection.kind,
            says=injection.says, expected_stages=injection.stages, outcome=outcome, **more,
        )  # fmt: skip

    def _scored(self, injection: Injection, judged: Judged, places: tuple[str, ...], common: Mapping[str, bool]) -> Row:
        is_fault = injection.kind == "fault"
        if judged.accepted:
            return self._made(injection, "missed" if is_fault else "accepted", places=places, naive=common)
        first = judged.findings[0] if judged.findings else None
        return self._made(
            injection,
            "detected" if is_fault else "alarmed",
            stage=judged.stage,
            tap=first.tap if first else "",
            places=places,
            cause=first.cause if first else "",
            message=first.message if first else judged.reason,
            criteria=tuple(judged.broken()),
            stage_right=judged.stage in injection.stages if is_fault else None,
            place_right=_at(first, places) if is_fault else None,
            cause_right=_says(first, injection.cause) if is_fault else None,
            naive=common,
        )


def _at(first: Finding | None, places: Sequence[str]) -> bool:
    """Say whether a finding leads to one of the places."""
    return first is not None and _matches(first.tap, places)


def _matches(tap: str, places: Sequence[str]) -> bool:
    """Say whether a tap is one of the places: by its own name, or by that of the unit that gave it."""
    return any(fnmatch.fnmatchcase(name, place) for name in (tap, unit_of(tap)) for place in places)


def _says(first: Finding | None, words: Sequence[str]) -> bool:
    """Say whether a finding's cause or message holds one of the words."""
    return first is not None and any(re.search(re.escape(w), f"{first.cause} {first.message}", re.I) for w in words)


def _raised(traces: Traces) -> Failure | None:
    return next((t for t in traces.values() if isinstance(t, Failure)), None)


def _takes_more(trace: Trace | Failure) -> bool:
    """Say whether a run took more memory than a small model has any use for."""
    return isinstance(trace, Trace) and int(trace.facts.get("peak_bytes", 0)) > 1 << 27


def _moved_taps(actual: Trace | Failure | None, expected: Trace | Failure | None) -> Iterator[str]:
    """Yield the taps that differ, or that only one side has."""
    if not isinstance(actual, Trace) or not isinstance(expected, Trace):
        return
    for name in {**actual.tensors, **expected.tensors}:
        mine, other = actual.tensors.get(name), expected.tensors.get(name)
        if mine is None or other is None or not _equal(mine, other):
            yield name


def _equal(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.shape == expected.shape and torch.equal(actual.nan_to_num(), expected.nan_to_num())


@contextmanager
def _machine_kept() -> Iterator[None]:
    """Put back what an injection may switch for the whole process."""
    threads, mkldnn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.enabled = mkldnn  # type: ignore[assignment]


def prove(
    proof: Proof, injections: Iterable[Injection], say: Callable[[Row], None], most: Mapping[str, int] | None = None
) -> list[Row]:
    """Return a row for each injection; `say` hears each as it ends.

    With `most`, at most so many of each kind are tried, and those that have no place are passed over.
    """
    rows: list[Row] = []
    for injection in injections:
        tried = sum(row.kind == injection.kind for row in rows)
        if most is not None and tried >= most[injection.kind]:
            continue
        row = proof.row(injection)
        if most is None or row.outcome != "no place":
            rows.append(row)
            say(row)
    return rows
