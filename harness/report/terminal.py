"""What a person sees while day0 runs and when it ends. Knows Results and Display; must not know what a run does.

With a terminal: one live table of the stages. Without: plain lines, then the same final table.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from harness.report import words
from harness.report.operators import sentence
from harness.report.results import Results, StageReport
from harness.types import STAGES, StageResult, Status

STYLES = {
    Status.PASSED: "green", Status.FAILED: "bold red", Status.ERROR: "bold red", Status.INCONCLUSIVE: "yellow",
    Status.SKIPPED: "dim", Status.BLOCKED: "yellow", Status.WAIVED: "yellow",
}  # fmt: skip
PLAIN_WIDTH = 118
SEEN_CHARACTERS = 400
LOG_EVERY_S = 10.0


class Display(Protocol):
    """Told what happens, in order. Nothing it does can change a verdict."""

    def stage_started(self, name: str) -> None:
        """A stage begins."""

    def run_started(self, role: str, run_id: str, i: int, n: int) -> None:
        """Run `i` (from 1) of `n` of a role begins."""

    def stage_done(self, stage: StageResult) -> None:
        """A stage was gated."""

    def note(self, text: str) -> None:
        """Something worth a line happened."""

    def progress(self, text: str) -> None:
        """How far something is that goes on beside the runs; told often, and from another thread."""

    def close(self, results: Results | None) -> None:
        """The run is over; None when it was broken off."""


class NullDisplay:
    """Show nothing."""

    def stage_started(self, name: str) -> None:
        """Show nothing."""

    def run_started(self, role: str, run_id: str, i: int, n: int) -> None:
        """Show nothing."""

    def stage_done(self, stage: StageResult) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""

    def progress(self, text: str) -> None:
        """Show nothing."""

    def close(self, results: Results | None) -> None:
        """Show nothing."""


class PlainDisplay:
    """Plain lines, for a log."""

    def __init__(self, console: Console, run_dir: Path | None = None) -> None:
        self.console, self.run_dir, self._role, self._said = console, run_dir, "", time.monotonic()

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stage_started(self, name: str) -> None:
        """Say which stage begins."""
        self._role = ""
        self._say(f"{name}: started")

    def run_started(self, role: str, run_id: str, i: int, n: int) -> None:
        """Say it once per role, so that a log stays short."""
        if role != self._role:
            self._role = role
            self._say(f"  {role}: {n} run{'' if n == 1 else 's'}")

    def stage_done(self, stage: StageResult) -> None:
        """Say how it ended."""
        self._say(f"{stage.name}: {words.stage_sentence(StageReport.of(stage))} ({stage.wall_s:.1f} s)")

    def note(self, text: str) -> None:
        """Say it."""
        self._say(text)

    def progress(self, text: str) -> None:
        """Say it now and then."""
        if time.monotonic() - self._said >= LOG_EVERY_S:
            self._said = time.monotonic()
            self._say(f"  {text}")

    def close(self, results: Results | None) -> None:
        """Print the final table."""
        if results is not None:
            self.console.print(final(results, self.run_dir))


class LiveDisplay:
    """A table that follows the run."""

    def __init__(self, console: Console, stages: Sequence[str] = STAGES, run_dir: Path | None = None) -> None:
        self.console, self.stages, self.run_dir = console, tuple(stages), run_dir
        self._done: dict[str, StageResult] = {}
        self._current, self._progress, self._note = "", "", "starting both sides"
        self._live = Live(self._table(), console=console, refresh_per_second=6, transient=True)
        self._live.start()

    def _table(self) -> RenderableType:
        table = Table(box=None, pad_edge=False)
        for heading in ("stage", "status", "time", ""):
            table.add_column(heading, justify="right" if heading == "time" else "left", no_wrap=True)
        for name in self.stages:
            done = self._done.get(name)
            if done is not None:
                status = Text(done.status.value, style=STYLES[done.status])
                table.add_row(name, status, f"{done.wall_s:.1f} s", Text(done.reason, overflow="ellipsis"))
            elif name == self._current:
                table.add_row(name, Text("running", style="cyan"), "", self._progress)
            else:
                table.add_row(name, Text("waiting", style="dim"), "", "")
        return Group(table, Text(self._note, style="dim", overflow="ellipsis", no_wrap=True))

    def _refresh(self) -> None:
        self._live.update(self._table(), refresh=True)

    def stage_started(self, name: str) -> None:
        """Mark the stage as running."""
        self._current, self._progress, self._note = name, "", ""
        self._refresh()

    def run_started(self, role: str, run_id: str, i: int, n: int) -> None:
        """Show the current run beside its stage."""
        self._progress = f"{role} {i}/{n}: {run_id}"
        if not self._current:
            self._note = self._progress
        self._refresh()

    def stage_done(self, stage: StageResult) -> None:
        """Show how it ended."""
        self._done[stage.name] = stage
        self._current = ""
        self._refresh()

    def note(self, text: str) -> None:
        """Print a line above the table."""
        self._live.console.print(Text(text))

    def progress(self, text: str) -> None:
        """Show it below the table."""
        self._note = text
        self._refresh()

    def close(self, results: Results | None) -> None:
        """Replace the live table by the final one."""
        self._live.stop()
        if results is not None:
            self.console.print(final(results, self.run_dir))


def make_display(stages: Sequence[str] = STAGES, run_dir: Path | None = None) -> Display:
    """Return a live table on a terminal, plain lines elsewhere."""
    if sys.stdout.isatty():
        return LiveDisplay(Console(), stages, run_dir)
    return PlainDisplay(Console(width=PLAIN_WIDTH, no_color=True), run_dir)


def final(results: Results, run_dir: Path | None = None) -> RenderableType:
    """Return the final table, the verdict, and for a failure the first divergent tap and where to read on."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("stage", "status", "criterion", "where", "value", "limit", "time"):
        table.add_column(heading, justify="right" if heading in ("value", "time") else "left", overflow="fold")
    for stage in results.stages:
        table.add_row(*_row(stage))
    lines: list[RenderableType] = [Text(), table, Text()]
    lines.append(Text(words.run_sentence(results), style="green" if results.accepted else "bold red"))
    refused = results.first_refused
    if refused is not None:
        lines += _failure_lines(refused)
        others = [s for s in results.stages if s is not refused and s.findings and not s.accepted]
        lines += [Text(f"{s.name}: {words.place_label(s)}: {words.place(s.findings[0])}") for s in others]
    startup = results.stage("startup")
    if startup is not None and "operators" in startup.facts:
        lines.append(Text(sentence(startup.facts["operators"]), style="dim"))
    precision = results.scope.claimed.get("precision")
    if precision:
        told = ", ".join(f"{key} {value}" for key, value in precision.items())
        lines.append(Text(f"declared precision: {told}", style="dim"))
    lines += [Text(f"not covered: {sentence}", style="dim") for sentence in results.scope.not_covered]
    if run_dir is not None:
        page = run_dir / (words.FILES.get(refused.name, "summary.md") if refused is not None else "summary.md")
        lines.append(Text(f"report: {page}"))
    return Group(*lines)


