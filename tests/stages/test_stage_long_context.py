"""The long-context stage: its ladder of lengths, latency and memory."""

from typing import Any

import pytest

from harness.cases import ModelInfo
from harness.stages import StageContext, StageView, long_context
from harness.types import Failure, Measurement, Run, Scope, Setup, Trace


def context(
    *capabilities: str, profile: str = "quick", claimed: int = 4096, longest: int = 4096, **edges: int
) -> StageContext:
    config = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    info = ModelInfo(path="m", config=config, vocab_size=50, layers=2, max_length_tokens=longest, edges=edges)
    return StageContext(
        info=info, scope=Scope(max_length_tokens=claimed), capabilities=frozenset(capabilities), profile=profile,
        reference_capabilities=frozenset(capabilities), dtype="bfloat16",
    )  # fmt: skip


def test_the_ladder_stands_on_the_models_own_edges() -> None:
    """Just behind, at and before each edge come first, then lengths just above powers of two."""
    assert long_context.rungs(context(sliding_window=64)) == [63, 64, 65, 129, 257]
    assert {127, 128, 129, 31, 32, 33} <= set(
        long_context.rungs(context(profile="full", index_topk=128, page_tokens=32))
    )


@pytest.mark.parametrize("profile", ["quick", "full"])
@pytest.mark.parametrize(("claimed", "longest"), [(4096, 4096), (100, 4096), (4096, 40), (9, 9)])
def test_no_rung_is_longer_than_claimed_and_the_longest_is_there(profile: str, claimed: int, longest: int) -> None:
    """The ladder ends with what the port claims (in the quick profile at most with 257), and never goes beyond."""
    lengths = long_context.rungs(context(profile=profile, claimed=claimed, longest=longest, sliding_window=8))
    top = min(claimed, longest)
    assert lengths[-1] == (top if profile == "full" else min(top, 257))
    assert lengths == sorted(set(lengths))
    assert profile == "full" or len(lengths) <= 5


def test_each_rung_is_a_layer_replay_by_position() -> None:
    """Every length has a free run and a level-1 replay of it, with more position buckets and without inner taps."""
    runs = long_context.plan(context("phases", sliding_window=64))
    replays = [r for r in runs if r.level and r.kind == "forward"]
    assert [len(r.case.token_ids) for r in replays] == [63, 64, 65, 129, 257]
    assert all(r.level == 1 and r.options["buckets"] > 8 and r.pin == r.id.replace("replay1", "free") for r in replays)
    chunked = next(r for r in runs if r.kind == "steps")
    assert len(chunked.steps) >= 4
    assert chunked.steps[-1][1] == 257
    assert len({b - a for a, b in chunked.steps}) > 1


def trace(run: Run, **facts: Any) -> Trace:
    setup = Setup(side="accel", role="accel", adapter="synthetic")
    return Trace(setup=setup, run=run, taps={}, tensors={}, facts=facts)


def of(metric: str, run_id: str, given: Trace | Failure | None = None, **facts: Any) -> Measurement:
    here = context("phases")
    runs = long_context.plan(here)
    run = next(r for r in runs if r.id == run_id)
    accel = given or trace(run, **facts)
    view = StageView(
        context=here, runs=runs, trace=lambda role, name: accel if (role, name) == ("accel", run_id) else None
    )
    (found,) = (m for m in long_context.measure(view) if m.metric == metric)
    return found


def test_latency_states_median_tail_and_jitter() -> None:
    """64 steps give all three; fewer give a median and no tail."""
    steps = [0.01] * 56 + [0.03] * 8
    assert of("decode_latency_median_s", "long_context/latency", step_s=steps).value == 0.01
    assert of("decode_latency_p90_s", "long_context/latency", step_s=steps).value == pytest.approx(0.03)
    assert of("decode_jitter_ratio", "long_context/latency", step_s=steps).value == pytest.approx(3.0)
    assert of("decode_latency_p90_s", "long_context/latency", step_s=steps[:40]).problem == "too_few"


def test_peak_memory_is_held_against_the_ports_plan_or_a_workspace() -> None:
    """The port's own plan comes first; without one, what was resident and the workspace of one layer is the plan."""
    own = of("peak_over_plan", "long_context/memory", peak_bytes=3 << 30, planned_bytes=2 << 30)
    assert own.value == 1.5
    resident = 1 << 30
    lean = of("peak_over_plan", "long_context/memory", peak_bytes=resident + (8 << 20), resident_before_bytes=resident)
    assert lean.value < 1
    leak = {"peak_bytes": 2 * resident, "resident_before_bytes": resident}
    assert of("peak_over_plan", "long_context/memory", **leak).value > 1
    assert of("peak_over_plan", "long_context/memory", **leak, window_bytes=resident).value < 1  # weights pass by


def test_a_failed_run_is_a_problem() -> None:
    """A crash at length leaves a problem with its message."""
    failure = Failure(run="long_context/memory", kind="memory", message="out of memory at 257 tokens")
    found = of("peak_over_plan", "long_context/memory", failure)
    assert found.problem == "error"
    assert "out of memory" in found.detail["message"]
