"""A mapping file: which canonical tap is made of which of a port's tensors. Knows TOML; must not know traces.

format = "day0.map/1"

[[taps]]
tap = "layers.{n}"                            # {n} stands for a number and is the same in both names
from = "model.layers.{n}"
expr = "out[0] + out[1]"                      # `out` where it is left out
dims = "token feature"                        # where it cannot be told from the tensor
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import MappingError, nearest
from harness.mapping.expression import names_in, parse, uses_out

FORMAT = "day0.map/1"
_KEYS = {"tap", "from", "expr", "dims", "kind"}
_HOLE = re.compile(r"\{([a-z]\w*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One canonical tap (`{n}` for a number), the tensor it comes from, and how."""

    tap: str
    source: str
    tree: ast.expr
    text: str
    dims: tuple[str, ...] = ()
    kind: str = ""

    @property
    def patterns(self) -> list[str]:
        """Names of all tensors that the row needs, its own first."""
        return list(dict.fromkeys([*([self.source] if self.source else []), *names_in(self.tree)]))


def read_mapping(path: Path) -> list[Row]:
    """Read a mapping file. Raises MappingError naming the file, the row and what is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise MappingError(f"expected a mapping file at {path}, found: {error}") from error
    try:
        return parse_mapping(text)
    except MappingError as error:
        raise MappingError(f"{path}: {error}") from error


def parse_mapping(text: str) -> list[Row]:
    """Parse the text of a mapping file. Raises MappingError."""
    words = _toml(text)
    if words.get("format") != FORMAT:
        raise MappingError(f"expected format = {FORMAT!r}, found {words.get('format')!r}")
    surplus = sorted(set(words) - {"format", "taps"})
    if surplus:
        raise MappingError(f"unknown key {surplus[0]!r}{nearest(surplus[0], ['format', 'taps'])}")
    rows = words.get("taps")
    if not isinstance(rows, list) or not rows:
        raise MappingError("expected at least one [[taps]], found none: a mapping of nothing maps nothing")
    parsed = [_row(row, number) for number, row in enumerate(rows, start=1)]
    names = [row.tap for row in parsed]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise MappingError(f"expected each tap once, found {twice[0]!r} {names.count(twice[0])} times")
    return parsed


def _toml(text: str) -> Mapping[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise MappingError(f"expected TOML, found: {error}") from error


def _row(words: Any, number: int) -> Row:
    place = f"[[taps]] number {number}"
    if not isinstance(words, dict):
        raise MappingError(f"{place}: expected a table, found {words!r}")
    for key, value in words.items():
        if key not in _KEYS:
            raise MappingError(f"{place}: unknown key {key!r}{nearest(key, sorted(_KEYS))}")
        if not isinstance(value, str):
            raise MappingError(f"{place}: expected a string for {key!r}, found {value!r}")
    tap, source, text = words.get("tap", ""), words.get("from", ""), words.get("expr", "out")
    if not tap:
        raise MappingError(f"{place}: expected `tap`, the canonical name, found none")
    try:
        tree = parse(text)
    except MappingError as error:
        raise MappingError(f"{place} ({tap}): {error}") from error
    if uses_out(tree) and not source:
        raise MappingError(f"{place} ({tap}): the expression speaks of `out`, but there is no `from`")
    row = Row(tap=tap, source=source, tree=tree, text=text, dims=tuple(words.get("dims", "").split()),
              kind=words.get("kind", ""))  # fmt: skip
    if not row.patterns:
        raise MappingError(f"{place} ({tap}): expected a tensor, by `from` or tap(...), found none")
    holes = set(_HOLE.findall(row.patterns[0]))
    others = {hole for name in (tap, *row.patterns[1:]) for hole in _HOLE.findall(name)}
    if others - holes or holes - set(_HOLE.findall(tap)):
        raise MappingError(f"{place} ({tap}): expected the same {{...}} in {tap!r} and in {row.patterns[0]!r}")
    return row


def pattern_of(name: str) -> re.Pattern[str]:
    """Return what matches a name with `{n}` for numbers."""
    parts = _HOLE.split(name)
    seen: set[str] = set()
    text = ""
    for place, part in enumerate(parts):
        if place % 2 == 0:
            text += re.escape(part)
        else:
            text += f"(?P={part})" if part in seen else f"(?P<{part}>\\d+)"
            seen.add(part)
    return re.compile(text)


def filled(name: str, numbers: Mapping[str, str]) -> str:
    """Return a name with its numbers put in."""
    return _HOLE.sub(lambda m: numbers[m.group(1)], name)
