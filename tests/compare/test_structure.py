"""Structure in one tap's error: a mean of its own, a rise along the sequence, sets of rows that belong together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sides import TOKENS, WIDTH, compare, hidden, noisy, normal, run_of, trace, value

from harness import gate
from harness.checklist import load_checklists
from harness.types import Image, Layout, Measurement, Run

NAME = "layers.0"
ORACLE = {NAME: hidden(1)}
TEXT = load_checklists().by_stage["text"]


def broken(found: list[Measurement]) -> set[str]:
    """Return the criteria of the text stage that one of the measurements breaks."""
    return {c.id for c in TEXT for m in found if gate.covers(c, m) and gate.status_of(c, m) is not gate.Status.PASSED}


def bent(change: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return an honest port with something added to its only layer."""
    return {NAME: noisy(ORACLE, 9)[NAME] + change}


@pytest.mark.parametrize("seed", range(9, 29))
def test_honest_noise_has_no_structure(seed: int) -> None:
    """Noise of the floor's own size breaks no criterion; mean and rise read exactly 0."""
    found = compare(noisy(ORACLE, seed), ORACLE)
    assert broken(found) == set()
    assert value(found, "bias_beyond_noise").value == 0.0
    assert value(found, "growth_beyond_noise").value == 0.0


def test_a_small_constant_is_seen_by_nothing_else() -> None:
    """A constant of about a rounding in every channel breaks the mean's criterion alone; noise as large breaks none."""
    sign = normal(1, 1, WIDTH, seed=5).sign()
    found = compare(bent(0.0026 * sign), ORACLE)
    assert broken(found) == {"text.bias"}
    assert "mean of its own" in value(found, "bias_beyond_noise").detail["message"]
    assert broken(compare(bent(0.0026 * normal(1, TOKENS, WIDTH, seed=6).sign()), ORACLE)) == set()


def test_a_constant_in_one_head_is_placed_there() -> None:
    """The head that holds a constant is named."""
    oracle = {"layers.0.attn.core": hidden(4).reshape(1, TOKENS, 4, WIDTH // 4)}
    dims = {"layers.0.attn.core": "batch token head feature"}
    accel = noisy(oracle, 9)
    accel["layers.0.attn.core"][:, :, 2] += 0.006 * normal(WIDTH // 4, seed=5).sign()
    m = value(compare(accel, oracle, run_of(3), dims=dims), "bias_beyond_noise")
    assert m.where["head"] == 2
    assert m.value > 0.2


def test_an_error_that_begins_on_the_way_is_seen_by_nothing_else() -> None:
    """A port more precise than its floor, less so from token 30 on, breaks the rise's criterion alone.

    The same errors everywhere break none.
    """
    more = 0.0035 * normal(1, TOKENS, WIDTH, seed=6) * ORACLE[NAME]
    late = more * (torch.arange(TOKENS) >= 30)[None, :, None]
    found = compare({NAME: noisy(ORACLE, 9, size=0.001)[NAME] + late}, ORACLE)
    assert broken(found) == {"text.growth"}
    m = value(found, "growth_beyond_noise")
    assert abs(m.where["from"] - 30) <= 4
    assert m.detail["message"].startswith("from position")
    assert broken(compare({NAME: ORACLE[NAME] + more}, ORACLE)) == set()


def test_every_second_token_is_a_slice() -> None:
    """An error at every second token reads larger there than over the whole, and is named."""
    odd = (torch.arange(TOKENS) % 2 == 1)[None, :, None]
    found = compare(bent(0.01 * normal(1, TOKENS, WIDTH, seed=6) * ORACLE[NAME] * odd), ORACLE)
    strides = [m for m in found if m.where.get("slice") == "stride" and str(m.where["stride"]).endswith("of 2")]
    assert [m.where["stride"] for m in strides] == ["1 of 2"]
    assert strides[0].value > 1.3 * value(found, "error_ratio", NAME, "whole").value


def test_each_call_of_a_phase_is_a_slice() -> None:
    """A chunk whose error is twice as large is named by its tokens."""
    run = run_of(1, kind="steps", steps=((0, 20), (20, 36), (36, TOKENS)), options={"phase": "chunked"})
    late = (torch.arange(TOKENS) >= 36)[None, :, None]
    found = compare(bent(0.012 * normal(1, TOKENS, WIDTH, seed=6) * ORACLE[NAME] * late), ORACLE, run)
    calls = {m.where["call"]: m.value for m in found if m.where.get("slice") == "call"}
    assert max(calls, key=lambda at: calls[at]) == f"36-{TOKENS - 1}"
    assert "text.phases.calls" in broken(found)


def test_a_rank_carries_its_share_of_the_channels() -> None:
    """Under tensor parallelism the rank whose channels are off is named."""
    run: Run = replace(run_of(1), layout=Layout(tp=4))
    change = torch.zeros(1, TOKENS, WIDTH)
    change[..., 8:16] = 0.012 * normal(1, TOKENS, 8, seed=6)
    shards = [m for m in compare(bent(change), ORACLE, run) if m.where.get("slice") == "shard"]
    assert [m.where["shard"] for m in shards] == ["rank 1"]
    assert not [m for m in compare(bent(change), ORACLE) if m.where.get("slice") == "shard"]


def test_rows_and_columns_of_a_picture_are_slices() -> None:
    """In a tower, blocks of patches are named by their row, their column and their picture."""
    grid = torch.tensor([[1, 4, 6], [1, 8, 4]])
    patches = 24 + 32
    name = "vision.blocks.0"
    oracle = {"inputs.image_grid": grid, name: normal(patches, WIDTH, seed=1)}
    dims = {"inputs.image_grid": "axis0 axis1", name: "patch feature"}
    accel = noisy(oracle, 9)
    second_row = slice(24 + 8, 24 + 16)  # of the second picture: blocks of two by two patches, two blocks a row
    accel[name][second_row] += 0.02 * normal(8, WIDTH, seed=3) * oracle[name][second_row]
    run = run_of(1, stage="image")
    run = replace(run, case=replace(run.case, images=(Image(height=4, width=6, rgb=""),)))
    found = compare(trace(accel, run, dims), oracle, run, dims=dims)
    rows = [m for m in found if m.where.get("slice") == "row"]
    worst = max(rows, key=lambda m: m.value)
    assert worst.where["row"] == "1 of picture 1"
    assert {m.where["slice"] for m in found if "picture" in str(m.where.get("slice"))} == {"picture"}
