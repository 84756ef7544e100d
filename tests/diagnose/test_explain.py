"""Findings: the first wrong place in execution order, as deep as it was isolated, and the pattern of what failed."""

from __future__ import annotations

import dataclasses
import math

import pytest

from harness.diagnose import diagnose, explain
from harness.diagnose.causes import ACCUMULATED, DIRECT, STRUCTURE
from harness.metrics.names import METRICS
from harness.types import Criterion, Measurement

ORDER = [
    "inputs.token_ids", "embed",
    "layers.0.attn.q", "layers.0.attn.core", "layers.0.attn", "layers.0",
    "layers.1.attn.q", "layers.1.attn.core", "layers.1.attn", "layers.1.moe.router.topk", "layers.1.moe", "layers.1",
    "logits",
]  # fmt: skip


def pair(
    subject: str,
    value: float | None = 5.0,
    *,
    level: int = 0,
    metric: str = "error_ratio",
    blocking: bool = True,
    **more,
):
    """Return a criterion and a measurement that breaks it."""
    where = {"level": level, "slice": "whole", "phase": "prefill", "layout": "single", **more.pop("where", {})}
    unit = METRICS[metric]
    criterion = Criterion(
        id=f"text.{metric}", stage="text", metric=metric, op="<=", limit=1.05, per_sqrt_n=3.0, unit=unit, why="w",
        source="s", blocking=blocking,
    )  # fmt: skip
    order = ORDER.index(subject) if subject in ORDER else 0
    return criterion, Measurement(
        metric=metric, value=value, unit=unit, subject=subject, stage="text", order=order, where=where, n=900,
        **{"run": f"text/replay{level}", **more},
    )  # fmt: skip


def found(*pairs, modules=None):
    return explain(list(pairs), modules=modules or {}, reproduce="day0 verify --stage text")


def test_nothing_failed_nothing_found():
    """No failing measurement gives no finding."""
    assert found() == []


def test_first_in_execution_order_leads():
    """Of several wrong places the first in execution order leads, however large the later ones are."""
    taps = [f.tap for f in found(pair("layers.1.attn.q", 90.0, level=3), pair("layers.0.attn.core", 2.0, level=3))]
    assert taps == ["layers.0.attn.core", "layers.1.attn.q"]


def test_the_deepest_isolated_unit_stands_for_those_around_it():
    """A layer and its child that fail because of a part are not reported beside it."""
    pairs = [pair("layers.1", level=1), pair("layers.1.attn", level=2), pair("layers.1.attn.q", level=3)]
    assert [f.tap for f in found(*pairs)] == ["layers.1.attn.q"]


def test_a_choice_inside_a_wrong_layer_does_not_lead_where_only_layers_were_isolated():
    """A replay of layers says nothing of what went wrong inside one; a choice that is wrong alone is the place."""
    choice = pair("layers.1.moe.router.topk", 40.0, level=1, metric="decision_size_mismatches")
    finding, *more = found(pair("layers.1", 12.0, level=1), choice)
    assert not more
    assert finding.tap == "layers.1"
    assert "items" not in finding.cause
    assert any("decision_size_mismatches" in line for line in finding.evidence)
    assert [f.tap for f in found(choice)] == ["layers.1.moe.router.topk"]


def test_a_unit_that_fails_alone_is_its_own_glue():
    """A layer that fails although no part of it does is reported itself; another layer's part does not explain it."""
    findings = found(pair("layers.0", level=1), pair("layers.1.attn.q", level=3))
    assert [f.tap for f in findings] == ["layers.0", "layers.1.attn.q"]
    assert "glue" in findings[0].cause


def test_a_unit_isolated_at_the_deepest_level_is_no_summary():
    """At the deepest level a unit's own tap is a segment of its own, reported beside an earlier part."""
    taps = [f.tap for f in found(pair("layers.1.attn.q", level=3), pair("layers.1.attn", level=3))]
    assert taps == ["layers.1.attn.q", "layers.1.attn"]


def test_accumulated_values_speak_only_alone():
    """Accumulated values localise nothing: they are silent beside an isolated failure, and lead when there is none."""
    free = [pair("layers.0", metric="accumulated_ratio"), pair("logits", metric="logits_kl_ratio")]
    assert [f.tap for f in found(*free, pair("layers.1.attn", level=2))] == ["layers.1.attn"]
    alone = found(*free)
    assert [f.tap for f in alone] == ["layers.0"]
    assert "no unit is wrong by itself" in alone[0].cause