def _row(stage: StageReport) -> tuple[RenderableType, ...]:
    status = Text(stage.status.value, style=STYLES[stage.status])
    worst = words.worst_verdict(stage)
    time = f"{stage.wall_s:.1f} s" if stage.wall_s else ""
    if worst is None:
        cells = ["", stage.reason, "", "", time]
    else:
        limit = f"{words.limit_text(worst)} {worst.criterion.unit}".strip()
        cells = [worst.criterion.id, words.where_text(worst.worst), words.value_text(worst.worst), limit, time]
    return (Text(stage.name), status, *(Text(cell) for cell in cells))


def _failure_lines(stage: StageReport) -> list[RenderableType]:
    if not stage.findings:
        return []
    finding = stage.findings[0]
    lines: list[RenderableType] = [Text(f"{words.place_label(stage)}: {words.place(finding)}", style="bold")]
    if finding.cause:
        lines.append(Text(f"likely cause: {finding.cause}"))
    if finding.message:
        seen = " ".join(finding.message.split())
        lines.append(Text(f"what was seen: {seen[:SEEN_CHARACTERS]}{'...' if len(seen) > SEEN_CHARACTERS else ''}"))
    if finding.reproduce:
        lines.append(Text(f"reproduce: {finding.reproduce}"))
    return lines
