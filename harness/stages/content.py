"""What one pass over a checkpoint's files shows, as measurements of the load stage. Must not know limits or files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.stages import measured
from harness.types import Measurement, Run

NAME = "load"
CONTENT_METRICS = ("content_problems", "content_suspicions", "unconvertible_blocks")


def content_of(run: Run, facts: Mapping[str, Any]) -> list[Measurement]:
    """Return the problems, the suspicions and the blocks that FP8 cannot hold; one of 0 where there is none."""
    found: dict[str, list[Measurement]] = {metric: [] for metric in CONTENT_METRICS}
    for m in _found(run, facts):
        found[m.metric].append(m)
    n, conversion = max(1, facts["matrices"]), facts["conversion"]
    detail = {k: facts[k] for k in ("vouched", "reused", "read_bytes", "expected_s", "seconds")}
    detail["files"] = len(facts["digests"])
    for metric in ("content_problems", "content_suspicions"):
        found[metric] = found[metric] or [measured(NAME, run, metric, 0.0, "all", n=n, detail=detail)]
    blocks = conversion["lossy_blocks"]
    words = f"{blocks} of {conversion['blocks']} MXFP4 blocks change in FP8, by at most {conversion['worst']:.2g}"
    detail = {"message": f"{words}: {', '.join(conversion['tensors'][:4])}"} if blocks else {}
    found["unconvertible_blocks"].append(
        measured(NAME, run, "unconvertible_blocks", blocks, "all", n=max(1, conversion["blocks"]), detail=detail)
    )
    return [m for metric in CONTENT_METRICS for m in found[metric]]


def told(problem: Mapping[str, Any]) -> dict[str, Any]:
    """Return a problem of a checkpoint with its sentence: what, where, what was expected and what found."""
    place = f" in {problem['file']}" if problem["file"] else ""
    message = f"{problem['name'] or 'checkpoint'}{place}: expected {problem['expected']}, found {problem['found']}"
    return {**problem, "message": message}


def _found(run: Run, facts: Mapping[str, Any]) -> Iterator[Measurement]:
    for p in facts["problems"]:
        if p["kind"] == "unreadable":  # not what the checkpoint says, but that it could not be asked
            where = {"kind": p["kind"]}
            subject = p["name"] or p["file"]
            yield measured(NAME, run, "content_problems", None, subject, where=where, problem="error", detail=told(p))
            continue
        metric = "content_suspicions" if p["severity"] != "error" else "content_problems"
        yield measured(
            NAME, run, metric, 1.0, p["name"] or p["file"], where={"kind": p["kind"]}, detail=told(p)
        )  # fmt: skip
    for s in facts["suspicions"]:
        rate = facts["false_alarms"].get(s["kind"], "")
        detail = {**s, "message": f"{s['message']} ({rate})" if rate else s["message"], "false_alarms": rate}
        yield measured(NAME, run, "content_suspicions", 1.0, s["name"], where={"kind": s["kind"]}, detail=detail)
