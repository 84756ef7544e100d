"""The user's words as one frozen record. Knows `day0.toml`, flags and `--set`; must not know stages, models or torch.

Precedence: `--set` over flags over the file over defaults. Relative paths in a file are relative to that file. An
unknown key is an error that names the nearest valid one and, for a file, the line.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from harness.configfile import Where, anchor_spec, check_keys, parse_set, query_dtype, read_file
from harness.errors import ConfigError, SpecError, UsageError, nearest
from harness.precision.scheme import parse_precision
from harness.types import STAGES, Layout, Scope, as_json, digest_of

DEFAULT_FILE = Path("day0.toml")
FEATURES = (
    "text",
    "image",
    "multi_card",
    "long_context",
    "phases",
    "weights",
    "chat",
    "serves",
    "replay",
    "decisions",
    "cache",
    "operators",
    "float32",
    "converts",
)
"""What `--require` may name besides stages."""

DTYPES = ("float64", "float32", "bfloat16", "float16")
_NOT_SECTIONS = ("file", "words")
_DIGESTED_RUN_KEYS = ("profile", "require")
_FLAGS_AGAIN = ("spec", "profile", "require", "goldens", "checklists", "layers", "manifest")


def parse_layout(text: str) -> Layout:
    """Parse `single`, `tp2`, `tp2xpp2`. Raises ValueError on anything else."""
    if text in ("single", "1"):
        return Layout()
    degrees: dict[str, int] = {}
    for part in text.split("x"):
        axis, number = part[:2], part[2:]
        if axis not in ("tp", "ep", "pp", "sp") or not number.isdigit() or int(number) < 1 or axis in degrees:
            raise ValueError(f"expected a layout like 'single', 'tp2' or 'tp2xpp2', found {text!r}")
        degrees[axis] = int(number)
    return Layout(**degrees)


def parse_layers(value: Any) -> tuple[int, ...]:
    """Parse `0-3,47,92`, or a list of numbers and such words, into rising layer numbers. Raises ValueError."""
    found: list[int] = []
    for word in [str(w) for w in (value if isinstance(value, (list, tuple)) else _words(str(value)))]:
        first, dash, last = word.partition("-")
        if not all(w.isdecimal() and len(w) < 7 for w in (first, last if dash else first)):
            raise ValueError(f"expected layers like 0-3,47,92, found {word!r}")
        found += range(int(first), int(last if dash else first) + 1)
    if not found or sorted(set(found)) != found:
        raise ValueError(f"expected layers in rising order, each once, like 0-3,47,92, found {value!r}")
    return tuple(found)


def _words(value: Any) -> Any:
    """Turn `"text,image"` into a list; leave lists alone."""
    return [w.strip() for w in value.split(",") if w.strip()] if isinstance(value, str) else value


def parse_stages(value: Any) -> tuple[str, ...]:
    """Parse `all` or a list of stage ids (hyphens allowed) into ids in running order. Raises ValueError."""
    words = [str(w).replace("-", "_") for w in (_words(value) or ())]
    for word in words:
        if word != "all" and word not in STAGES:
            raise ValueError(f"unknown stage {word!r}{nearest(word, [*STAGES, 'all'])}")
    if not words:
        raise ValueError("expected at least one stage, found none; `all` runs the six")
    return STAGES if "all" in words else tuple(s for s in STAGES if s in words)


def _require(value: Any) -> tuple[str, ...]:
    words = [str(w).replace("-", "_") for w in (_words(value) or ())]
    known = sorted({*STAGES, *FEATURES})
    for word in words:
        if word not in known:
            raise ValueError(f"cannot require {word!r}{nearest(word, known)}")
    return tuple(words)


def _layouts(value: Any) -> Any:
    items = _words(value)
    if not isinstance(items, Sequence):
        return items
    return tuple(parse_layout(v) if isinstance(v, str) else v for v in items)


def _layers(value: Any) -> Any:
    return None if value is None else parse_layers(value)


def _precision(value: Any) -> Any:
    """Spell out `[accel.precision]`; raise ValueError for a word that it does not have."""
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a table like {{cache = 'float8_e4m3fn:tensor'}}, found {value!r}")
    try:
        return parse_precision(value).words()
    except SpecError as error:
        raise ValueError(str(error)) from None


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class RunSection(_Section):
    """[run]: which stages, of which checkpoint (None: the one that a SPEC names), where to, and how to go on.

    `layers` are those of the checkpoint that both sides run (None: all); `random_weights` makes them up, where there is
    a configuration and no weights yet. `manifest`: digests that were published of the checkpoint's files; `reread`:
    read files again that did not change since an earlier run read them.
    """

    checkpoint: Path | None = None
    layers: Annotated[tuple[int, ...] | None, BeforeValidator(_layers)] = None
    random_weights: bool = False
    manifest: Path | None = None
    reread: bool = False
    stage: Annotated[tuple[str, ...], BeforeValidator(parse_stages)] = STAGES
    out: Path = Path("day0-run")
    profile: Literal["quick", "full"] = "quick"
    keep_going: bool = False
    resume: bool = False
    after: Path | None = None
    goldens: Path | None = None
    checklists: Path | None = None
    require: Annotated[tuple[str, ...], BeforeValidator(_require)] = ()


class ReferenceSection(_Section):
    """[reference]: the side that is believed. `dtype` None is one precision above the port."""

    spec: str = "builtin:reference"
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None
    options: Mapping[str, str] = Field(default_factory=dict)


class AccelSection(_Section):
    """[accel]: the side under test. `python` is another interpreter that has the vendor's environment.

    `precision` is what the port declares of weights, activations, cache and state beside its dtype. `fallback` names
    operators, comma between, that the port shall run on its reference: its own option of that name.
    """

    spec: str = "builtin:accel"
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "bfloat16"
    precision: Annotated[Mapping[str, str], BeforeValidator(_precision)] = Field(default_factory=dict)
    python: str | None = None
    fallback: str = ""
    options: Mapping[str, str] = Field(default_factory=dict)


class ScopeSection(_Section):
    """[scope]: narrows what the port claims. None leaves the port's own claim."""

    image: bool | None = None
    layouts: Annotated[tuple[Layout, ...] | None, BeforeValidator(_layouts)] = None
    phases: tuple[str, ...] | None = None
    max_length_tokens: Annotated[int, Field(ge=1)] | None = None
    replay: bool | None = None
    serves: bool | None = None
    chat: bool | None = None
    fallbacks: tuple[str, ...] | None = None
    precisions: tuple[Literal["float32"], ...] | None = None
    unobservable: Mapping[str, str] = Field(default_factory=dict)
    off: Mapping[str, str] = Field(default_factory=dict)

    def apply(self, scope: Scope) -> Scope:
        """Return the port's scope with what was set here put over it."""
        import dataclasses

        given: dict[str, Any] = {k: v for k in type(self).model_fields if (v := getattr(self, k)) is not None}
        given["unobservable"] = {**scope.unobservable, **self.unobservable}
        claimed = set(self.precisions or ())
        given["off"] = {k: v for k, v in {**scope.off, **self.off}.items() if k not in claimed}
        given.setdefault("precisions", tuple(p for p in scope.precisions if p not in given["off"]))
        return dataclasses.replace(scope, **given)


