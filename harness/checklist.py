"""`checklists/*.toml` -> criteria, questions, practices, waivers. Knows files and words, not measurements."""

from __future__ import annotations

import importlib.resources
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.errors import ChecklistError, nearest
from harness.metrics.names import METRICS
from harness.types import STAGES, Criterion, Waiver, digest_of

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same parser under its older name
    import tomli as tomllib

NEEDS = (
    "image", "weights", "phases", "serves", "multi_card", "chat", "replay", "decisions", "cache", "operators",
    "float32", "experts", "generation", "observer", "compiled", "converts", "accelerator",
)  # fmt: skip
"""Words that a criterion's `needs` may use."""
OPS = ("<=", ">=", "==")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Criterion(_Model):
    id: str = Field(min_length=1)
    metric: str
    op: str
    limit: float
    unit: str
    why: str = Field(min_length=1)
    source: str = Field(min_length=1)
    subject: str = "*"
    select: dict[str, str] = {}
    per_sqrt_n: float = Field(default=0.0, ge=0.0)
    blocking: bool = True
    core: bool = False
    needs: list[str] = []
    practice: str = ""
    calibrated: str = ""


class _Stage(_Model):
    stage: str
    questions: list[str] = []
    criteria: list[_Criterion] = Field(min_length=1)


class _Practice(_Model):
    id: str
    title: str
    ticked_by: str
    criteria: list[str] = []
    facts: list[str] = []


class _Practices(_Model):
    practices: list[_Practice]


class _Waiver(_Model):
    criterion: str
    subject: str = "*"
    owner: str = Field(min_length=1)
    link: str = Field(min_length=1)
    expires: date = Field(strict=False)


class _Waivers(_Model):
    waivers: list[_Waiver] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Practice:
    """One of the seven practices, and what ticks it: criteria that must have passed, facts that must be known."""

    id: str
    title: str
    ticked_by: str
    criteria: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checklists:
    """All promises. `digest` changes with any word of them; `by_stage` and `questions` have every stage as key."""

    by_stage: Mapping[str, tuple[Criterion, ...]]
    questions: Mapping[str, tuple[str, ...]]
    practices: tuple[Practice, ...]
    waivers: tuple[Waiver, ...]
    digest: str

    def criterion(self, id: str) -> Criterion | None:
        """Return the criterion of this id, if there is one."""
        return next((c for criteria in self.by_stage.values() for c in criteria if c.id == id), None)


def load_checklists(folder: Path | None = None) -> Checklists:
    """Read a folder of checklists, by default the installed one. Raises ChecklistError naming file and criterion.

    A folder of one's own may leave stages out: they keep the installed criteria.
    """
    shipped = Path(str(importlib.resources.files("checklists")))
    folder = folder or shipped
    if not folder.is_dir():
        raise ChecklistError(f"expected a folder of checklists at {folder}, found none")
    texts: dict[str, Any] = {}
    stages: dict[str, _Stage] = {}
    for name in STAGES:
        path = _first(folder, shipped, f"{name}.toml")
        if path is not None:
            texts[name] = _read(path)
            stages[name] = _stage(path, texts[name], name)
    unknown = [p for p in sorted(folder.glob("*.toml")) if p.stem not in (*STAGES, "practices", "waivers")]
    if unknown:
        raise ChecklistError(
            f"expected checklists named after stages, found {unknown[0]}{nearest(unknown[0].stem, list(STAGES))}"
        )
    if not stages:
        raise ChecklistError(f"expected <stage>.toml files in {folder}, found none")
    _refuse_twins(stages)
    practices, waivers = (
        _practices(_first(folder, shipped, "practices.toml")),
        _waivers(folder / "waivers.toml", stages),
    )
    texts["waivers"] = [[w.criterion, w.subject, w.owner, w.link, w.expires] for w in waivers]
    return Checklists(
        by_stage={n: tuple(_criterion(n, c) for c in stages[n].criteria) if n in stages else () for n in STAGES},
        questions={n: tuple(stages[n].questions) if n in stages else () for n in STAGES},
        practices=practices,
        waivers=waivers,
        digest=digest_of(texts),
    )


