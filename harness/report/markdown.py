"""Results -> one markdown page per stage and a summary. Knows words and templates; must not know how a run went on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from harness.report import words
from harness.report.operators import operator_tables
from harness.report.results import Results, StageReport
from harness.types import Layout, Status

TEMPLATES = Path(__file__).with_name("templates")
STACK_LINES = 40
_TOLD_APART = ("failures", "traceback", "operators")
"""Facts of a stage that have a section of their own."""


def stage_page(results: Results, stage: StageReport) -> str:
    """Return the page of one stage: verdict first, then place, criteria, what was not judged, scope, environment."""
    return _render(
        "stage.md.j2",
        results=results,
        stage=stage,
        title=words.TITLES.get(stage.name, stage.name),
        sentence=words.stage_sentence(stage),
        counts=words.counts(stage).capitalize(),
        skipped=_skipped(stage),
        reproduce=reproduce_lines(results, stage),
        failures=_failures(stage),
        told=operator_tables(stage.facts["operators"]) if "operators" in stage.facts else None,
        facts=rows_of({k: v for k, v in stage.facts.items() if k not in _TOLD_APART}),
        **_shared(results),
    )


def _skipped(stage: StageReport) -> dict[str, list[str]]:
    """Return the ids of the criteria that were not judged, by reason."""
    found: dict[str, list[str]] = {}
    for verdict in stage.verdicts:
        if verdict.status in (Status.SKIPPED, Status.BLOCKED):
            found.setdefault(verdict.reason or verdict.status.value, []).append(verdict.criterion.id)
    return found


def _failures(stage: StageReport) -> list[dict[str, Any]]:
    """Return the runs that broke off, by message, each with one stack; and the traceback of the stage itself."""
    found: dict[str, dict[str, Any]] = {}
    for failure in stage.facts.get("failures", ()):
        entry = found.setdefault(failure["message"], {"message": failure["message"], "runs": [], "stack": ""})
        entry["runs"].append(failure["run"])
        entry["stack"] = entry["stack"] or failure.get("stack", "")
    if stage.facts.get("traceback"):
        found[""] = {"message": stage.reason, "runs": [stage.name], "stack": str(stage.facts["traceback"])}
    return list(found.values())


def summary_page(results: Results) -> str:
    """Return the summary: verdict, stages, first wrong place, scope, practices, questions, environment."""
    refused = results.first_refused
    return _render(
        "summary.md.j2",
        results=results,
        sentence=words.run_sentence(results),
        rows=[stage_row(s) for s in results.stages],
        refused=refused,
        reproduce=reproduce_lines(results, refused) if refused is not None else [],
        questions=[(words.TITLES.get(s.name, s.name), q) for s in results.stages for q in s.questions],
        **_shared(results),
    )


def stage_row(stage: StageReport) -> dict[str, str]:
    """Return a stage as one row of a table, all cells as text."""
    worst = words.worst_verdict(stage)
    return {
        "title": words.TITLES.get(stage.name, stage.name),
        "file": words.FILES.get(stage.name, ""),
        "status": stage.status.value,
        "criterion": worst.criterion.id if worst else "",
        "where": words.where_text(worst.worst) if worst else stage.reason,
        "value": words.value_text(worst.worst) if worst else "",
        "limit": f"{words.limit_text(worst)} {worst.criterion.unit}".strip() if worst else "",
        "time": f"{stage.wall_s:.1f} s" if stage.wall_s else "",
        "memory": f"{stage.peak_bytes / 2**20:.1f} MiB" if stage.peak_bytes else "",
    }


def findings_text(results: Results) -> str:
    """Return the findings of every refused stage as plain text, most significant first."""
    lines = [words.run_sentence(results)]
    for stage in results.stages:
        for number, finding in enumerate(stage.findings, start=1):
            lines += ["", f"{stage.name} {number}. {words.place(finding)}", f"   cause: {finding.cause or 'not known'}"]
            lines += [f"   {finding.message}"] if finding.message else []
            lines += [f"   - {line}" for line in finding.evidence]
            lines += [f"   reproduce: {finding.reproduce}"] if finding.reproduce else []
    return "\n".join(lines)


def reproduce_lines(results: Results, stage: StageReport) -> list[str]:
    """Return the commands that show a refusal again, without repetition; else the command of the run."""
    if stage.accepted or stage.status in (Status.SKIPPED, Status.BLOCKED):
        return []
    given = [f.reproduce for f in stage.findings] + [v.reproduce for v in words.bad_verdicts(stage)]
    unique = list(dict.fromkeys(line for line in given if line))
    return unique[:4] or ([results.command] if results.command else [])


def rows_of(mapping: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the entries of a JSON mapping as names and text, `layouts` in their own short form."""
    rows = []
    for key, value in mapping.items():
        if key == "layouts" and isinstance(value, list):
            value = [str(Layout(**v)) if isinstance(v, dict) else str(v) for v in value]
        rows.append((key.replace("_", " "), plain_value(value)))
    return rows


def plain_value(value: Any) -> str:
    """Return a JSON value as a person reads it: yes and no, short numbers, lists with commas."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return words.number(value)
    if isinstance(value, Mapping):
        return "; ".join(f"{k}: {plain_value(v)}" for k, v in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(plain_value(v) for v in value) or "none"
    return str(value)


def _shared(results: Results) -> dict[str, Any]:
    return {
        "claims": rows_of(results.scope.claimed),
        "exercised": rows_of(results.scope.exercised),
        "not_covered": results.scope.not_covered,
        "environment": environment_rows(results),
    }


def environment_rows(results: Results) -> list[tuple[str, str]]:
    """Return who ran where, then facts of the machine; a side's versions only where they are its own."""
    environment, rows = results.environment, []
    for side, told in environment.sides.items():
        if not isinstance(told, Mapping):
            rows.append((side, plain_value(told)))
            continue
        how = ", ".join(str(told[k]) for k in ("dtype", "device") if told.get(k))
        rows.append((side, f"{told.get('spec') or told.get('name', '')}{f' ({how})' if how else ''}"))
        if told.get("versions") and dict(told["versions"]) != dict(environment.versions):
            rows.append((f"versions of the {side}", plain_value(told["versions"])))
    return rows + rows_of(environment.facts)


def escape_text(value: Any) -> str:
    """Return text on one line in which nothing can start a tag or an entity; `<= 5` stays readable."""
    text = re.sub(r"&(?=#?\w+;)", "&amp;", " ".join(str(value).split()))
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)


def escape_cell(value: Any) -> str:
    """Return text that stays inside its table cell."""
    return escape_text(value).replace("|", "\\|")


def code_span(value: Any) -> str:
    """Return a code span that also stays inside a table cell."""
    text = " ".join(str(value).split()).replace("`", "'").replace("|", "\\|")
    return f"`{text}`" if text else ""


def _plain(value: Any) -> str:
    return " ".join(str(value).split()).replace("```", "'''")


def _fenced(value: Any) -> str:
    """Return the last lines of a stack, unable to end its fence."""
    return "\n".join(str(value).replace("```", "'''").strip().splitlines()[-STACK_LINES:])


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # markdown; every value goes through one of the filters below
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        cell=escape_cell, text=escape_text, code=code_span, plain=_plain, fenced=_fenced, number=words.number,
        value=words.value_text, where=words.where_text, limit=words.limit_text,
    )  # fmt: skip
    return environment


def _render(template: str, **values: Any) -> str:
    text = _environment().get_template(template).render(**values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
