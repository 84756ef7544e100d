"""Results -> the step summary of a CI job. Knows the file that the job names; must not influence any verdict."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from harness.report import words
from harness.report.markdown import code_span, escape_cell, escape_text, stage_row
from harness.report.results import Results

VARIABLE = "GITHUB_STEP_SUMMARY"


def append_step_summary(results: Results, environ: Mapping[str, str] | None = None) -> Path | None:
    """Append verdict and table to the file that GITHUB_STEP_SUMMARY names; return it, or None where none is named."""
    name = (os.environ if environ is None else environ).get(VARIABLE)
    if not name:
        return None
    path = Path(name)
    with path.open("a", encoding="utf-8") as file:
        file.write(step_summary(results))
    return path


def step_summary(results: Results) -> str:
    """Return the short form: verdict, one row per stage, the first divergent tap."""
    lines = [
        f"## day0: {'accepted' if results.accepted else 'not accepted'}",
        "",
        escape_text(words.run_sentence(results)),
        "",
    ]
    lines += ["| stage | status | criterion | where | value | limit |", "|---|---|---|---|---:|---:|"]
    for stage in results.stages:
        row = stage_row(stage)
        cells = [row["title"], row["status"], row["criterion"], row["where"], row["value"], row["limit"]]
        lines.append("| " + " | ".join(escape_cell(cell) for cell in cells) + " |")
    refused = results.first_refused
    if refused is not None and refused.findings:
        finding = refused.findings[0]
        lines += [
            "",
            f"{words.place_label(refused).capitalize()}: {code_span(finding.tap)}. {escape_text(finding.cause)}",
        ]
    lines += ["", *(f"- not covered: {escape_text(sentence)}" for sentence in results.scope.not_covered), ""]
    return "\n".join(lines)
