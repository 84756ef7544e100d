"""The text stage: what it plans, and what it makes of greedy tokens and of runs with and without taps."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from harness.cases import ModelInfo
from harness.stages import StageContext, StageView, text
from harness.stages.exercised import exercised
from harness.types import Failure, Measurement, Run, Scope, Setup, Tap, Trace

INFO = ModelInfo(path="m", config={}, vocab_size=50, layers=2, max_length_tokens=512)


def context(*capabilities: str, info: ModelInfo = INFO, profile: str = "quick", **scope: Any) -> StageContext:
    return StageContext(
        info=info, scope=Scope(**scope), capabilities=frozenset(capabilities), profile=profile, dtype="bfloat16",
        reference_capabilities=frozenset(capabilities),
    )  # fmt: skip


def by_id(runs: list[Run]) -> dict[str, Run]:
    assert len({r.id for r in runs}) == len(runs)
    return {r.id: r for r in runs}


def test_replays_come_after_the_run_they_replay_and_isolate_three_levels() -> None:
    """Every replay names an earlier free run of its own case; layers and leaves are replayed with pinned decisions."""
    for profile in ("quick", "full"):
        runs = text.plan(context("phases", profile=profile))
        seen: dict[str, Run] = {}
        for run in runs:
            if run.pin:
                assert seen[run.pin].case == run.case
                assert seen[run.pin].level == 0
            seen[run.id] = run
        levels = {run.level: run.pin_decisions for run in runs if run.kind == "forward"}
        assert levels == {0: False, 1: True, 2: False, 3: True}


@pytest.mark.parametrize("length", [512, 40, 12])
def test_phases_walk_the_whole_prompt_once(length: int) -> None:
    """Spans are consecutive and end with the prompt, decode takes single steps, a second request follows another."""
    info = ModelInfo(path="m", config={}, vocab_size=50, layers=2, max_length_tokens=length)
    runs = by_id(text.plan(context("phases", info=info)))
    for name in ("chunked", "decode", "second"):
        run = runs[f"text/{name}"]
        tokens = len(run.case.token_ids)
        assert [a for a, _ in run.steps] == [0, *(b for _, b in run.steps[:-1])]
        assert run.steps[-1][1] == tokens <= length
        assert run.options["phase"] == name
        assert run.level == 1
    decode = runs["text/decode"]
    assert all(b - a == 1 for a, b in decode.steps[1:])
    assert decode.options["compare_from"] == decode.steps[0][1]
    before = runs["text/second"].before
    assert before
    assert before != runs["text/second"].case.token_ids[: len(before)]


@pytest.mark.parametrize("length", [512, 40, 12, 9, 8])
def test_walks_that_share_a_cache_are_asked_of_ports_that_can(length: int) -> None:
    """Each capability brings its walk, over the whole prompt; two of them in the very steps of decode."""
    info = ModelInfo(path="m", config={}, vocab_size=50, layers=2, max_length_tokens=length)
    can = ("phases", "resumes", "rewinds", "batches")
    runs = by_id(text.plan(context(*can, info=info)))
    for name in ("prefix", "rewound", "together"):
        run = runs[f"text/{name}"]
        assert [a for a, _ in run.steps] == [0, *(b for _, b in run.steps[:-1])]
        assert run.steps[-1][1] == len(run.case.token_ids)
        assert all(a < b for a, b in run.steps)
        assert run.options["walk"] == run.options["phase"] == name
        assert f"text/{name}" not in by_id(text.plan(context("phases", info=info)))
    assert runs["text/prefix"].options["compare_from"] == runs["text/prefix"].steps[-2][0] > 0
    assert runs["text/prefix"].options["compare_from"] % 2 == 1 or length < 10
    assert runs["text/rewound"].steps == runs["text/together"].steps == runs["text/decode"].steps
    longest = max(len(ids) for ids in runs["text/together"].options["others"])
    assert len(runs["text/together"].steps) - 1 < longest <= length


def test_a_port_that_drafts_generates_twice() -> None:
    """What is speculated is judged on the very request that is generated step by step."""
    runs = by_id(text.plan(context("drafts")))
    assert runs["text/speculated"].case == runs["text/generate"].case
    assert runs["text/speculated"].options == {"drafts": text.DRAFTS}
    assert "text/speculated" not in by_id(text.plan(context()))


def test_a_port_without_phases_is_not_asked_for_them() -> None:
    """Without the capability there are whole prefills only."""
    assert {r.kind for r in text.plan(context())} == {"forward", "generate"}


def test_a_port_that_cannot_be_replayed_gives_the_values_itself() -> None:
    """With `replay` out of scope, the reference is replayed on the port's own values."""
    assert {r.pin_role for r in text.plan(context("phases", replay=False)) if r.level} == {"accel"}


