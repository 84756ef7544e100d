"""The gate: limits, problems, scope, waivers, and what a stage's status follows from."""

import math
from datetime import date
from typing import Any

import pytest

from harness.gate import covers, failing, judge, limit_at, stage_status
from harness.types import Criterion, Measurement, Status, Verdict, Waiver

TODAY = date(2030, 6, 1)


def criterion(**more: Any) -> Criterion:
    given = {
        "id": "text.layers", "stage": "text", "metric": "error_ratio", "op": "<=", "limit": 1.05, "unit": "ratio",
        "why": "w", "source": "s",
    }  # fmt: skip
    return Criterion(**{**given, **more})


def measurement(value: float | None = 1.0, **more: Any) -> Measurement:
    given = {"metric": "error_ratio", "unit": "ratio", "subject": "layers.3", "stage": "text", "run": "text/replay1"}
    return Measurement(value=value, **{**given, **more})


def verdict(criteria: Criterion | None, *measurements: Measurement, **more: Any) -> Verdict:
    given = {"in_scope": lambda word: "", "today": TODAY}
    return judge(criteria=[criteria or criterion()], measurements=measurements, **{**given, **more})[0][0]


@pytest.mark.parametrize(
    ("op", "value", "status"),
    [
        ("<=", 1.05, Status.PASSED), ("<=", 1.0501, Status.FAILED), (">=", 1.05, Status.PASSED),
        (">=", 1.04, Status.FAILED), ("==", 1.05, Status.PASSED), ("==", 1.0, Status.FAILED),
        ("<=", math.nan, Status.FAILED), (">=", math.nan, Status.FAILED), ("==", math.nan, Status.FAILED),
        ("<=", math.inf, Status.FAILED), ("<=", -math.inf, Status.PASSED),
    ],
)  # fmt: skip
def test_limits_are_inclusive_and_nan_never_passes(op: str, value: float, status: Status) -> None:
    """A value at its limit passes, one beyond fails, and NaN fails under every operator."""
    assert verdict(criterion(op=op), measurement(value)).status is status


def test_the_limit_widens_with_fewer_samples() -> None:
    """At n samples `<=` allows limit + c/sqrt(n), `>=` limit - c/sqrt(n)."""
    assert limit_at(criterion(per_sqrt_n=4.0), 16) == 2.05
    assert limit_at(criterion(per_sqrt_n=4.0, op=">="), 16) == pytest.approx(0.05)
    assert verdict(criterion(per_sqrt_n=4.0), measurement(1.5, n=16)).status is Status.PASSED
    assert verdict(criterion(per_sqrt_n=4.0), measurement(1.5, n=1600)).status is Status.FAILED


@pytest.mark.parametrize(
    ("problem", "status"),
    [
        ("missing", Status.ERROR), ("error", Status.ERROR), ("empty", Status.ERROR), ("", Status.ERROR),
        ("no_signal", Status.INCONCLUSIVE), ("too_few", Status.INCONCLUSIVE),
    ],
)  # fmt: skip
def test_what_was_not_measured_is_no_pass(problem: str, status: Status) -> None:
    """A promise without a value is ERROR or INCONCLUSIVE, whatever else passed."""
    found = verdict(None, measurement(0.5), measurement(None, problem=problem))
    assert found.status is status
    assert (found.count, found.failed) == (2, 1)


def test_failed_dominates_error_dominates_inconclusive() -> None:
    """The gravest status wins and its measurement is the one shown."""
    broken, vague = measurement(None, problem="missing", subject="a"), measurement(None, problem="too_few", subject="b")
    assert verdict(None, vague, broken).worst == broken
    bad = measurement(9.0, subject="c")
    found = verdict(None, vague, broken, bad)
    assert (found.status, found.worst) == (Status.FAILED, bad)


def test_the_worst_is_the_one_with_the_smallest_margin_for_its_own_limit() -> None:
    """A smaller value of a larger slice may be worse than a larger one of a small slice; NaN is worst of all."""
    small, large = measurement(1.9, n=16), measurement(1.2, n=1600)
    found = verdict(criterion(per_sqrt_n=4.0), small, large)
    assert found.worst == large
    assert found.limit == pytest.approx(1.15)
    assert found.margin == pytest.approx(-0.05)
    assert verdict(criterion(per_sqrt_n=4.0), small, measurement(math.nan), large).worst.value != 1.2


def test_nothing_measured_is_an_error() -> None:
    """A criterion without a single measurement was promised but not measured."""
    found = verdict(criterion(select={"phase": "decode"}), measurement(where={"phase": "prefill"}))
    assert found.status is Status.ERROR
    assert "promised but not measured" in found.reason
    assert "decode" in found.reason


def test_a_unit_that_differs_is_an_error() -> None:
    """The same number in another unit is not an answer."""
    found = verdict(None, measurement(0.5, unit="percent"))
    assert found.status is Status.ERROR
    assert "percent" in found.reason


def test_selection_by_subject_case_run_and_place() -> None:
    """Globs select, alternatives are separated by a bar, and another stage's measurement is never meant."""
    m = measurement(where={"slice": "head", "level": 2}, case="text-61")
    assert covers(criterion(subject="layers.*", select={"slice": "position|head", "run": "text/replay*"}), m)
    assert covers(criterion(select={"level": "2", "case": "text-*"}), m)
    assert not covers(criterion(select={"slice": "whole"}), m)
    assert not covers(criterion(subject="vision.*"), m)
    assert not covers(criterion(stage="image"), m)
    assert not covers(criterion(select={"phase": "decode"}), m)


