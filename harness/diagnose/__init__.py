"""Failed verdicts -> findings: the first wrong places, then what is wrong there. Must not know what may pass."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from harness.cases import ModelInfo
from harness.diagnose.causes import DIRECT
from harness.diagnose.explain import explain
from harness.diagnose.structure import Traces, structured
from harness.types import Criterion, Finding, Measurement

__all__ = ["diagnose", "explain"]


def diagnose(
    failing: Sequence[tuple[Criterion, Measurement]],
    traces: Traces,
    *,
    floors: Sequence[str],
    modules: Mapping[str, str],
    reproduce: str,
    info: ModelInfo | None = None,
    measured: Sequence[Measurement] = (),
) -> list[Finding]:
    """Return findings, the first wrong place first, with the structure of the error where the traces show one.

    `traces(role, run id)` looks up a trace; `floors` are the roles of honest ones; `modules` gives the port's own
    paths; `info`, where the model is known, its edges and heads; `measured` is all that the stage measured.
    """
    findings = explain(failing, modules=modules, reproduce=reproduce)
    findings = structured(
        findings, [m for _, m in failing], traces, floors=floors,
        edges=info.edges if info is not None else {}, heads=info.heads if info is not None else 0,
    )  # fmt: skip
    return _by_chance(findings, measured)


def _by_chance(findings: list[Finding], measured: Sequence[Measurement]) -> list[Finding]:
    """Say of a wrong port that it does not repeat itself: what is wrong may be what is left to chance."""
    apart = next((m for m in measured if m.metric == "repeat_ratio" and m.value), None)
    if not findings or apart is None or findings[0].tap == apart.subject:
        return findings
    words = f"{apart.detail.get('message', 'two equal runs differ')} ({DIRECT['repeat_ratio']})"
    return [replace(findings[0], cause=f"{findings[0].cause}; {words}"), *findings[1:]]