def test_the_quick_prompt_is_prime_and_generation_fits() -> None:
    """No chunk, page or tile ends with the prompt; prompt and continuation stay within the claimed length."""
    runs = by_id(text.plan(context("phases", max_length_tokens=30)))
    case = runs["text/generate"].case
    assert len(case.token_ids) + case.max_new_tokens <= 30
    length = len(by_id(text.plan(context()))["text/free"].case.token_ids)
    assert all(length % k for k in range(2, length))


def traced(run: Run, logits: torch.Tensor | None, role: str = "accel", **facts: Any) -> Trace:
    tensors = {} if logits is None else {"logits": logits[None]}
    taps = {n: Tap(name=n, kind="logits", dims=("batch", "token", "vocab")) for n in tensors}
    setup = Setup(side="accel", role=role, adapter="synthetic")
    return Trace(setup=setup, run=run, taps=taps, tensors=tensors, facts=facts)


def measured(traces: Mapping[tuple[str, str], Trace | Failure], metric: str) -> Measurement:
    view = StageView(context=context(), runs=text.plan(context()), trace=lambda role, run: traces.get((role, run)))
    (found,) = (m for m in text.measure(view) if m.metric == metric)
    return found


def normal(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, 50, generator=torch.Generator().manual_seed(seed))


def greedy(actual: list[int], noise: float = 0.01) -> Measurement:
    run = by_id(text.plan(context()))["text/generate"]
    logits = normal(23 + 4, 0)
    logits[22:26] = 0
    for row, (best, second, gap) in enumerate([(7, 1, 3.0), (8, 2, 0.02), (9, 3, 3.0), (10, 4, 3.0)]):
        logits[22 + row, best], logits[22 + row, second] = 10.0, 10.0 - gap
    return measured(
        {
            ("oracle", run.id): traced(run, logits, "oracle", token_ids=[7, 8, 9, 10]),
            ("floor", run.id): traced(run, logits + noise * normal(27, 1), "floor", token_ids=[7, 8, 9, 10]),
            ("accel", run.id): traced(run, None, token_ids=actual),
        },
        "greedy_margin_z",
    )


def test_greedy_tokens_may_leave_the_oracle_at_a_near_tie_only() -> None:
    """The same tokens are z 0; another token at a gap of twice the mean token's error is less than z 2, since the
    worst token's error counts; at a clear choice far more."""
    assert greedy([7, 8, 9, 10]).value == 0.0
    tie = greedy([7, 2, 30, 31])
    assert tie.value == pytest.approx(1.6, rel=0.1)
    assert tie.detail["agreeing_tokens"] == 1
    assert greedy([1, 8, 9, 10]).value > 100
    assert greedy([7, 8]).value == float("inf")


def observed(change: float, again: torch.Tensor | float, metric: str = "taps_change_logits") -> Measurement:
    """Return a metric of a port whose logits taps change, and that gives others the second time.

    The floor's error is of the size of 0.4.
    """
    runs = by_id(text.plan(context()))
    logits = normal(61, 0)
    return measured(
        {
            ("oracle", "text/free"): traced(runs["text/free"], logits, "oracle"),
            ("floor", "text/free"): traced(runs["text/free"], logits + 0.4 * normal(61, 1), "floor"),
            ("accel", "text/free"): traced(runs["text/free"], logits + change),
            ("accel", "text/plain"): traced(runs["text/plain"], logits),
            ("accel", "text/plain2"): traced(runs["text/plain2"], logits + again),
        },
        metric,
    )


def test_taps_may_not_change_logits_beyond_the_ports_own_spread() -> None:
    """Two equal runs without taps ask for equality with taps; where they differ, taps may differ as much."""
    assert observed(0.0, 0.0).value == 0
    assert observed(0.25, 0.0).value == 61 * 50
    assert observed(0.25, 0.5).value == 0


