"""How many independent numbers an error stands for, from what honest runs differ by along it; at most the count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sides import TOKENS, hidden, normal, run_of, trace
from torch import Tensor

from harness import gate
from harness.checklist import load_checklists
from harness.compare import compare_run
from harness.compare.samples import FEWEST_IN_A_MEAN, USUAL, samples_of, worst_of
from harness.compare.values import with_floor
from harness.types import Criterion, Measurement, Scope

WIDTH, FLOORS, DRAWS = 192, 3, 2000
SIZE = 0.01
"""Size of an honest error beside a signal of 1."""
LONG = {c.id: c for c in load_checklists().by_stage["long_context"]}
TAILS = LONG["long_context.tails"]


def independent(count: int, seed: int) -> Tensor:
    """Return errors of `count` tokens, every element for itself."""
    return SIZE * normal(count, WIDTH, seed=seed)


def of_one_factor(count: int, seed: int) -> Tensor:
    """Return errors of `count` tokens, in each of them one number times a pattern that all runs share, and a little."""
    pattern = normal(count, WIDTH, seed=77)
    return SIZE * (normal(count, 1, seed=seed) * pattern + 0.05 * normal(count, WIDTH, seed=seed + 1000))


def broken(criterion: Criterion, values: Tensor, samples: Tensor) -> float:
    """Return the share of values that lie beyond their limit."""
    limits = torch.tensor([gate.limit_at(criterion, max(1, int(n))) for n in samples])
    return float((values > limits).double().mean())


def judged(mine: Tensor, floors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return ratio and samples of tokens that a tap holds each for itself: no token's floor rests on another's."""
    expected = normal(len(mine), WIDTH, seed=5)
    sides = [expected + e for e in (mine, *floors)]
    error, power = (torch.stack([e.double().square().sum(dim=1) for e in side]) for side in ((mine, *floors), floors))
    ratio = (error[0] / power.amax(dim=0)).sqrt()
    return ratio, samples_of(actual=sides[0], floors=sides[1:], expected=expected, ratio=ratio)


def test_errors_of_one_factor_count_as_one_number_and_break_a_limit_rarely() -> None:
    """One number against the worst of three breaks the limit of 192 elements in 5 % of tokens, of its n in 0.5 %."""
    ratio, samples = judged(of_one_factor(DRAWS * 10, 1), [of_one_factor(DRAWS * 10, s) for s in (2, 3, 4)])
    assert 0.04 < broken(TAILS, ratio, torch.full_like(ratio, WIDTH)) < 0.06
    assert broken(TAILS, ratio, samples) < 0.006
    assert float(samples[ratio > 2].median()) < 2


def test_the_limit_of_independent_errors_is_that_of_their_elements() -> None:
    """Where every element errs for itself, n is the count in all tokens: of an honest port, of one three times off."""
    floors = [independent(DRAWS, s) for s in (2, 3, 4)]
    for factor in (1.0, 1.2, 3.0):
        _, samples = judged(factor * independent(DRAWS, 1), floors)
        assert float((samples < WIDTH).double().mean()) == 0


def test_errors_that_share_as_usual_keep_nearly_all_of_their_count() -> None:
    """Where eight elements share a number, for which limits were calibrated, about one token in twenty loses some."""
    numbers = WIDTH // int(USUAL)
    mixing = normal(WIDTH, numbers, seed=8) / numbers**0.5
    errors = [SIZE * normal(DRAWS, numbers, seed=s) @ mixing.T for s in (1, 2, 3, 4)]
    ratio, samples = judged(1.5 * errors[0], errors[1:])
    lost = samples[ratio > 1] < WIDTH
    assert 0.01 < float(lost.double().mean()) < 0.1


def test_a_fault_elsewhere_than_where_honest_runs_differ_has_no_excuse() -> None:
    """On ill-conditioned tokens, a fault in another direction keeps the count of its elements: it stays detected."""
    floors = [of_one_factor(DRAWS, s) for s in (2, 3, 4)]
    fault = 6 * SIZE * normal(DRAWS, WIDTH, seed=9)
    ratio, samples = judged(of_one_factor(DRAWS, 1) + fault, floors)
    assert broken(TAILS, ratio, samples) > 0.95 * broken(TAILS, ratio, torch.full_like(ratio, WIDTH)) > 0.5


def test_what_honest_runs_have_in_common_is_no_excuse() -> None:
    """An error that all floors make, made twice as large, keeps its count: along it no two of them differ."""
    common = independent(DRAWS, 1)
    floors = [common + 0.1 * independent(DRAWS, s) for s in (2, 3, 4)]
    _, samples = judged(3 * common, floors)
    assert float(samples.min()) == WIDTH


@pytest.mark.parametrize("floors", [0, 1, 2])
def test_few_floors_say_nothing(floors: int) -> None:
    """Below three floors n is the count."""
    _, samples = judged(3 * of_one_factor(64, 1), [of_one_factor(64, s) for s in range(2, 2 + max(1, floors))])
    assert float(samples.min()) == WIDTH


