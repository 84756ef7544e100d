"""`day0.toml` and `--set` as plain data. Knows TOML, lines and paths; must not know what any key means.

What is wrong is told with its line; relative paths become relative to the file's folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from harness.errors import ConfigError, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same parser under its older name
    import tomli as tomllib

Where = Callable[[tuple[str, ...]], str]

_PATHS = ("checkpoint", "out", "after", "goldens", "checklists", "manifest")
_WORDS = ("spec", "python", *_PATHS)  # values that are text whatever they look like
_OPAQUE = ("serve:", "openai:", "traces:")  # a `?` in these belongs to the command, the address or the folder


def read_file(file: Path, known: Mapping[str, Sequence[str]]) -> tuple[dict[str, Any], Where]:
    """Read a configuration file; return its sections, and a function that tells the line of a key.

    `known` gives the valid keys by section. Raises: ConfigError, naming the nearest valid key and the line.
    """
    text = _read(file)
    data = _parse(text, file)

    def where(path: tuple[str, ...]) -> str:
        return _where(text, path, file)

    check_keys(data, known, where)
    _anchor(data, file.parent)
    return data, where


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no configuration file at {file}; `day0 init` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"expected a readable UTF-8 TOML file at {file}, found: {error}") from None


def _parse(text: str, file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None


def check_keys(data: Mapping[str, Any], known: Mapping[str, Sequence[str]], where: Where) -> None:
    """Raise ConfigError on the first section or key that does not exist."""
    for section, content in data.items():
        if section not in known:
            hint = _section_hint(section, known)
            raise ConfigError(f"{where((section,))}: unknown section {section!r}{hint}")
        if not isinstance(content, Mapping):
            raise ConfigError(
                f"{where((section,))}: expected a table [{section}], found {content!r}; put its keys below it"
            )
        for key in content:
            if key not in known[section]:
                hint = nearest(key, list(known[section]))
                raise ConfigError(f"{where((section, key))}: unknown key {key!r} in [{section}]{hint}")


def _section_hint(word: str, known: Mapping[str, Sequence[str]]) -> str:
    """Name the section that has a key of this name, else the nearest section."""
    owners = [f"{section}.{word}" for section, keys in known.items() if word in keys]
    return f" (did you mean {owners[0]!r}?)" if owners else nearest(word, list(known))


def _where(text: str, path: tuple[str, ...], file: Path) -> str:
    """Return `file:line` of a key as well as a line scan can tell."""
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        bare = line.strip()
        if bare.startswith("["):
            section = bare.strip("[]").split("#")[0].strip().strip("]")
            if path == (section,) or (len(path) == 1 and section.split(".")[0] == path[0]):
                return f"{file}:{number}"
            if len(path) > 1 and section.split(".")[:2] == list(path[:2]):
                return f"{file}:{number}"
            continue
        key = bare.split("=")[0].strip().strip("\"'")
        if "=" in bare and (
            ".".join(path) == (f"{section}.{key}" if section else key) or (not section and key.split(".")[0] == path[0])
        ):
            return f"{file}:{number}"
    return str(file)


def _anchor(data: dict[str, Any], folder: Path) -> None:
    """Make relative paths of a file relative to its folder."""
    run = data.get("run", {})
    for key in _PATHS:
        if isinstance(run.get(key), str):
            run[key] = _under(folder, run[key])
    for side in ("reference", "accel"):
        spec = data.get(side, {}).get("spec")
        if isinstance(spec, str):
            data[side]["spec"] = anchor_spec(spec, folder)
    python = data.get("accel", {}).get("python")
    if isinstance(python, str) and "/" in python:
        data["accel"]["python"] = _under(folder, python)


def anchor_spec(spec: str, folder: Path) -> str:
    """Return a SPEC with a relative path in it made relative to `folder`."""
    for prefix in ("hf:", "traces:"):
        if spec.startswith(prefix):
            return prefix + _under(folder, spec[len(prefix) :])
    return _under(folder, spec) if spec.split(":")[0].endswith(".py") else spec


def _under(folder: Path, path: str) -> str:
    return path if path.startswith("~") else str(folder / path)


def parse_set(item: str) -> tuple[list[str], Any]:
    """Split `section.key=value`; the value is TOML where it parses as TOML, else the bare string."""
    dotted, equals, text = item.partition("=")
    path = [p.strip() for p in dotted.split(".", 2)]
    if not equals or len(path) < 2 or not all(path):
        raise ConfigError(f"expected --set section.key=value, found --set {item}")
    free = len(path) == 3 or path[-1] in _WORDS
    if free:
        return path, text.strip("\"'") if text[:1] in "\"'" else text
    try:
        return path, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return path, text


def query_dtype(spec: str) -> str | None:
    """Return the precision that a SPEC's query names, or None."""
    if spec.startswith(_OPAQUE) or "?" not in spec:
        return None
    return dict(parse_qsl(spec.partition("?")[2], keep_blank_values=True)).get("dtype")
