"""Two synthetic runs: one that is accepted with a stage outside its scope, one that is refused in text."""

from __future__ import annotations

from harness.checklist import Practice
from harness.report.results import Environment, Results, build_results
from harness.types import Criterion, Finding, Layout, Measurement, Scope, StageResult, Status, Verdict


def criterion(id: str, **more) -> Criterion:
    given = {
        "id": id,
        "stage": id.split(".")[0],
        "metric": "error_ratio",
        "op": "<=",
        "limit": 1.05,
        "unit": "ratio",
        "why": "A wrong unit moves more than rounding | can.",
        "source": "calibrated on nine architectures",
        "per_sqrt_n": 3.0,
    }
    return Criterion(**{**given, **more})


def measurement(id: str, value: float | None, **more) -> Measurement:
    given = {
        "metric": "error_ratio",
        "value": value,
        "unit": "ratio",
        "subject": "layers.1.attn",
        "stage": id.split(".")[0],
        "n": 1536,
    }
    return Measurement(**{**given, **more})


def verdict(id: str, status: Status, value: float | None = 0.98, **more) -> Verdict:
    worst = more.pop("worst", None) or measurement(id, value)
    given = {"criterion": criterion(id), "status": status, "worst": worst, "limit": 1.13, "margin": None, "count": 40}
    if value is not None and more.get("margin") is None:
        given["margin"] = 1.13 - value
    return Verdict(**{**given, **more})


def passed(name: str) -> StageResult:
    verdicts = (
        verdict(f"{name}.isolated", Status.PASSED, criterion=criterion(f"{name}.isolated", practice="layers_in_order")),
        verdict(f"{name}.tokens", Status.PASSED, 0.0),
    )
    return StageResult(name=name, status=Status.PASSED, verdicts=verdicts, wall_s=1.5, facts={"peak_bytes": 12_000})


SKIPPED = StageResult(name="image", status=Status.SKIPPED, reason="the checkpoint has no vision tower")
PRACTICES = (
    Practice(
        id="layers_in_order",
        title="Layers are brought up in order",
        ticked_by="each alone",
        criteria=("text.isolated",),
    ),
    Practice(id="fallback_retained", title="A fallback is retained", ticked_by="it is named", facts=("fallbacks",)),
)
ENVIRONMENT = Environment(
    versions={"torch": "2.13.0", "day0": "0.1.0"},
    device="cpu (2 threads)",
    sides={"reference": "builtin:reference (float32)", "accel": "builtin:accel (bfloat16)"},
    digests={"checkpoint": "aa11", "checklist": "bb22", "config": "cc33"},
)


def run(stages: list[StageResult], **more) -> Results:
    return build_results(
        stages,
        claimed=Scope(layouts=(Layout(), Layout(tp=2)), off={"image": "no vision tower"}),
        exercised={"experts": "7 of 7", "longest_tokens": 1024},
        environment=ENVIRONMENT,
        practices=PRACTICES,
        questions={"text": ["Does the answer to a question that you know read right?"]},
        command="day0 verify --stage all",
        started="2030-01-01T00:00:00Z",
        **more,
    )


def accepted_run() -> Results:
    """Return an accepted run with a stage outside its scope."""
    return run([passed("load"), passed("startup"), passed("text"), SKIPPED])


def refused_run() -> Results:
    """Return a run that is refused in text, with a finding."""
    worst = measurement(
        "text.isolated", 6.02, subject="layers.2.attn.q", where={"head": 3, "token": 17}, case="text-24-s0"
    )
    nan = measurement("text.logits", float("nan"), subject="logits", metric="kl_nats_per_token", unit="nats")
    text = StageResult(
        name="text",
        status=Status.FAILED,
        verdicts=(
            verdict("text.isolated", Status.FAILED, 6.02, worst=worst, failed=3, reproduce="day0 verify --stage text"),
            verdict("text.logits", Status.FAILED, worst=nan, failed=1, margin=float("nan")),
            verdict("text.cosine", Status.FAILED, 1.4, criterion=criterion("text.cosine", blocking=False), failed=1),
            verdict("text.phases", Status.SKIPPED, None, worst=None, count=0, reason="the port has one phase only"),
        ),
        findings=(
            Finding(
                tap="layers.2.attn.q",
                module="model.layers.2.self_attn.q_b_proj",
                op="linear",
                cause="one head only: a slice, a scale or a table of that head",
                message="error 6.02 times the floor's | limit 1.13",
                evidence=("head 3 reads 6.02", "heads 0, 1, 2, 4 read at most 1.01"),
                residual_ratio=5.3,
                reproduce="day0 verify --stage text --set accel.options.only=q",
            ),
        ),
        unjudged=("cosine of layers.0",),
        wall_s=4.2,
    )
    blocked = StageResult(name="multi_card", status=Status.BLOCKED, reason="text was not accepted")
    return run([passed("load"), passed("startup"), text, SKIPPED, blocked])
