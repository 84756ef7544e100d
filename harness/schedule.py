"""Which role does what for each planned run, and where its trace lies. Knows records; must not know limits.

One planned run becomes jobs of up to five roles. The oracle answers every phase, layout and split with one whole
prefill; the floor walks the same phases in the port's precision, and twice more with jittered inputs where they are
replayed (more often, where the port declares formats that are rounded to as it runs: see `DRAWS`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import recorder
from harness.golden import FORMAT
from harness.stages import FLOORS
from harness.types import Layout, Run, Setup, as_json, digest_of

ROLES = ("oracle", *FLOORS, "accel")
ORACLE_OF = {"bfloat16": "float32", "float16": "float32", "float32": "float64", "float64": "float64"}
"""The precision of the oracle: one above the port's."""
_PHASED = ("steps", "simulate", "ranks")
_BOTH_SIDES = ("forward", "generate", *_PHASED)
DRAWS = {"cache": 12, "state": 6, "activations": 6}
"""How many jittered floors a port is held to that declares so; two otherwise. Where attention hangs on one or two keys,
the error of a token is that of one or two large steps, and the worst of few draws is small by chance. Source: of |N(0,
1)| over the greatest of k others, 3 % lie beyond 2.75 at k = 3, 0.2 % at k = 7, 0.02 % at k = 13."""
_REFERENCE_TOO = ("weights", "chat")
_REFERENCE_ALONE = ("search",)
_REFERENCE_OPTIONS = ("texts", "ids", "conversations", "tokens_per_expert", "max_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run as one role executes it. `pins`: folder of the trace to replay; `expected`: of the oracle's answer."""

    role: str
    run: Run
    setup: Setup
    folder: Path
    pins: Path | None = None
    expected: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """All jobs of some stages, and where the trace of each (role, planned run) lies."""

    jobs: tuple[Job, ...]
    folders: Mapping[tuple[str, str], Path]

    def of(self, *roles: str) -> list[Job]:
        """Return the jobs of some roles, each folder once, in order."""
        seen: set[Path] = set()
        mine = [j for j in self.jobs if j.role in roles]
        return [j for j in mine if not (j.folder in seen or seen.add(j.folder))]  # type: ignore[func-returns-value]


def make_schedule(
    runs: Sequence[Run],
    *,
    setups: Mapping[str, Setup],
    replay: bool,
    reference_phased: bool,
    goldens: Path,
    traces: Path,
) -> Schedule:
    """Turn planned runs into jobs. `replay` says whether the port goes on with replayed values; `setups` by role.

    Goldens are addressed by what was asked for, so equal questions are answered once, and again only if they change.
    """
    jitters = max((DRAWS.get(key, 2) for key in setups["floor"].precision), default=2)
    jobs: list[Job] = []
    folders: dict[tuple[str, str], Path] = {}

    def add(role: str, planned: Run, executed: Run, pins: Path | None, expected: Path | None = None) -> None:
        setup = _setup(setups[role.partition("_")[0]], planned)
        if role == "accel":
            folder = traces / "accel" / planned.id
        else:
            root = goldens if pins is None or replay else traces / "reference"
            folder = root / role / _address(executed, setup, pins)
        folders[role, planned.id] = folder
        jobs.append(Job(role=role, run=executed, setup=setup, folder=folder, pins=pins, expected=expected))

    for run in runs:
        source = _source(run, folders, replay)
        if run.kind in _REFERENCE_ALONE:
            add("oracle", run, _asked(run), None)
        elif run.kind in ("collectives", "ranks") or not (run.kind in _BOTH_SIDES and run.level and not replay):
            add("accel", run, run, folders.get(("oracle", run.pin or "")) if replay else None)
        elif run.kind == "forward":
            folders["accel", run.id] = folders["accel", run.pin or ""]
        else:
            add("accel", run, dataclasses.replace(run, level=0, pin=None, pin_decisions=False), None)
            source = folders["accel", run.id]
        if run.kind in _REFERENCE_TOO:
            add("oracle", run, _asked(run), None)
        elif run.kind in _BOTH_SIDES and run.observe:
            whole = _asked(run, kind="forward") if run.kind in _PHASED else _asked(run)
            add("oracle", run, whole, source)
            phased = run.kind == "steps" and reference_phased
            walked = _asked(run, steps=run.steps, before=run.before) if phased else whole
            add("floor", run, walked, source, folders["oracle", run.id] if run.kind == "generate" else None)
            for number in range(1, jitters + 1) if run.level else ():
                add(f"floor_j{number}", run, dataclasses.replace(walked, jitter=number), source)
    jobs.sort(key=lambda job: job.run.dtype != "")  # each change of precision loads the model anew
    return Schedule(jobs=tuple(jobs), folders=folders)


def resolved(runs: Sequence[Run], found: Mapping[str, tuple[int, ...]]) -> tuple[Run, ...]:
    """Return runs with the token ids that a search found for their cases, without those that have nothing new to show.

    `found` gives ids by the source that a case names (`search:` and the id of the search).
    """
    known = {run.case.token_ids for run in runs if run.case and not run.case.source.startswith("search:")}
    kept = []
    for run in runs:
        if run.case is None or not run.case.source.startswith("search:"):
            kept.append(run)
        elif (ids := found.get(run.case.source)) is not None and ids not in known:
            kept.append(dataclasses.replace(run, case=dataclasses.replace(run.case, token_ids=ids)))
    return tuple(kept)


def _setup(setup: Setup, run: Run) -> Setup:
    """Return the setup of a role for a run, which may be in another precision than the declared one."""
    if not run.dtype:
        return setup
    return dataclasses.replace(setup, dtype=ORACLE_OF[run.dtype] if setup.role == "oracle" else run.dtype)


def _source(run: Run, folders: Mapping[tuple[str, str], Path], replay: bool) -> Path | None:
    if not run.level:
        return None
    return folders["oracle" if replay else "accel", run.pin or ""]


def _asked(run: Run, *, kind: str = "", steps: tuple[tuple[int, int], ...] = (), before: tuple[int, ...] = ()) -> Run:
    """Return the run without what does not change the reference's answer (its name, layout, phase)."""
    return dataclasses.replace(
        run,
        id="golden",
        stage="",
        kind=kind or run.kind,
        steps=steps,
        before=before,
        layout=Layout(),
        repeat=1,
        pin="source" if run.level else None,
        options={k: v for k, v in run.options.items() if k in _REFERENCE_OPTIONS},
    )


def _address(run: Run, setup: Setup, pins: Path | None) -> str:
    source = "/".join(pins.parts[-2:]) if pins is not None else ""
    asked = {
        "run": as_json(run), "setup": as_json(setup), "source": source, "recorder": recorder.VERSION, "format": FORMAT,
    }  # fmt: skip
    return f"{run.kind}{run.level}-{digest_of(asked)}"
