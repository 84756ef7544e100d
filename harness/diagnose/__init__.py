"""Failed verdicts -> findings: the first wrong places, then what is wrong there. Must not know what may pass."""

from collections.abc import Mapping, Sequence

from harness.cases import ModelInfo
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
) -> list[Finding]:
    """Return findings, the first wrong place first, with the structure of the error where the traces show one.

    `traces(role, run id)` looks up a trace; `floors` are the roles of honest ones; `modules` gives the port's own
    paths; `info`, where the model is known, its edges and heads.
    """
    findings = explain(failing, modules=modules, reproduce=reproduce)
    return structured(
        findings, [m for _, m in failing], traces, floors=floors,
        edges=info.edges if info is not None else {}, heads=info.heads if info is not None else 0,
    )  # fmt: skip