def test_a_problem_is_covered_by_every_promise_it_may_have_broken() -> None:
    """A missing tap has no slice, so promises about all slices are broken; a run without taps breaks all subjects."""
    missing = measurement(None, problem="missing", where={"level": 1})
    assert covers(criterion(select={"slice": "head", "level": "1"}), missing)
    assert not covers(criterion(select={"slice": "head", "level": "2"}), missing)
    assert covers(criterion(subject="layers.*"), measurement(None, problem="error", subject="*"))


def test_out_of_scope_is_skipped_with_the_reason() -> None:
    """A criterion that needs what is not claimed is SKIPPED, even if it would have failed."""
    found = verdict(criterion(needs=("image",)), measurement(9.0), in_scope=lambda word: f"no {word} tower")
    assert (found.status, found.reason) == (Status.SKIPPED, "no image tower")


def test_unjudged_measurements_are_listed() -> None:
    """A number that no criterion covers is named, so that nothing is measured in vain."""
    extra = measurement(metric="cosine", subject="layers.0", run="text/free")
    _, unjudged = judge(
        criteria=[criterion()], measurements=[measurement(), extra], in_scope=lambda word: "", today=TODAY
    )
    assert unjudged == ["cosine in text/free: layers.0"]


def waiver(**more: Any) -> Waiver:
    given = {
        "criterion": "text.layers", "subject": "layers.3", "owner": "ann", "link": "https://e.org/1",
        "expires": "2030-06-01",
    }  # fmt: skip
    return Waiver(**{**given, **more})


def test_a_waiver_waives_its_own_subjects_until_its_last_day() -> None:
    """A failing subject with an owner is WAIVED; one beside it still fails."""
    assert verdict(None, measurement(9.0), waivers=[waiver()]).status is Status.WAIVED
    both = verdict(None, measurement(9.0), measurement(8.0, subject="layers.4"), waivers=[waiver()])
    assert (both.status, both.worst.subject) == (Status.FAILED, "layers.4")


@pytest.mark.parametrize(
    ("given", "value", "word"), [({"expires": "2030-05-31"}, 9.0, "expired"), ({}, 1.0, "matches nothing")]
)
def test_a_stale_waiver_fails_the_run(given: dict[str, str], value: float, word: str) -> None:
    """An expired waiver, or one that nothing needs, is a failed verdict of its own."""
    verdicts, _ = judge(
        criteria=[criterion(blocking=False)], measurements=[measurement(value)], in_scope=lambda word: "",
        waivers=[waiver(**given)], today=TODAY,
    )  # fmt: skip
    assert verdicts[-1].status is Status.FAILED
    assert verdicts[-1].criterion.blocking
    assert word in verdicts[-1].reason
    assert "ann" in verdicts[-1].reason


def test_failing_leads_with_the_first_place_and_its_deepest_unit() -> None:
    """What breaks is ordered by execution, deeper units first among equals; what passes is left out."""
    parts = [
        measurement(9.0, subject="layers.1", order=30, where={"tap_level": 1}),
        measurement(2.0, subject="layers.0", order=9, where={"tap_level": 1}),
        measurement(2.0, subject="layers.0.attn.core", order=9, where={"tap_level": 3}),
        measurement(0.9, subject="embed", order=0),
        measurement(None, subject="layers.0.mlp", order=8, problem="missing"),
    ]
    assert [m.subject for m in failing(criterion(), parts)] == [
        "layers.0.mlp", "layers.0.attn.core", "layers.0", "layers.1",
    ]  # fmt: skip


def answered(status: Status, **more: Any) -> Verdict:
    return Verdict(criterion=criterion(**more), status=status)


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        ([answered(Status.PASSED)], Status.PASSED),
        ([answered(Status.PASSED), answered(Status.WAIVED)], Status.PASSED),
        ([answered(Status.PASSED), answered(Status.FAILED, blocking=False)], Status.PASSED),
        ([answered(Status.PASSED), answered(Status.SKIPPED)], Status.PASSED),
        ([answered(Status.PASSED), answered(Status.FAILED)], Status.FAILED),
        ([answered(Status.ERROR), answered(Status.FAILED)], Status.FAILED),
        ([answered(Status.INCONCLUSIVE), answered(Status.ERROR)], Status.ERROR),
        ([answered(Status.PASSED), answered(Status.INCONCLUSIVE)], Status.INCONCLUSIVE),
        ([answered(Status.PASSED), answered(Status.BLOCKED)], Status.ERROR),
        ([answered(Status.PASSED), answered(Status.SKIPPED, core=True)], Status.ERROR),
        ([answered(Status.PASSED, blocking=False)], Status.ERROR),
        ([answered(Status.SKIPPED)], Status.ERROR),
        ([], Status.ERROR),
    ],
)
def test_a_stage_passes_only_when_every_blocking_promise_is_kept(verdicts: list[Verdict], status: Status) -> None:
    """At least one blocking criterion in scope, all of them passed or waived, and no core criterion scoped out."""
    assert stage_status(verdicts)[0] is status