def test_wrong_inputs_come_first():
    """Differing ids lead before everything behind them, and the cause says that the model has not run yet."""
    findings = found(pair("layers.0.attn.q", level=3), pair("inputs.token_ids", 3.0, metric="exact_mismatches"))
    assert findings[0].tap == "inputs.token_ids"
    assert "before the model runs" in findings[0].cause


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([pair("layers.1.attn.q", level=3, where={"slice": "head", "head": 3})], "one head"),
        ([pair("layers.1.attn.q", level=3, where={"slice": "token", "token": 9})], "only some tokens"),
        ([pair("layers.1.attn.q", level=3, where={"slice": "position", "position": "8-15"})], "only some positions"),
        ([pair("layers.1.attn.q", level=3, where={"slice": "channel", "channel": 3})], "some channels only"),
        ([pair("layers.1.attn.q", 80.0, level=3)], "wrong in the whole unit"),
        (
            [
                pair("layers.1.attn.q", 9.0, level=3),
                pair("layers.1.attn.q", 24.0, level=3, where={"slice": "head", "head": 3}),
            ],
            "off by more than rounding in the whole unit (error 9 times the floor's), mostly head 3",
        ),
        ([pair("layers.1.attn.q.in", 3.0, level=3)], "in the glue in front of it (error 3"),
        ([pair("layers.1.attn.q", math.nan, level=3)], "not a finite number"),
        ([pair("layers.1.attn.q", level=3, where={"phase": "decode"})], "only in decode"),
        ([pair("layers.1.attn.q", level=3, where={"phase": "slot"})], "used before"),
        ([pair("layers.1.attn.q", level=3, where={"layout": "tp2"})], "only when split as tp2"),
        ([pair("layers.1.moe.router.topk", metric="decision_outside_valid", level=3)], "not allowed"),
        ([pair("layers.1.moe.router.topk", metric="decision_size_mismatches", level=3)], "another number of items"),
        ([pair("layers.1.moe.router.topk", metric="decision_margin_z", level=3)], "other items are chosen"),
        (
            [pair("layers.1.attn", None, problem="missing", detail={"message": "not recorded"})],
            "does not show it",
        ),
        ([pair("layers.1.attn", None, problem="no_signal", detail={"message": "zero"})], "no signal"),
    ],
)
def test_the_cause_follows_the_pattern(pairs, words):
    """Which slices, phases, layouts or kinds of value fail decides the cause sentence."""
    (finding,) = found(*pairs)
    assert words in finding.cause


def test_a_prefill_that_fails_too_is_not_blamed_on_a_phase():
    """What fails in prefill and in decode is no matter of the phase; the same holds for layouts."""
    pairs = [
        pair("layers.1.attn.q", level=3),
        pair("layers.1.attn.q", level=3, where={"phase": "decode", "layout": "tp2"}),
    ]
    assert "only" not in found(*pairs)[0].cause


def test_a_finding_says_where_how_much_and_how_to_see_it_again():
    """A finding carries the port's own path (or that of the unit around it), numbers with promise, and the command."""
    tap = "layers.1.attn.q"
    pairs = [pair(tap, 3.0, level=3, where={"slice": "head", "head": 2}), pair(tap, 9.0, level=3)]
    (finding,) = found(*pairs, modules={"layers.1.attn": "model.layers.1.self_attn"})
    assert (finding.module, finding.op, finding.residual_ratio) == ("model.layers.1.self_attn", "q", 9.0)
    assert finding.message.startswith("error_ratio of layers.1.attn.q is 9, promised <= 1.15 ratio")
    assert finding.evidence == (
        "error_ratio of layers.1.attn.q is 3 at head 2, promised <= 1.15 ratio (run text/replay3, prefill, n 900)",
    )
    assert finding.reproduce == "day0 verify --stage text"


