"""The machine truth: what is accepted, what is written, what is refused when read."""

from __future__ import annotations

import json
import math

import jsonschema
import pytest
from synthetic import PRACTICES, criterion, measurement, passed, run, verdict

from harness.errors import EXIT_ACCEPTED, EXIT_NOTHING, EXIT_REFUSED, TraceError
from harness.report.results import (
    SCHEMA_FILE,
    build_results,
    decide,
    read_results,
    schema_text,
    tick,
    unexercised,
    write_measurements,
    write_results,
)  # fmt: skip
from harness.types import StageResult, Status


def stage(name: str, status: Status) -> StageResult:
    return StageResult(name=name, status=status, reason="because")


def test_written_results_read_back_equal(tmp_path, accepted, refused):
    """What is written reads back as the same results, of an accepted and of a refused run."""
    for results in (accepted, refused):
        write_results(results, tmp_path)
        assert read_results(tmp_path) == results


def test_file_follows_the_shipped_schema(tmp_path, accepted, refused):
    """results.json of both runs is valid under the schema that is shipped, and a foreign status is not."""
    schema = json.loads(SCHEMA_FILE.read_text())
    for results in (accepted, refused):
        data = json.loads(write_results(results, tmp_path).read_text())
        jsonschema.validate(data, schema)
        data["stages"][0]["status"] = "FINE"
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(data, schema)


def test_shipped_schema_is_current():
    """The schema file is the one that the model gives."""
    assert SCHEMA_FILE.read_text() == schema_text(), "write schema_text() into harness/report/results.schema.json"


def test_promised_fields_are_there(tmp_path, refused):
    """The fields that others build on have their names and places."""
    data = json.loads(write_results(refused, tmp_path).read_text())
    assert data["format"] == "day0.results/1"
    assert data["accepted"] is False
    assert {"claimed", "exercised", "not_covered"} <= set(data["scope"])
    assert {"versions", "device", "digests"} <= set(data["environment"])
    text = data["stages"][2]
    assert {"name", "status", "accepted", "verdicts", "findings", "unjudged", "facts", "wall_s"} <= set(text)
    finding = text["findings"][0]
    assert {"tap", "module", "op", "cause", "message", "evidence", "residual_ratio", "reproduce"} == set(finding)


def test_what_is_not_finite_is_null_and_says_so(tmp_path, refused):
    """A NaN becomes null beside a detail that names it; the file holds no NaN token."""
    path = write_results(refused, tmp_path)
    assert "NaN" not in path.read_text()
    worst = json.loads(path.read_text())["stages"][2]["verdicts"][1]["worst"]
    assert worst["value"] is None
    assert worst["detail"] == {"non_finite": "nan"}


def test_measurements_are_one_json_object_a_line(tmp_path):
    """Infinite values in a measurement, its place and its detail are null in the file."""
    odd = measurement("text.r", math.inf, where={"x": math.nan}, detail={"y": [math.inf, 1.0]})
    write_measurements([odd, measurement("text.r", 2.0)], tmp_path / "m" / "text.jsonl")
    first, second = [json.loads(line) for line in (tmp_path / "m" / "text.jsonl").read_text().splitlines()]
    assert (first["value"], first["where"], first["detail"]) == (
        None,
        {"x": None},
        {"y": [None, 1.0], "non_finite": "inf"},
    )
    assert second["value"] == 2.0


@pytest.mark.parametrize("text", ['{"format": "day0.results/0"}', "[]", "{", '{"format": "day0.results/1"}'])
def test_other_files_are_refused(tmp_path, text):
    """A file of another format, of no JSON, or without what the format promises is refused by name."""
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(TraceError, match=r"results\.json"):
        read_results(tmp_path)


def test_a_folder_without_results_is_refused(tmp_path):
    """A folder that holds no run is refused."""
    with pytest.raises(TraceError, match=r"expected results\.json"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("statuses", "required", "expected"),
    [
        ((Status.PASSED, Status.PASSED), (), EXIT_ACCEPTED),
        ((Status.PASSED, Status.SKIPPED), (), EXIT_ACCEPTED),
        ((Status.PASSED, Status.SKIPPED), ("startup",), EXIT_REFUSED),
        ((Status.PASSED, Status.PASSED), ("image",), EXIT_REFUSED),
        ((Status.FAILED, Status.BLOCKED), (), EXIT_REFUSED),
        ((Status.PASSED, Status.BLOCKED), (), EXIT_REFUSED),
        ((Status.PASSED, Status.INCONCLUSIVE), (), EXIT_REFUSED),
        ((Status.PASSED, Status.ERROR), (), EXIT_REFUSED),
        ((Status.SKIPPED, Status.SKIPPED), (), EXIT_NOTHING),
        ((), (), EXIT_NOTHING),
    ],
)
def test_a_run_is_accepted_only_as_a_whole(statuses, required, expected):
    """Each stage must be accepted, or skipped without being required; a run of skips verifies nothing."""
    stages = [stage(name, status) for name, status in zip(("load", "startup"), statuses, strict=False)]
    assert decide(stages, required=required) == (expected == EXIT_ACCEPTED, expected)


def test_what_is_claimed_and_not_reached_is_said():
    """Lengths, layouts and pictures that are claimed but were not reached are named; what was reached is not."""
    claimed = {"max_length_tokens": 1024, "layouts": [{}, {"tp": 2}], "image": True}
    reached = {"longest_tokens": 257, "layouts": ["single"], "images": []}
    gaps = unexercised(claimed, reached)
    assert [g.split(":")[0] for g in gaps] == ["lengths above 257 tokens", "layout tp2", "pictures"]
    assert unexercised(claimed, {"longest_tokens": 1024, "layouts": ["single", "tp2"], "images": ["32x48"]}) == []
    assert unexercised(claimed, {}) == []


def test_a_problem_refuses_an_accepted_run():
    """A problem of the run as a whole refuses it although every stage is accepted."""
    assert run([passed("load")]).accepted
    results = run([passed("load")], problems=["--require serves: the port does not serve"])
    assert (results.accepted, results.exit_code) == (False, EXIT_REFUSED)


def test_practices_are_ticked_from_evidence_only():
    """A practice is ticked when all its criteria passed and all its facts are known; else it says what is lacking."""
    layers, fallback = tick(PRACTICES, [passed("text")], {})
    assert layers.ticked
    assert "text.isolated (40 measured)" in layers.evidence
    assert not fallback.ticked
    assert fallback.evidence.startswith("not done: ")
    failed = StageResult(name="text", status=Status.FAILED, verdicts=(verdict("text.isolated", Status.FAILED, 9.0),))
    layers, fallback = tick(PRACTICES, [failed], {"fallbacks": "eager attention"})
    assert not layers.ticked
    assert "text.isolated is FAILED" in layers.evidence
    assert fallback.ticked
    assert "eager attention" in fallback.evidence


def test_an_infinite_limit_does_not_break_the_report(tmp_path):
    """A checklist's infinite limit is written as the largest number, and the file still reads."""
    odd = verdict(
        "text.x", Status.PASSED, criterion=criterion("text.x", limit=math.inf), limit=math.inf, margin=math.inf
    )
    results = build_results([StageResult(name="text", status=Status.PASSED, verdicts=(odd,))])
    write_results(results, tmp_path)
    assert read_results(tmp_path).accepted