def test_silence_and_nan_do_not_change_the_count() -> None:
    """Tokens that no floor errs in, and tokens that are not finite, are held to the count of their elements."""
    expected = normal(4, WIDTH, seed=5)
    actual = expected + independent(4, 1)
    actual[1, 3] = torch.nan
    ratio = torch.tensor([2.0, torch.nan, torch.inf, 0.5])
    samples = samples_of(actual=actual, floors=[expected] * 3, expected=expected, ratio=ratio)
    assert samples.tolist() == [WIDTH] * 4


def test_the_worst_of_each_octave_is_told() -> None:
    """A value that its own n excuses does not stand before a smaller one that nothing excuses."""
    value, samples = torch.tensor([1.2, 3.0, 1.4, 2.9]), torch.tensor([192.0, 5.0, 192.0, 6.0])
    assert list(worst_of(value, samples, torch.full((4,), 192.0))) == [(2, 192), (1, 6)]
    value[0] = torch.nan
    assert next(iter(worst_of(value, samples, torch.full((4,), 192.0)))) == (0, 192)


def compared(mine: Tensor, errors: list[Tensor], tokens: int) -> list[Measurement]:
    """Compare a layer of some tokens, the port's and the floors' errors given."""
    oracle = {"layers.0": hidden(1, WIDTH)[:, :tokens]}
    run = replace(run_of(1), stage="long_context", id="long_context/replay1-8")
    sides = [trace({"layers.0": oracle["layers.0"] + e[None, :tokens]}, run) for e in (mine, *errors)]
    return compare_run(
        stage="long_context", run=run, oracle=trace(oracle, run), floors=sides[1:], accel=sides[0], scope=Scope(),
        dtype="bfloat16",
    )  # fmt: skip


def breaks(found: list[Measurement]) -> set[str]:
    """Return the criteria of the stage that are broken."""
    return {
        c.id for c in LONG.values() for m in found
        if gate.covers(c, m) and gate.status_of(c, m) is not gate.Status.PASSED
    }  # fmt: skip


def ill_conditioned(mine: float) -> tuple[Tensor, list[Tensor]]:
    """Return errors of which one token's is one number, small by chance in all floors and `mine` in the port."""
    pattern = normal(WIDTH, seed=77)
    errors = [independent(TOKENS, s) for s in (11, 12, 13, 14)]
    for error, number in zip(errors, (mine, 0.5, -0.4, 0.6), strict=True):
        error[4] += SIZE * number * pattern
    return errors[0], errors[1:]


@pytest.mark.parametrize("tokens", [8, TOKENS])
def test_one_ill_conditioned_token_is_not_a_wrong_port(tokens: int) -> None:
    """An error that is one number may be three times that of all floors; the same size in another direction may not."""
    mine, floors = ill_conditioned(3.5)
    found = compared(mine, floors, tokens)
    token = next(m for m in found if m.where.get("token") == 4 and m.metric == "error_ratio")
    assert token.value > 2.6
    assert token.n < 24
    assert token.detail["message"].startswith(f"{WIDTH} elements count as {token.n}")
    assert breaks(found) == set()
    elsewhere, _ = ill_conditioned(0.0)
    elsewhere[4] += 3.5 * SIZE * normal(WIDTH, seed=78)
    assert "long_context.tails" in breaks(compared(elsewhere, floors, tokens))


def test_a_mean_needs_tokens() -> None:
    """A stretch, or every fourth token, of a prompt of eight is told from four tokens on: fewer are tokens."""
    assert FEWEST_IN_A_MEAN == 4
    mine, floors = ill_conditioned(0.0)
    found = [m for m in compared(mine, floors, 8) if m.metric == "error_ratio"]
    stretches = {m.where.get("slice"): m.n // WIDTH for m in found}
    assert stretches["position"] == stretches["stride"] == 4
    assert stretches["token"] == 1


def test_a_mean_is_not_broken_by_a_token_within_its_limit() -> None:
    """Of four tokens of any width, one at the limit of tokens beside ordinary ones leaves that of the mean unbroken."""
    mean = LONG["long_context.positions"]
    for width in (16, 64, 192, 576, 7168):
        for count, stays in ((FEWEST_IN_A_MEAN, True), (2, False)):
            value = (gate.limit_at(TAILS, width) + 0.8 * (count - 1)) / count
            assert (value <= gate.limit_at(mean, count * width)) is stays


def test_the_floor_of_a_tap_does_not_depend_on_samples() -> None:
    """Only n is taken from where floors differ: numerator and floor of a ratio are what they were."""
    mine, floors = ill_conditioned(3.5)
    expected = hidden(1, WIDTH)[0]
    errors, floor = with_floor(
        actual=expected + mine, floors=[expected + e for e in floors], expected=expected, dtype=torch.bfloat16, groups=1
    )
    ratio = (errors.error[0] / floor.token).sqrt()
    told = next(m for m in compared(mine, floors, TOKENS) if m.where.get("token") == 4 and m.metric == "error_ratio")
    assert told.value == pytest.approx(float(ratio[4]), rel=1e-9)