class WatchdogSection(_Section):
    """[watchdog]: seconds without a sign of life before a side counts as hung."""

    load_s: Annotated[float, Field(gt=0)] = 600.0
    run_s: Annotated[float, Field(gt=0)] = 300.0
    startup_s: Annotated[float, Field(gt=0)] = 300.0


class Config(_Section):
    """Everything the user said. `file` is where it was read; `words` are the flags to type again."""

    run: RunSection = RunSection()
    reference: ReferenceSection = ReferenceSection()
    accel: AccelSection = AccelSection()
    scope: ScopeSection = ScopeSection()
    watchdog: WatchdogSection = WatchdogSection()
    file: Path | None = None
    words: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Hex digest of all that can change what is measured: sides, scope, profile, requirements.

        Where a run writes, which stages it takes and how long it waits are left out, so that `--resume` and `--after`
        find a run whose measurements still stand.
        """
        data = self.model_dump(mode="json", include={"reference", "accel", "scope"})
        for side in ("reference", "accel"):  # one port has one digest, however its path is spelt
            data[side]["spec"] = anchor_spec(data[side]["spec"], Path.cwd())
        run = self.run.model_dump(mode="json", include=set(_DIGESTED_RUN_KEYS))
        return digest_of(as_json({**data, "run": run}))


def load_config(
    file: Path | None = None,
    *,
    flags: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    sides: tuple[str, ...] = ("reference", "accel"),
) -> Config:
    """Merge file, flags (`section.key` -> value, None is unset) and `--set section.key=value` into one Config.

    Without `file`, `day0.toml` of the current folder is read if it is there. `sides` are those that must be known.

    Raises: ConfigError, naming the nearest valid key and the line.
    """
    if file is None and DEFAULT_FILE.is_file():
        file = DEFAULT_FILE
    origins: dict[tuple[str, ...], str] = {}
    data: dict[str, Any] = {}
    known = _known_keys()
    if file is not None:
        from_file, where = read_file(file, known)
        _merge(data, from_file, origins, where)
    for dotted, value in (flags or {}).items():
        if value is not None:
            _put(data, dotted.split("."), value, origins, _flag_name(dotted))
    for item in sets:
        path, value = parse_set(item)
        check_keys(_nest(path, value), known, _always(f"--set {item}"))
        _put(data, path, value, origins, f"--set {item}")
    _complete_sides(data, sides)
    try:
        config = Config.model_validate({**data, "file": file, "words": _words_again(flags or {}, sets)})
    except ValidationError as error:
        raise ConfigError(_explain(error, origins)) from None
    _check_paths(config, origins)
    return config


def _check_paths(config: Config, origins: Mapping[tuple[str, ...], str]) -> None:
    """Raise ConfigError for a path that cannot be what it is named for, before anything is started."""
    run, python = config.run, config.accel.python
    wrong = [
        ("out", run.out, run.out.exists() and not run.out.is_dir(), "a folder, or nothing yet"),
        ("goldens", run.goldens, run.goldens and run.goldens.exists() and not run.goldens.is_dir(), "a folder"),
        ("checklists", run.checklists, run.checklists and not any(run.checklists.glob("*.toml")), "<stage>.toml files"),
        ("after", run.after, run.after and not (run.after / "results.json").is_file(), "the folder of a finished run"),
    ]
    for key, path, bad, expected in wrong:
        if bad:
            found = "a file" if path is not None and path.is_file() else "none" if path and path.is_dir() else "nothing"
            raise ConfigError(
                f"{origins.get(('run', key), 'run.' + key)}: expected {expected} at {path}, found {found}"
            )
    if python is not None and shutil.which(python) is None:
        origin = origins.get(("accel", "python"), "accel.python")
        raise ConfigError(f"{origin}: expected an interpreter that can be run, found {python!r}; give its whole path")


def _known_keys() -> dict[str, list[str]]:
    """Return the keys by section."""
    sections = {n: f.annotation for n, f in Config.model_fields.items() if n not in _NOT_SECTIONS}
    return {name: list(cast("type[_Section]", section).model_fields) for name, section in sections.items()}


def _merge(data: dict[str, Any], new: Mapping[str, Any], origins: dict[tuple[str, ...], str], where: Where) -> None:
    for section, content in new.items():
        data.setdefault(section, {}).update(content)
        for key in content:
            origins[(section, key)] = where((section, key))


def _words_again(flags: Mapping[str, Any], sets: Sequence[str]) -> list[str]:
    """Return the flags that a reproduction needs: not where a run writes, nor which stages or how it goes on."""
    again = []
    for dotted, value in flags.items():
        if value is True and dotted == "run.random_weights":
            again.append(_flag_name(dotted))
        elif value is not None and dotted.split(".")[1] in _FLAGS_AGAIN:
            again += [_flag_name(dotted), str(value)]
    return again + [word for item in sets for word in ("--set", item)]


def _flag_name(dotted: str) -> str:
    section, key = dotted.split(".", 1)
    return f"--{section}" if key == "spec" else f"--{key.replace('_', '-')}"


def _put(
    data: dict[str, Any], path: Sequence[str], value: Any, origins: dict[tuple[str, ...], str], origin: str
) -> None:
    node = data
    for key in path[:-1]:
        child = node.get(key)
        node[key] = dict(child) if isinstance(child, Mapping) else {}
        node = node[key]
    node[path[-1]] = value
    origins[tuple(path[:2])] = origin


def _always(place: str) -> Where:
    return lambda _: place


def _nest(path: Sequence[str], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return cast("dict[str, Any]", value)


def _complete_sides(data: dict[str, Any], sides: tuple[str, ...]) -> None:
    """Fill the precision from the SPEC's query; refuse a foreign reference without a port."""
    reference, accel = data.get("reference", {}).get("spec"), data.get("accel", {}).get("spec")
    foreign = isinstance(reference, str) and not reference.startswith("builtin:")
    if "accel" in sides and foreign and accel is None:
        raise UsageError(
            f"the reference is {reference}, but no port was named; add --accel SPEC"
            " (for a first try, the same SPEC with ?dtype=bfloat16)"
        )
    for side in ("reference", "accel"):
        section = data.get(side, {})
        asked = query_dtype(str(section.get("spec") or ""))
        if asked is None:
            continue
        if section.get("dtype") not in (None, asked):
            raise ConfigError(
                f"[{side}] dtype is {section['dtype']!r}, but its SPEC {section['spec']!r} says {asked!r};"
                " keep one of them"
            )
        section["dtype"] = asked


def _explain(error: ValidationError, origins: Mapping[tuple[str, ...], str]) -> str:
    return "\n".join(_problems(error, origins))


def _problems(error: ValidationError, origins: Mapping[tuple[str, ...], str]) -> Iterator[str]:
    for item in error.errors(include_url=False):
        path = tuple(str(p) for p in item["loc"] if isinstance(p, (str, int)))
        origin = origins.get(path[:2], "configuration")
        found = "" if item["type"] == "value_error" else f", found {item.get('input')!r}"
        yield f"{origin}: [{path[0]}] {'.'.join(path[1:])}: {item['msg'].removeprefix('Value error, ')}{found}"
