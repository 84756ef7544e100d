"""The machine truth of a run, `results.json`. Knows records; must not know how anything was measured or is rendered.

Every report is rendered from this file alone. JSON holds no NaN: a value that is not finite is null, and the
measurement says under `detail.non_finite` what it was.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.errors import EXIT_ACCEPTED, EXIT_NOTHING, EXIT_REFUSED, TraceError
from harness.types import STAGES, Finding, Layout, Measurement, Scope, StageResult, Status, Verdict, as_json

if TYPE_CHECKING:
    from harness.checklist import Practice as Promised

FORMAT = "day0.results/1"
FILE_NAME = "results.json"
SCHEMA_FILE = Path(__file__).with_name("results.schema.json")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ScopeReport(_Model):
    """What the port claims, what the cases reached, and in sentences what this run therefore does not cover."""

    claimed: Mapping[str, Any] = Field(default_factory=dict)
    exercised: Mapping[str, Any] = Field(default_factory=dict)
    not_covered: tuple[str, ...] = ()


class Environment(_Model):
    """Versions by package, the devices and sides that ran, digests of checkpoint, checklist, config, port."""

    versions: Mapping[str, str] = Field(default_factory=dict)
    device: str = ""
    sides: Mapping[str, Any] = Field(default_factory=dict)
    digests: Mapping[str, str] = Field(default_factory=dict)
    facts: Mapping[str, Any] = Field(default_factory=dict)


class Practice(_Model):
    """One of the seven practices: ticked from evidence, or stated as not done with the reason."""

    id: str
    title: str
    ticked: bool
    evidence: str


class StageReport(_Model):
    """One stage as it was gated, and the manual questions that its checklist asks a person."""

    name: str
    status: Status
    accepted: bool
    reason: str = ""
    verdicts: tuple[Verdict, ...] = ()
    findings: tuple[Finding, ...] = ()
    unjudged: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
    facts: Mapping[str, Any] = Field(default_factory=dict)
    wall_s: float = 0.0
    peak_bytes: int = 0

    @classmethod
    def of(cls, stage: StageResult, questions: Sequence[str] = ()) -> StageReport:
        """Build from a StageResult; values that are not finite become null."""
        return cls(
            name=stage.name,
            status=stage.status,
            accepted=stage.accepted,
            reason=stage.reason,
            verdicts=tuple(finite_verdict(v) for v in stage.verdicts),
            findings=tuple(dataclasses.replace(f, residual_ratio=_finite(f.residual_ratio)) for f in stage.findings),
            unjudged=stage.unjudged,
            questions=tuple(questions),
            facts=finite_json(stage.facts),
            wall_s=stage.wall_s,
            peak_bytes=stage.peak_bytes,
        )


class Results(_Model):
    """The whole run. `measurements` maps a stage to its file, relative to the run's folder.

    `cut` says, where part of a model was verified, what that is: `sentence`, and `layers`, the numbers in the whole
    model of layers 0, 1, ... of this run.
    """

    format: Literal["day0.results/1"] = "day0.results/1"
    accepted: bool
    exit_code: int
    partial: bool = False
    partial_reason: str = ""
    profile: str = "quick"
    command: str = ""
    started: str = ""
    wall_s: float = 0.0
    scope: ScopeReport = ScopeReport()
    environment: Environment = Environment()
    stages: tuple[StageReport, ...] = ()
    measurements: Mapping[str, str] = Field(default_factory=dict)
    cut: Mapping[str, Any] = Field(default_factory=dict)
    practices: tuple[Practice, ...] = ()
    problems: tuple[str, ...] = ()

    def stage(self, name: str) -> StageReport | None:
        """Return a stage by its id."""
        return next((s for s in self.stages if s.name == name), None)

    @property
    def first_refused(self) -> StageReport | None:
        """The first stage that is neither accepted nor skipped, or None."""
        return next((s for s in self.stages if not s.accepted and s.status is not Status.SKIPPED), None)


def build_results(
    stages: Sequence[StageResult],
    *,
    claimed: Scope | Mapping[str, Any] | None = None,
    exercised: Mapping[str, Any] | None = None,
    not_covered: Sequence[str] = (),
    environment: Environment | None = None,
    required: Sequence[str] = (),
    questions: Mapping[str, Sequence[str]] | None = None,
    practices: Sequence[Promised] = (),
    practice_evidence: Mapping[str, str] | None = None,
    problems: Sequence[str] = (),
    **rest: Any,
) -> Results:
    """Put gated stages together into Results and decide whether the run is accepted.

    `required` are stages whose skipping refuses the run; `problems` are further reasons to refuse it (an expired or
    unmatched waiver, a required feature out of scope); `practices` are those of the checklists, ticked from verdicts
    and `practice_evidence`. `rest` are other fields of Results.
    """
    accepted, exit_code = decide(stages, required=required, problems=problems)
    claims = finite_json(as_json(claimed)) if claimed is not None else {}
    gaps = unexercised(claims, exercised or {})
    skipped = [f"{s.name}: {s.reason or 'outside the scope'}" for s in stages if s.status is Status.SKIPPED]
    return Results(
        accepted=accepted,
        exit_code=exit_code,
        scope=ScopeReport(
            claimed=claims,
            exercised=finite_json(exercised or {}),
            not_covered=tuple(dict.fromkeys([*skipped, *not_covered, *gaps])),
        ),
        environment=environment or Environment(),
        stages=tuple(StageReport.of(s, (questions or {}).get(s.name, ())) for s in stages),
        practices=tuple(tick(practices, stages, practice_evidence or {})),
        problems=tuple(problems),
        **rest,
    )


def unexercised(claimed: Mapping[str, Any], exercised: Mapping[str, Any]) -> list[str]:
    """Return in sentences what is claimed and was not reached: lengths, layouts, pictures."""
    gaps = []
    longest, most = exercised.get("longest_tokens"), claimed.get("max_length_tokens")
    if longest is not None and most is not None and longest < most:
        gaps.append(f"lengths above {longest} tokens: {most} are claimed, no case of this run was longer")
    if "layouts" in exercised:
        layouts = [str(Layout(**each)) for each in claimed.get("layouts", ())]
        gaps += [f"layout {each}: claimed, not run" for each in layouts if each not in exercised["layouts"]]
    if claimed.get("image") and exercised.get("images") == []:
        gaps.append("pictures: claimed, no case of this run had one")
    return gaps


def decide(
    stages: Sequence[StageResult], *, required: Sequence[str] = (), problems: Sequence[str] = ()
) -> tuple[bool, int]:
    """Say whether a run is accepted, and its exit code.

    Accepted: at least one stage is, and each of the others is too or was skipped without being required.
    """
    names = {s.name for s in stages}
    missing = [r for r in required if r in STAGES and r not in names]
    refused = [s for s in stages if not s.accepted and (s.status is not Status.SKIPPED or s.name in required)]
    if refused or problems or missing:
        return False, EXIT_REFUSED
    if not any(s.accepted for s in stages):
        return False, EXIT_NOTHING
    return True, EXIT_ACCEPTED


def tick(promised: Sequence[Promised], stages: Sequence[StageResult], evidence: Mapping[str, str]) -> list[Practice]:
    """Tick each practice whose criteria all passed and whose facts are all known; else say why it is not done.

    `evidence` gives a sentence by the name of a fact, or by a practice's id for all its facts.
    """
    verdicts = {v.criterion.id: v for s in stages for v in s.verdicts}
    return [_ticked(p, verdicts, evidence) for p in promised]


def _ticked(practice: Promised, verdicts: Mapping[str, Verdict], evidence: Mapping[str, str]) -> Practice:
    lacking, shown = [], []
    for name in practice.criteria:
        verdict = verdicts.get(name)
        if verdict is not None and verdict.status is Status.PASSED:
            shown.append(f"{name} ({verdict.count} measured)")
        else:
            lacking.append(f"{name} {f'is {verdict.status.value}' if verdict is not None else 'was not judged'}")
    for name in practice.facts:
        known = evidence.get(name) or evidence.get(practice.id)
        if known:
            shown.append(known)
        else:
            lacking.append(f"nothing in this run shows {name.replace('_', ' ')}")
    done = bool(shown) and not lacking
    text = (
        f"{practice.ticked_by}: {', '.join(dict.fromkeys(shown))}"
        if done
        else f"not done: {', '.join(lacking) or 'no evidence is asked for'}"
    )
    return Practice(id=practice.id, title=practice.title, ticked=done, evidence=text)


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


def finite_json(value: Any) -> Any:
    """Return a JSON value in which every number that is not finite is null."""
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, Mapping):
        return {str(k): finite_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_json(v) for v in value]
    return value


def finite_measurement(measurement: Measurement) -> Measurement:
    """Return the measurement with finite values only; `detail.non_finite` keeps what the value was."""
    detail = finite_json(measurement.detail)
    if measurement.value is not None and not math.isfinite(measurement.value):
        detail = {**detail, "non_finite": str(measurement.value)}
    return dataclasses.replace(
        measurement, value=_finite(measurement.value), where=finite_json(measurement.where), detail=detail
    )


def finite_verdict(verdict: Verdict) -> Verdict:
    """Return the verdict with finite values only."""
    return dataclasses.replace(
        verdict,
        worst=finite_measurement(verdict.worst) if verdict.worst is not None else None,
        limit=_finite(verdict.limit),
        margin=_finite(verdict.margin),
        criterion=dataclasses.replace(verdict.criterion, limit=_finite_limit(verdict.criterion.limit)),
    )


def _finite_limit(limit: float) -> float:
    """Return the limit; an infinite one, which promises nothing, becomes the largest number that JSON can hold."""
    return limit if math.isfinite(limit) else math.copysign(sys.float_info.max, limit)


def write_measurements(measurements: Iterable[Measurement], path: Path) -> None:
    """Write one JSON object a line, atomically."""
    _write_atomically(path, "".join(_line(measurement) + "\n" for measurement in measurements))


def _line(measurement: Measurement) -> str:
    try:
        return json.dumps(as_json(measurement), sort_keys=True, allow_nan=False)
    except ValueError:  # few hold a number that JSON cannot
        return json.dumps(as_json(finite_measurement(measurement)), sort_keys=True, allow_nan=False)


def write_results(results: Results, run_dir: Path) -> Path:
    """Write `results.json` into a run's folder, atomically; return its path."""
    path = run_dir / FILE_NAME
    data = finite_json(results.model_dump(mode="json"))
    _write_atomically(path, json.dumps(data, indent=1, allow_nan=False) + "\n")
    return path


