"""Results -> JUnit XML. Knows Results; must not know how anything was measured.

One suite per stage, one test per criterion. A criterion that is only reported never fails its test.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

from harness.report import words
from harness.report.results import Results, StageReport
from harness.types import Status, Verdict

_ELEMENT = {
    Status.FAILED: "failure", Status.INCONCLUSIVE: "failure", Status.ERROR: "error",
    Status.SKIPPED: "skipped", Status.BLOCKED: "skipped",
}  # fmt: skip
_ILLEGAL = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(results: Results) -> str:
    """Return the document."""
    root = ElementTree.Element("testsuites", name="day0", time=f"{results.wall_s:.3f}")
    totals = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for stage in results.stages:
        suite = _suite(stage)
        for key in totals:
            totals[key] += int(suite.get(key, "0"))
        root.append(suite)
    for key, count in totals.items():
        root.set(key, str(count))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(stage: StageReport) -> ElementTree.Element:
    suite = ElementTree.Element("testsuite", name=f"day0.{stage.name}", time=f"{stage.wall_s:.3f}")
    for verdict in stage.verdicts:
        suite.append(_criterion(stage, verdict))
    told = any(case.find(tag) is not None for case in suite for tag in ("failure", "error"))
    if not stage.verdicts or (not told and stage.status in (Status.FAILED, Status.ERROR, Status.INCONCLUSIVE)):
        suite.append(_case(stage, "stage", stage.status, words.stage_sentence(stage), ""))
    cases = list(suite)
    suite.set("tests", str(len(cases)))
    for key, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(key, str(sum(case.find(tag) is not None for case in cases)))
    return suite


def _criterion(stage: StageReport, verdict: Verdict) -> ElementTree.Element:
    worst = f"{words.value_text(verdict.worst)}, promised {words.limit_text(verdict)} {verdict.criterion.unit}".strip()
    message = f"{words.where_text(verdict.worst)}: {worst}" if verdict.worst is not None else verdict.reason
    detail = [verdict.criterion.why, verdict.reason, f"reproduce: {verdict.reproduce}" if verdict.reproduce else ""]
    status = verdict.status
    if not verdict.criterion.blocking and _ELEMENT.get(status) in ("failure", "error"):
        status = Status.PASSED
    return _case(
        stage, verdict.criterion.id, status, message or verdict.status.value, "\n".join(d for d in detail if d)
    )


def _case(stage: StageReport, name: str, status: Status, message: str, detail: str) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname=f"day0.{stage.name}", name=_legal(name))
    tag = _ELEMENT.get(status)
    if tag is not None:
        element = ElementTree.SubElement(case, tag, message=_legal(message))
        if tag != "skipped":
            element.set("type", status.value)
            element.text = _legal(detail)
    else:
        ElementTree.SubElement(case, "system-out").text = _legal(message)
    return case


def _legal(text: str) -> str:
    """Replace what XML 1.0 cannot hold."""
    return _ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", text)
