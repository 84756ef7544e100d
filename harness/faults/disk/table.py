"""The table of damaged checkpoints: for a terminal, as markdown, as JSON. Knows rows; not how they came about."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.faults.disk.judge import DiskRow
from harness.types import as_json

FORMAT = "day0.prove-checkpoints/1"
OUTCOMES = ("detected", "late", "missed", "accepted", "alarmed", "no place")
BAD = ("late", "missed", "alarmed")


def failed(rows: Sequence[DiskRow]) -> list[DiskRow]:
    """Return the rows that refute the proof: something passed, was seen later than promised, or alarmed for nothing."""
    return [r for r in rows if r.outcome in BAD]


def counted(rows: Sequence[DiskRow]) -> dict[str, int]:
    """Return how many rows had each outcome."""
    return {name: n for name in OUTCOMES if (n := sum(r.outcome == name for r in rows))}


def line(row: DiskRow) -> str:
    """Return one row as a line of a log."""
    told = [word for word, right in (("place", row.place_right), ("cause", row.cause_right)) if right is False]
    words = f"{row.format}: {row.name}: {row.outcome}"
    where = f", by {row.seen}: {row.place}" if row.seen and row.place else ""
    return words + where + (f" (other {', '.join(told)} than expected)" if told else "")


def grouped(rows: Sequence[DiskRow]) -> list[list[DiskRow]]:
    """Return rows by damage, in the order of the catalogue."""
    groups: dict[str, list[DiskRow]] = {}
    for row in rows:
        groups.setdefault(row.name, []).append(row)
    return list(groups.values())


def _cells(group: Sequence[DiskRow]) -> list[str]:
    """Return what is shown of one damage in all formats."""
    tried = [r for r in group if r.outcome != "no place"]
    checks = list(dict.fromkeys(r.seen for r in tried if r.seen))
    faults = [r for r in tried if r.kind == "fault"]
    others = [r.others for r in tried if r.others]

    def share(what: str) -> str:
        return f"{sum(bool(getattr(r, what)) for r in faults)}/{len(faults)}" if faults else ""

    return [
        ", ".join(f"{name} {n}" for name, n in counted(group).items() if name != "no place"),
        group[0].expected,
        ", ".join(f"{c} {sum(r.seen == c for r in tried)}" for c in checks),
        share("place_right"),
        share("cause_right"),
        ", ".join(f"{word} {others.count(word)}" for word in dict.fromkeys(others)),
    ]


HEADINGS = ("damage", "outcome", "due by", "seen by", "place", "cause", "transformers")


def show(rows: Sequence[DiskRow], console: Console) -> None:
    """Print the table."""
    console.print(_render(rows))


def _render(rows: Sequence[DiskRow]) -> RenderableType:
    table = Table(title="damaged checkpoints, and harmless differences", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, overflow="fold")
    for group in grouped(rows):
        first, *rest = _cells(group)
        style = "bold red" if failed(group) else "green" if first else "dim"
        table.add_row(group[0].name, Text(first, style=style), *rest)
    wrong = [line(r) for r in rows if r.outcome in BAD or False in (r.place_right, r.cause_right)]
    return Group(table, Text("\n".join([*wrong, ending(rows)])))


def ending(rows: Sequence[DiskRow]) -> str:
    """Return the counts as one line."""
    faults = [r for r in rows if r.kind == "fault" and r.outcome != "no place"]
    places, causes = (sum(bool(getattr(r, what)) for r in faults) for what in ("place_right", "cause_right"))
    silent = [r.others for r in faults].count("silent")
    beside = f"; of those that transformers loads, {silent} are silent there" if any(r.others for r in rows) else ""
    counts = ", ".join(f"{name} {n}" for name, n in counted(rows).items())
    return f"{counts}; of {len(faults)} faults the place is right in {places}, the cause in {causes}{beside}"


def markdown(rows: Sequence[DiskRow]) -> str:
    """Return the table as markdown: by damage, then every row."""
    lines = ["# What damaged checkpoints show", "", ending(rows), "", f"| {' | '.join(HEADINGS)} |"]
    lines.append("|" + "---|" * len(HEADINGS))
    lines += [f"| {group[0].says} | {' | '.join(_cells(group))} |" for group in grouped(rows)]
    heads = ("format", "damage", "outcome", "seen by", "place", "what is said", "transformers")
    lines += ["", "## Row by row", "", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows:
        if row.outcome == "no place":
            continue
        said = " ".join(row.message.replace("|", "\\|").split())[:200]
        cells = (row.format, row.name, row.outcome, row.seen, row.place[:80], said, row.others)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def as_data(rows: Sequence[DiskRow], **about: Any) -> str:
    """Return everything as JSON text."""
    data = {
        "format": FORMAT,
        **about,
        "proved": not failed(rows),
        "outcomes": counted(rows),
        "rows": [as_json(row) for row in rows],
    }
    return json.dumps(data, indent=1, allow_nan=False) + "\n"