def test_a_port_that_never_gives_the_same_twice_does_not_hide_behind_that() -> None:
    """However large the spread is, taps may not change more than the floor's own error."""
    assert observed(5.0, 50.0).value > 0


def test_equal_runs_are_equal_or_apart_by_rounding() -> None:
    """Bit-equal runs read 0, noise of the floor about 1 floor; one token that races reads more, and is named."""
    assert observed(0.0, 0.0, "repeat_ratio").value == 0.0
    assert observed(0.0, 0.4 * normal(61, 5), "repeat_ratio").value == pytest.approx(1.0, abs=0.1)
    race = torch.zeros(61, 50)
    race[40] = 10 * normal(1, 6)
    found = observed(0.0, race, "repeat_ratio")
    assert found.value > 2.0
    assert found.detail["message"] == "two equal runs differ at 1 of 61 tokens, first at 40"
    assert math.isnan(observed(0.0, float("nan"), "repeat_ratio").value)


def test_nan_logits_are_not_unchanged() -> None:
    """A run without taps that gives NaN proves nothing about taps."""
    assert observed(0.0, float("nan")).value > 0


def test_runs_that_failed_are_measured_as_problems() -> None:
    """A crash of any run leaves a problem with its message in every metric that it promised."""
    runs = text.plan(context())
    failures = {("accel", r.id): Failure(run=r.id, kind="crash", message="SIGSEGV") for r in runs}
    oracles = {("oracle", r.id): traced(r, normal(61, 0), "oracle", token_ids=[1]) for r in runs if r.observe}
    view = StageView(context=context(), runs=runs, trace=lambda role, run: {**failures, **oracles}.get((role, run)))
    found = text.measure(view)
    assert {m.metric for m in found} >= {"error_ratio", "logits_kl_ratio", "greedy_margin_z", "taps_change_logits"}
    of_the_port = [m for m in found if m.metric != "unexercised"]
    assert all(m.problem and "SIGSEGV" in m.detail["message"] for m in of_the_port)


def test_a_prompt_is_long_enough_for_a_selection_to_drop_something() -> None:
    """A selection of 96 gets a prompt beyond it, still a prime; one of 2048 is left to the long context."""
    for kept, expected in ((8, 61), (96, 113), (2048, 61)):
        info = ModelInfo(path="m", config={}, vocab_size=50, layers=2, max_length_tokens=4096, edges={"topk": kept})
        assert len(by_id(text.plan(context(info=info)))["text/free"].case.token_ids) == expected


def unexercised(info: ModelInfo = INFO, phases: tuple[str, ...] = ("prefill",), **cache: int) -> dict[str, Measurement]:
    """Return what a port's runs reached, by what it is about."""
    planned = context("phases", info=info, phases=phases)
    runs = text.plan(planned)
    facts = {"length_tokens": 61, "cache": cache}
    traces = {("accel", r.id): traced(r, None, **facts) for r in runs if r.options.get("phase") != "chunked"}
    traces |= {("oracle", r.id): traced(r, normal(61, 0), "oracle") for r in runs if r.kind == "forward" and r.observe}
    view = StageView(context=planned, runs=runs, trace=lambda role, run: traces.get((role, run)))
    return {m.where["what"]: m for m in exercised(view, "text")}


def test_declared_phases_that_nobody_recorded_are_named() -> None:
    """Of three declared phases one was lost; without phases nothing is missing."""
    found = unexercised(phases=("prefill", "chunk", "decode"))["phases"]
    assert found.problem == "too_few"
    assert found.detail["idle"] == ["chunk"]
    assert unexercised()["phases"].value == 0


def test_pages_are_counted_where_the_port_tells_of_them() -> None:
    """Several pages and a step that begins one are exercised with pages of 16; one page of 128 exercises neither."""
    assert unexercised(page_tokens=16)["pages"].value == 0
    assert len(unexercised(page_tokens=128)["pages"].detail["idle"]) == 2
    assert unexercised()["pages"].n == 0


def test_lengths_of_the_model_that_the_prompts_stay_below_are_named() -> None:
    """A window of 8 is exercised by 61 tokens, one of 4096 is not."""
    for window, idle in ((8, []), (4096, ["sliding_window 4096"])):
        info = ModelInfo(
            path="m", config={}, vocab_size=50, layers=2, max_length_tokens=512, edges={"sliding_window": window}
        )
        assert unexercised(info)["lengths"].detail["idle"] == idle