def _first(folder: Path, shipped: Path, name: str) -> Path | None:
    return next((p for p in (folder / name, shipped / name) if p.is_file()), None)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ChecklistError(f"expected TOML in {path}, found: {error}") from error


def _stage(path: Path, data: Mapping[str, Any], name: str) -> _Stage:
    stage: _Stage = _checked(_Stage, path, data)
    if stage.stage != name:
        raise ChecklistError(f"expected stage = {name!r} in {path}, found {stage.stage!r}")
    for c in stage.criteria:
        place = f"{path}, criterion {c.id!r}"
        if c.metric not in METRICS:
            raise ChecklistError(f"{place}: unknown metric {c.metric!r}{nearest(c.metric, list(METRICS))}")
        if c.unit != METRICS[c.metric]:
            raise ChecklistError(f"{place}: expected the unit {METRICS[c.metric]!r} of {c.metric}, found {c.unit!r}")
        if c.op not in OPS:
            raise ChecklistError(f"{place}: expected op to be one of {', '.join(OPS)}, found {c.op!r}")
        if c.limit != c.limit:
            raise ChecklistError(f"{place}: expected a number as limit, found NaN")
        for word in c.needs:
            if word not in NEEDS:
                raise ChecklistError(f"{place}: unknown word {word!r} in needs{nearest(word, list(NEEDS))}")
    return stage


def _checked(model: type[_Model], path: Path, data: Mapping[str, Any]) -> Any:
    """Validate a file; the message names the file, the entry and the nearest valid key."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")  # it may also be missed
        where, key = _place(data, first["loc"]), str(first["loc"][-1]) if first["loc"] else ""
        if first["type"] == "extra_forbidden":
            hint = nearest(key, _keys(model, first["loc"]))
            raise ChecklistError(f"{path}{where}: unknown key {key!r}{hint}") from error
        found = "" if first["type"] == "missing" else f", found {first['input']!r:.80}"
        raise ChecklistError(f"{path}{where}: {key}: {first['msg']}{found}") from error


def _place(data: Any, loc: Sequence[Any]) -> str:
    """Return which entry a location is in, by its id where it has one."""
    if len(loc) >= 2 and isinstance(loc[1], int):
        entry = data[loc[0]][loc[1]]
        name = entry.get("id", entry.get("criterion", loc[1])) if isinstance(entry, Mapping) else loc[1]
        return f", {'criterion' if loc[0] == 'criteria' else loc[0]} {name!r}"
    return ""


def _keys(model: type[_Model], loc: Sequence[Any]) -> list[str]:
    inner: dict[str, type[_Model]] = {"criteria": _Criterion, "practices": _Practice, "waivers": _Waiver}
    return list((inner.get(str(loc[0]), model) if len(loc) > 1 else model).model_fields)


def _refuse_twins(stages: Mapping[str, _Stage]) -> None:
    seen: dict[str, str] = {}
    for name, stage in stages.items():
        for c in stage.criteria:
            if c.id in seen:
                raise ChecklistError(f"criterion id {c.id!r} is used twice: in {seen[c.id]}.toml and in {name}.toml")
            seen[c.id] = name


def _criterion(stage: str, c: _Criterion) -> Criterion:
    return Criterion(stage=stage, **{**c.model_dump(), "needs": tuple(c.needs)})


def _practices(path: Path | None) -> tuple[Practice, ...]:
    if path is None:
        return ()
    found = _checked(_Practices, path, _read(path)).practices
    return tuple(Practice(**{**p.model_dump(), "criteria": tuple(p.criteria), "facts": tuple(p.facts)}) for p in found)


def _waivers(path: Path, stages: Mapping[str, _Stage]) -> tuple[Waiver, ...]:
    if not path.is_file():
        return ()
    known = [c.id for stage in stages.values() for c in stage.criteria]
    waivers = _checked(_Waivers, path, _read(path)).waivers
    for w in waivers:
        if w.criterion not in known:
            raise ChecklistError(f"{path}: a waiver of unknown criterion {w.criterion!r}{nearest(w.criterion, known)}")
    return tuple(
        Waiver(criterion=w.criterion, subject=w.subject, owner=w.owner, link=w.link, expires=w.expires.isoformat())
        for w in waivers
    )
