"""Every injection against one architecture, scored. Knows labs and the catalogue; must not know limits.

An injection is first shown to move what it claims to move, against the same port unbroken.
"""

from __future__ import annotations

import copy
import fnmatch
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from harness.adapters.hf import OPTIONS, load_module
from harness.adapters.module import Loaded, ModuleAdapter
from harness.errors import PortError
from harness.faults.catalogue import Injection, NoPlace
from harness.faults.lab import Judged, Lab, Traces, loaded, tried
from harness.faults.naive import naive
from harness.faults.parts import Parts
from harness.faults.tapped import Tapped
from harness.plugins import open_adapter, parse_spec
from harness.runs import Bench
from harness.taps import unit_of
from harness.types import STAGES, Failure, Finding, Setup, Trace

OUTCOMES = ("detected", "missed", "accepted", "alarmed", "no place", "did not move", "broke")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How one injection ended on one architecture. `outcome` is one of `OUTCOMES`.

    `stage_right`, `place_right`, `cause_right` are about the first finding of the stage that refused the port; None
    where nothing was refused. `naive` says which common checks would have refused the port.
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
    naive: Mapping[str, bool] = field(default_factory=dict)
    note: str = ""
    wall_s: float = 0.0


class Ports:
    """The port of a subject with an injection (or none), in each precision that is asked for.

    `places` and `broke` are known once the first of them was made.
    """

    def __init__(self, lab: Lab, modules: dict[str, Any], injection: Injection | None) -> None:
        self.lab, self.injection = lab, injection
        self.places: tuple[str, ...] = ()
        self.broke = ""
        self._modules, self._made = modules, dict[str, Bench]()

    def __call__(self, setup: Setup) -> Bench:
        """Return the loaded port of a setup. Raises NoPlace."""
        if setup.dtype not in self._made:
            self._made[setup.dtype] = self._port(setup)
        return self._made[setup.dtype]

    def _port(self, setup: Setup) -> Bench:
        subject = self.lab.subject
        if parse_spec(subject.accel).kind != "hf":
            other = open_adapter(parse_spec(subject.accel), subject.checkpoint, setup)
            bench = loaded(other, subject.checkpoint, setup)
            self._inject(lambda: Tapped(other, self.lab.taps()))
            return bench
        if setup.dtype not in self._modules:
            self._modules[setup.dtype] = load_module(subject.checkpoint, setup).module.eval()
        module = copy.deepcopy(self._modules[setup.dtype])
        self._inject(lambda: Parts(module))
        adapter = ModuleAdapter(
            lambda *_: Loaded(module=module), subject.checkpoint, setup, name=subject.accel, options=OPTIONS
        )
        return loaded(adapter, subject.checkpoint, setup)

    def _inject(self, place: Callable[[], Any]) -> None:
        if self.injection is not None:
            self.places, self.broke = tried(self.injection.inject, place())

    def weights(self) -> dict[str, torch.Tensor]:
        """Return what memory is said to hold, by name."""
        ports: Any = self(self.lab.setup).adapter
        return {w.name: w.tensor for w in ports.weights()}

    def close(self) -> None:
        """Let them go."""
        for bench in self._made.values():
            bench.adapter.close()


class Proof:
    """One architecture under proof: its lab, and its unbroken port as the comparison."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._modules: dict[str, Any] = {}
        self._clean = Ports(lab, self._modules, None)
        self._clean_traces: Traces = {}

    def ways(self) -> str:
        """Return how an injection gets into this subject's port: module or taps."""
        return "module" if parse_spec(self.lab.subject.accel).kind == "hf" else "taps"

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
            row = self._row(injection)
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
        if injection.kind == "fault" and not self._moved(ports, traces):
            return self._made(injection, "did not move", places=ports.places)
        assert judged is not None
        return self._scored(injection, judged, ports.places, self._naive(injection, ports, traces))

    def _stages(self, injection: Injection) -> list[str]:
        """Return the stages to go through. Weights are looked at where an injection may touch them."""
        weights = injection.kind == "benign" or "load" in injection.stages
        known = [s for s in STAGES if s in self.lab.runs]
        return [s for s in known if s != "load" or weights]

    def _moved(self, ports: Ports, traces: Traces) -> bool:
        """Say whether anything that was recorded, or any weight, differs from the unbroken port's."""
        for stage in [s for s in self.lab.runs if any(folder in traces for folder in self._folders(s))]:
            clean = self.clean(stage)
            for folder in self._folders(stage):
                mine, other = traces.get(folder), clean.get(folder)
                if isinstance(mine, Trace) and isinstance(other, Trace) and _differs(mine, other):
                    return True
            if stage == "load":
                before = self._clean.weights()
                if any(not _equal(tensor, before[name]) for name, tensor in ports.weights().items()):
                    return True
        return any(_takes_more(trace) for trace in traces.values())

    def _naive(self, injection: Injection, ports: Ports, traces: Traces) -> dict[str, bool]:
        """Return what common checks say of the free run of the stage that the injection belongs to."""
        stage = next((s for s in injection.stages if s in ("image", "long_context") and s in self.lab.runs), "text")
        free = [
            run
            for run in self.lab.runs[stage]
            if run.kind == "forward" and run.observe and not run.level and not run.dtype
        ]
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
    """Say whether a finding leads to one of the places: by its tap, or by the unit of it."""
    if first is None:
        return False
    names = {first.tap, unit_of(first.tap)}
    return any(fnmatch.fnmatchcase(name, place) for name in names for place in places)


def _says(first: Finding | None, words: Sequence[str]) -> bool:
    """Say whether a finding's cause or message holds one of the words."""
    return first is not None and any(re.search(re.escape(w), f"{first.cause} {first.message}", re.I) for w in words)


def _raised(traces: Traces) -> Failure | None:
    return next((t for t in traces.values() if isinstance(t, Failure)), None)


def _takes_more(trace: Trace | Failure) -> bool:
    """Say whether a run took more memory than a small model has any use for."""
    return isinstance(trace, Trace) and int(trace.facts.get("peak_bytes", 0)) > 1 << 27


def _differs(actual: Trace, expected: Trace) -> bool:
    if actual.tensors.keys() != expected.tensors.keys() or actual.facts.get("token_ids") != expected.facts.get(
        "token_ids"
    ):
        return True
    return any(not _equal(value, expected.tensors[name]) for name, value in actual.tensors.items())


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


def prove(proof: Proof, injections: Iterable[Injection], say: Callable[[Row], None]) -> list[Row]:
    """Return a row for each injection that can be tried on a port; `say` hears each as it ends."""
    rows = []
    for injection in injections:
        if injection.via == proof.ways():
            row = proof.row(injection)
            rows.append(row)
            say(row)
    return rows