def read_results(run_dir: Path) -> Results:
    """Read `results.json` of a run's folder (or the file itself). Raises TraceError if it is not what it should be."""
    path = run_dir / FILE_NAME if run_dir.is_dir() else run_dir
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TraceError(f"expected {FILE_NAME} in {run_dir}, found none; name the folder of a day0 run") from None
    except (OSError, ValueError) as error:
        raise TraceError(f"expected a JSON file at {path}, found: {error}") from None
    found = data.get("format") if isinstance(data, dict) else type(data).__name__
    if found != FORMAT:
        raise TraceError(
            f"expected format {FORMAT!r} in {path}, found {found!r}; run `day0 verify` again with this version"
        )
    try:
        return Results.model_validate(data)
    except ValidationError as error:
        raise TraceError(
            f"{path} does not follow {FORMAT}: {error.error_count()} problems, first: {_first(error)}"
        ) from None


def _first(error: ValidationError) -> str:
    item = error.errors(include_url=False)[0]
    return f"{'.'.join(str(p) for p in item['loc'])}: {item['msg']}"


def schema_text() -> str:
    """Return the JSON schema of `results.json`, as shipped in `results.schema.json`."""
    schema = Results.model_json_schema(mode="serialization")
    return (
        json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=1, sort_keys=True)
        + "\n"
    )


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