def test_a_lost_run_is_one_finding_at_its_last_tap():
    """A crash that leaves every tap unmeasured is told once, with the last tap that was seen."""
    detail = {"message": "the port: crash: signal 11", "last_tap": "layers.1.attn"}
    pairs = [pair(t, None, problem="error", detail=detail) for t in ("embed", "layers.0", "layers.1", "logits")]
    (finding,) = found(*pairs)
    assert (finding.tap, finding.message) == ("layers.1.attn", "the port: crash: signal 11")
    assert "broke off" in finding.cause


def test_runs_that_never_started_are_told_with_the_crash():
    """After a crash, the runs that were not started and what lacks their traces are consequences, not places."""
    crash = pair("layers.0", None, problem="error", run="a", detail={"message": "crash", "last_tap": "layers.0"})
    later = pair("embed", None, problem="error", run="b", detail={"message": "not run", "last_tap": ""})
    lacking = pair("logits", None, metric="greedy_margin_z", problem="error", detail={"message": "no trace"})
    (finding,) = found(crash, later, lacking)
    assert finding.tap == "layers.0"
    assert finding.evidence == ("runs lost: a", "therefore not measured: b")


def test_reported_criteria_lead_to_findings_only_alone():
    """A criterion that is only reported is not explained beside a blocking one."""
    loose = pair("embed", level=1, blocking=False)
    assert [f.tap for f in found(loose, pair("layers.1", level=1))] == ["layers.1"]
    assert [f.tap for f in found(loose)] == ["embed"]


def test_the_rest_is_counted():
    """Only the first places are told in full; the number of the others is not lost."""
    pairs = [pair(f"layers.{i}.attn", level=2, run=f"r{i}") for i in range(12)]
    findings = found(*pairs)
    assert len(findings) == 5
    assert "7 further places" in findings[-1].evidence[-1]


@pytest.mark.parametrize(("value", "said"), [(0.4, True), (0.0, False)])
def test_a_wrong_port_that_does_not_repeat_itself_is_told_so(value: float, said: bool):
    """Two equal runs that differ, however little, are told with the first wrong place; equal ones are not."""
    _, again = pair(
        "logits", value, metric="repeat_ratio", detail={"message": "two equal runs differ at 3 of 9 tokens"}
    )
    findings = diagnose(
        [pair("layers.0.attn.q", level=3)],
        lambda role, run: None,
        floors=(),
        modules={},
        reproduce="",
        measured=[again],
    )
    assert ("two equal runs differ at 3 of 9 tokens" in findings[0].cause) is said


def test_the_table_of_causes_is_complete():
    """Each known metric has its own cause, or is told by its pattern; the table speaks of no other."""
    patterns = {"error_ratio", "exact_mismatches", "decision_margin_z", "decision_flips_excess", "slope_beyond_noise"}
    patterns |= set(STRUCTURE)
    assert set(DIRECT) <= set(METRICS)
    assert set(METRICS) - set(DIRECT) - ACCUMULATED - patterns == set()


def test_an_unknown_metric_has_a_sentence_too():
    """A metric without a cause of its own is named, and is not taken for rounding."""
    criterion, measurement = pair("layers.1.attn", 5.0)
    odd = dataclasses.replace(measurement, metric="something_new")
    assert "something new: outside what was promised" in found((criterion, odd))[0].cause


OWN = "layers.1.attn.q_proj.weight"


@pytest.mark.parametrize(
    ("detail", "words"),
    [
        ({"order": '{"how": "permute(1, 0)"}', "source": OWN}, "axes exchanged"),
        ({"order": '{"stride": 1, "streams": [[["a.weight", 0, 64]]]}', "source": OWN}, "a.weight, another tensor"),
        ({"order": f'{{"stride": 2, "streams": [[["{OWN}", 0, 8]]]}}', "source": OWN}, "its own rows in another order"),
        ({"order": '{"stride": 1, "streams": [[["up", 0, 8], ["gate", 0, 8]]]}', "source": ""}, "rows of up, gate, in"),
        ({"order": '{"stride": 2, "streams": [[["gate", 0, 8]], [["up", 0, 8]]]}', "source": ""}, "by turns"),
        ({"order": "", "source": OWN}, "from another tensor"),
    ],
)
def test_what_memory_holds_is_told_from_the_order_of_its_rows(detail, words):
    """A transposition, another tensor, rows in another order and a fused weight's parts are told apart."""
    found_ = found(pair(OWN, 1.0, metric="provenance_mismatches", detail=detail))
    assert words in found_[0].cause
