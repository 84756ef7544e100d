"""A compiled port against itself uncompiled."""

from __future__ import annotations

import pytest
import torch
from sides import hidden, noisy, run_of, trace

from harness import gate
from harness.checklist import load_checklists
from harness.compare.pairs import compare_pair
from harness.types import Measurement, Status

ORACLE = {"layers.0": hidden(1), "layers.1": hidden(2)}
CRITERION = load_checklists().criterion("text.compiled")


def pair(compiled: dict[str, torch.Tensor], eager: dict[str, torch.Tensor]) -> dict[str, Measurement]:
    """Return what two replays of a port differ by, by layer."""
    run = run_of(1)
    floors = [trace(noisy(ORACLE, seed), run) for seed in (1, 2, 3)]
    found = compare_pair(
        stage="text", run=run, oracle=trace(ORACLE, run), floors=floors, compiled=trace(compiled, run),
        eager=trace(eager, run), dtype="bfloat16",
    )  # fmt: skip
    return {m.subject: m for m in found}


def statuses(found: dict[str, Measurement]) -> list[Status]:
    """Return the status of each layer."""
    assert CRITERION is not None
    return [gate.status_of(CRITERION, m) for m in found.values()]


def test_bits_that_are_equal_read_nothing() -> None:
    """A compiler that computes the same gives 0."""
    assert [m.value for m in pair(noisy(ORACLE, 9), noisy(ORACLE, 9)).values()] == [0.0, 0.0]


@pytest.mark.parametrize("seed", range(9, 29))
def test_honest_runs_that_share_no_rounding_stay_within(seed: int) -> None:
    """Two honest runs with noise of their own are within the limit in every layer."""
    assert statuses(pair(noisy(ORACLE, seed), noisy(ORACLE, seed + 100))) == [Status.PASSED, Status.PASSED]


def test_a_layer_that_is_wrong_when_compiled_only_is_named_with_the_side_that_is_off() -> None:
    """A factor that only the compiled layer has is outside the limit there, and the uncompiled one reads as usual."""
    compiled = noisy(ORACLE, 9)
    compiled["layers.1"] = compiled["layers.1"] * 1.02
    found = pair(compiled, noisy(ORACLE, 10))
    assert statuses(found) == [Status.PASSED, Status.FAILED]
    assert "the compiled layer reads 4.5" in found["layers.1"].detail["message"]
    assert "uncompiled 0." in found["layers.1"].detail["message"]
