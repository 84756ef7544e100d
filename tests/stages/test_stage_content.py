"""What the pass over the files becomes in the load stage: problems, suspicions with their rate, what was not read."""

from __future__ import annotations

from harness.stages.content import content_of
from harness.types import Run

RUN = Run(id="load/content", stage="load", kind="content")


def facts(**more):
    whole = {
        "problems": [], "suspicions": [], "false_alarms": {"seam": "in none of 97"}, "digests": {"a": {"blake3": "0"}},
        "vouched": [], "conversion": {"blocks": 0, "lossy_blocks": 0, "worst": 0.0, "tensors": []}, "matrices": 3,
        "bytes": 10, "read_bytes": 0, "reused": {"a": "2026-01-01T00:00:00+00:00"}, "expected_s": 0.0, "seconds": 1.0,
    }  # fmt: skip
    return {**whole, **more}


def problem(kind: str, severity: str = "error"):
    words = {"kind": kind, "name": "w", "file": "a", "expected": "this", "found": "that", "offset": 8}
    return {**words, "severity": severity}


def by_metric(found):
    return {m.metric: m for m in found}


def test_clean_files_are_three_zeros():
    """Nothing found is one measurement of 0 each, which says what was read now and what before."""
    found = by_metric(content_of(RUN, facts()))
    assert {name: m.value for name, m in found.items()} == dict.fromkeys(
        ("content_problems", "content_suspicions", "unconvertible_blocks"), 0
    )
    assert found["content_problems"].detail["reused"] == {"a": "2026-01-01T00:00:00+00:00"}


def test_a_file_that_could_not_be_read_is_an_error_and_what_is_wrong_in_it_a_failure():
    """Unreadable is not measured; a NaN is a problem; a zero scale is a suspicion."""
    kinds = [problem("unreadable"), problem("nonfinite"), problem("zero_scale", "warning")]
    found = content_of(RUN, facts(problems=kinds))
    assert [(m.metric, m.value, m.problem) for m in found[:3]] == [
        ("content_problems", None, "error"), ("content_problems", 1.0, ""), ("content_suspicions", 1.0, ""),
    ]  # fmt: skip
    assert "expected this, found that" in found[0].detail["message"]


def test_a_suspicion_says_how_often_an_honest_checkpoint_shows_it():
    """The rate of its kind stands in its sentence."""
    seam = {"kind": "seam", "name": "w", "file": "a", "offset": 8, "message": "w: values jump"}
    found = by_metric(content_of(RUN, facts(suspicions=[seam])))
    assert found["content_suspicions"].detail["message"] == "w: values jump (in none of 97)"
