"""The score table of a proof: for a terminal, as markdown, as JSON. Knows rows; must not know how they came about."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.faults.bench import OUTCOMES, Row
from harness.faults.catalogue import Pending
from harness.faults.naive import CHECKS
from harness.types import as_json

FORMAT = "day0.prove/1"
STYLES = {"detected": "green", "accepted": "green", "no place": "dim"}
TRIED = ("detected", "missed", "accepted", "alarmed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one way of judging reached: `right` of `faults` refused, `false` of `benign` refused wrongly."""

    rule: str
    right: int
    faults: int
    false: int
    benign: int
    stages: int | None = None
    places: int | None = None
    causes: int | None = None


def scores(rows: Sequence[Row]) -> list[Score]:
    """Return the score of the shipped criteria, then those of the common checks, over the rows that were tried.

    A harmless difference that gave the very values of the unbroken port proves nothing and is not counted.
    """
    faults = [r for r in rows if r.kind == "fault" and r.outcome in TRIED]
    benign = [r for r in rows if r.kind == "benign" and r.outcome in TRIED and (r.moved or r.outcome == "alarmed")]

    def count(chosen: Iterable[Row], holds: Callable[[Row], Any]) -> int:
        return sum(1 for r in chosen if holds(r))

    own = Score(
        rule="day0",
        right=count(faults, lambda r: r.outcome == "detected"),
        faults=len(faults),
        false=count(benign, lambda r: r.outcome == "alarmed"),
        benign=len(benign),
        stages=count(faults, lambda r: r.stage_right),
        places=count(faults, lambda r: r.place_right),
        causes=count(faults, lambda r: r.cause_right),
    )
    return [own, *(_common(check, faults, benign) for check in CHECKS)]


def _common(check: str, faults: Sequence[Row], benign: Sequence[Row]) -> Score:
    """Return the score of a common check, over the rows where it was asked: it compares layers, not operators."""
    faults, benign = [r for r in faults if r.naive], [r for r in benign if r.naive]
    return Score(
        rule=check,
        right=sum(bool(r.naive.get(check)) for r in faults),
        faults=len(faults),
        false=sum(bool(r.naive.get(check)) for r in benign),
        benign=len(benign),
    )


def failed(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that refute the proof: missed, alarmed, broken, or without effect."""
    return [r for r in rows if r.outcome in ("missed", "alarmed", "broke", "did not move")]


def counted(rows: Sequence[Row]) -> dict[str, int]:
    """Return how many rows had each outcome."""
    return {name: n for name in OUTCOMES if (n := sum(1 for r in rows if r.outcome == name))}


def line(row: Row) -> str:
    """Return one row as a line of a log."""
    where = f"{row.stage} at {row.tap}" if row.stage else row.note
    told = (("stage", row.stage_right), ("place", row.place_right), ("cause", row.cause_right))
    wrong = [word for word, right in told if right is False]
    return f"{row.architecture}: {row.kind} {row.name}: {row.outcome}{f', {where}' if where else ''}" + (
        f" (other {', '.join(wrong)} than expected)" if wrong else ""
    )


# --- terminal


def render(rows: Sequence[Row], pending: Sequence[Pending]) -> RenderableType:
    """Return the whole table for a terminal: one line for each injection, then the scores."""
    return Group(_by_injection(rows), _summary(scores(rows)), Text(_end(rows, pending)))


def _by_injection(rows: Sequence[Row]) -> Table:
    table = Table(title="faults and harmless differences", title_justify="left")
    for heading in ("id", "injection", "outcome", "stage", "place", "cause", *CHECKS):
        table.add_column(heading, overflow="fold")
    for group in grouped(rows):
        tried = [r for r in group if r.outcome in TRIED]
        worst = failed(group)
        cells = [_share(tried, "stage_right"), _share(tried, "place_right"), _share(tried, "cause_right")]
        cells = cells if group[0].kind == "fault" else ["", "", ""]
        table.add_row(
            group[0].id if group[0].id != group[0].name else "", group[0].name,
            Text(_outcome(group), style="bold red" if worst else STYLES.get(group[0].outcome, "")),
            *cells, *(_common_share(tried, check) for check in CHECKS),
        )  # fmt: skip
    return table


def _common_share(tried: Sequence[Row], check: str) -> str:
    asked = [r for r in tried if r.naive]
    return f"{sum(bool(r.naive.get(check)) for r in asked)}/{len(asked)}" if asked else ""


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Return rows by injection, in the order of the catalogue."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.name, []).append(row)
    return list(groups.values())


def _outcome(group: Sequence[Row]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counted(group).items())


def _share(tried: Sequence[Row], what: str) -> str:
    return f"{sum(bool(getattr(r, what)) for r in tried)}/{len(tried)}" if tried else ""


def _summary(found: Sequence[Score]) -> Table:
    table = Table(title="what each rule says of the same traces", title_justify="left")
    for heading in ("rule", "detected", "stage right", "place right", "cause right", "false alarms"):
        table.add_column(heading, justify="left" if heading == "rule" else "right")
    for cells in _score_cells(found):
        table.add_row(*cells)
    return table


def _score_cells(found: Sequence[Score]) -> list[list[str]]:
    def of(value: int | None, whole: int) -> str:
        return "" if value is None else f"{value} of {whole}"

    return [
        [s.rule, of(s.right, s.faults), of(s.stages, s.faults), of(s.places, s.faults), of(s.causes, s.faults),
         of(s.false, s.benign)]
        for s in found
    ]  # fmt: skip


def _end(rows: Sequence[Row], pending: Sequence[Pending]) -> str:
    lines = [line(row) for row in failed(rows)]
    lines += [line(row) for row in rows if row.outcome == "detected" and not row.place_right]
    lines.append(", ".join(f"{name} {n}" for name, n in counted(rows).items()))
    lines.append(f"{len(pending)} known mistakes are pending: {', '.join(p.id for p in pending)} (the report says why)")
    return "\n".join(lines)


# --- files


def markdown(rows: Sequence[Row], pending: Sequence[Pending]) -> str:
    """Return the table as markdown."""
    lines = ["# What the gates prove", "", "| rule | detected | stage | place | cause | false alarms |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    lines += [f"| {' | '.join(cells)} |" for cells in _score_cells(scores(rows))]
    lines += ["", "| id | injection | architecture | outcome | stage | first tap | " + " | ".join(CHECKS) + " |"]
    lines += ["|" + "---|" * (6 + len(CHECKS))]
    for row in rows:
        seen = ["refused" if row.naive.get(c) else "passed" if row.naive else "" for c in CHECKS]
        wrong = "" if row.place_right in (True, None) else " (another place than expected)"
        lines.append(
            f"| {row.id} | {row.says} | {row.architecture} | {row.outcome} | {row.stage} | "
            f"{row.tap or row.note.splitlines()[0] if row.tap or row.note else ''}{wrong} | {' | '.join(seen)} |"
        )
    lines += ["", "## Pending", "", "| id | mistake | why |", "|---|---|---|"]
    lines += [f"| {p.id} | {p.says} | {p.why} |" for p in pending]
    return "\n".join(lines) + "\n"


def as_data(rows: Sequence[Row], pending: Sequence[Pending], **about: Any) -> str:
    """Return everything as JSON text."""
    data = {
        "format": FORMAT,
        **about,
        "proved": not failed(rows),
        "scores": as_json(scores(rows)),
        "outcomes": counted(rows),
        "rows": as_json(list(rows)),
        "pending": as_json(list(pending)),
    }
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def show(rows: Sequence[Row], pending: Sequence[Pending], console: Console) -> None:
    """Print the table."""
    console.print(render(rows, pending))
