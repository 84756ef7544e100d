"""The facts of the operator suite -> a sentence and tables for a reader. Knows the stage's facts; must not know limits.

What is wrong or costs most comes first; what computes nothing (views) is one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.report.words import number

NAMED = 6
"""Operators that a sentence names, and parts that a cell does."""
BROKE = 160
"""Characters of what a forward raised that a sentence has room for."""
LEVELS = {
    "library": "the device's own kernel, or torch's on a CPU",
    "composite": "torch makes it of other operators, which the device has",
    "host": "falls back to the CPU, itself or inside of it, with a copy there and back",
    "custom": "a custom operator of the port, or one of its package",
    "host tensors": "only ever given tensors that lie on the CPU",
    "none": "no kernel",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTables:
    """What the page shows: rows of text, in order. `alone` has a cell for each of `dtypes`."""

    sentence: str
    levels: Sequence[tuple[str, ...]]
    used: Sequence[tuple[str, ...]]
    views: str
    own: Sequence[tuple[str, ...]]
    dtypes: Sequence[str]
    wrong: Sequence[tuple[str, ...]]
    alone: Sequence[tuple[str, ...]]
    kept: str
    promised: str


def operator_tables(facts: Mapping[str, Any]) -> OperatorTables:
    """Return the tables of a startup stage's facts `operators`."""
    rows = [r for r in facts["rows"] if not r.get("view")]
    views = [(r["operator"], r["prefill"], r["decode"]) for r in facts["rows"] if r.get("view")]
    dtypes = tuple(dict.fromkeys(r["dtype"] for r in facts["alone"]))
    contracts = [c["operator"] for c in facts["contracts"] if not c["failures"]]
    return OperatorTables(
        sentence=sentence(facts),
        levels=_levels(rows),
        used=[_used(r) for r in sorted(rows, key=lambda r: (-r["on_host"], -r["decode"], r["operator"]))],
        views=", ".join(f"{_plain(name)} {prefill} / {decode}" for name, prefill, decode in views),
        own=[(level, ", ".join(names), _offered(facts, level)) for level, names in _own(facts)],
        dtypes=dtypes,
        wrong=[_wrong(r) for r in facts["alone"] if not r["right"]],
        alone=_alone(facts["alone"], dtypes),
        kept=", ".join(contracts),
        promised=", ".join(name for name, problem in facts["runtime"]["checks"].items() if not problem),
    )


def sentence(facts: Mapping[str, Any]) -> str:
    """Return in one sentence what falls back to the CPU; of a plain CPU, at which levels the port's operators are."""
    levels = _levels_in_words(facts)
    if facts["failed"]:  # what was counted until then is no decode step, and no prefill
        return f"operators: the forward that shows which are used broke off: {facts['failed'][:BROKE]}"
    if facts["device"].partition(":")[0] == "cpu":
        return levels or "operators: all are torch's own, on the CPU"
    told = f"{levels}; " if levels else ""
    phase = "decode step" if facts["decode_counted"] else "prefill"
    fell = sorted(facts["fallbacks"].items(), key=lambda pair: -pair[1])
    if not fell:
        return f"{told}nothing of one {phase} falls back from {facts['device']} to the CPU"
    first = ", ".join(f"{_plain(name)} {count}" for name, count in fell[:NAMED])
    more = f" and {len(fell) - NAMED} more" if len(fell) > NAMED else ""
    return f"{told}{sum(facts['fallbacks'].values())} calls of one {phase} fall back to the CPU ({first}{more})"


def _levels(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    found = []
    for level, what in LEVELS.items():
        mine = [r for r in rows if r["level"] == level]
        if mine:
            sums = [sum(r[key] for r in mine) for key in ("prefill", "decode", "on_host")]
            found.append((level, what, str(len(mine)), *map(str, sums)))
    return found


def _used(row: Mapping[str, Any]) -> tuple[str, ...]:
    inside = [_plain(name) for name in row["inside"]]
    few = ", ".join(inside[:NAMED]) + (f" and {len(inside) - NAMED} more" if len(inside) > NAMED else "")
    made_of = row.get("made_of", 0)
    level = f"{row['level']} (of {made_of} of torch's)" if made_of else row["level"]
    host = f"{row['on_host']}{f' ({few})' if few else ''}" if row["on_host"] else "-"
    return row["operator"], row["family"] or "-", level, str(row["prefill"]), str(row["decode"]), host


def _levels_in_words(facts: Mapping[str, Any]) -> str:
    """Return the level of most of the port's operators, and the others by name; "" where a port says nothing."""
    by_level = sorted(_own(facts), key=lambda pair: -len(pair[1]))
    if not by_level:
        return ""
    others = " and ".join(
        f"{', '.join(names[:NAMED])}{' ...' if len(names) > NAMED else ''} ({level})" for level, names in by_level[1:]
    )
    return f"operators of the port: {by_level[0][0]}{f', except {others}' if others else ''}"


def _own(facts: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the port's operators by level, under its own names where it has others than the suite's."""
    tested = {r["operator"].partition(" (")[0] for r in facts["alone"] if r.get("own")}
    named = {name: level for name, level in facts["own"].items() if name not in tested} or facts["own"]
    return [(level, [n for n in named if named[n] == level]) for level in dict.fromkeys(named.values())]


def _offered(facts: Mapping[str, Any], level: str) -> str:
    """Return the names of the suite under which a port offers operators of a level."""
    rows = [r for r in facts["alone"] if r.get("own") and r["level"] == level]
    return ", ".join(dict.fromkeys(r["operator"] for r in rows)) or "-"


def _wrong(row: Mapping[str, Any]) -> tuple[str, ...]:
    needed = "" if row["needed"] else "not used by the model"
    return row["operator"], row["dtype"], row["level"], number(row["ratio"]), row["pattern"] or "-", needed


def _alone(rows: Sequence[Mapping[str, Any]], dtypes: Sequence[str]) -> list[tuple[str, ...]]:
    """Return a row for each operator and level, with its worst ratio in each dtype."""
    found: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["operator"], row["level"]), {})[row["dtype"]] = row
    told = []
    for (name, level), by_dtype in found.items():
        cells = [_cell(by_dtype.get(dtype)) for dtype in dtypes]
        unused = "" if any(r["needed"] for r in by_dtype.values()) else " (not used by the model)"
        told.append((name + unused, level, str(sum(r["cases"] for r in by_dtype.values())), *cells))
    return told


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{number(row['ratio'])}{'' if row['right'] else ' wrong'}"


def _plain(operator: str) -> str:
    """Return an operator of torch without the name of its space and overload."""
    return operator.removeprefix("aten::").partition(".")[0] if operator.startswith("aten::") else operator
