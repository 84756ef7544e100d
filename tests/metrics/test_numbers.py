"""Distributions, latency and memory."""

import math

import pytest
import torch

from harness.metrics.distributions import greedy_margin_z, kl_nats_per_token, top1_agreement
from harness.metrics.latency import jitter_ratio, median, p90, quantile
from harness.metrics.memory import peak_over_plan


def test_kl_is_summed_over_the_vocabulary_and_averaged_over_tokens() -> None:
    """A coin of 3:1 judged as 1:1 costs 0.75 ln 1.5 + 0.25 ln 0.5 nats, however many tokens or unused words."""
    fair, biased = torch.tensor([[0.0, 0.0, -1e4]]), torch.tensor([[math.log(3.0), 0.0, -1e4]])
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert kl_nats_per_token(actual=fair, expected=biased) == pytest.approx(expected)
    assert kl_nats_per_token(actual=fair.repeat(90, 1), expected=biased.repeat(90, 1)) == pytest.approx(expected)


def test_kl_ignores_a_constant_and_propagates_nan() -> None:
    """Logits are defined up to a constant; a NaN row makes the mean NaN."""
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert kl_nats_per_token(actual=x + 3, expected=x) == pytest.approx(0.0, abs=1e-6)
    bad = x.clone()
    bad[2, 3] = math.nan
    assert math.isnan(kl_nats_per_token(actual=bad, expected=x))


def test_top1_agreement_is_a_share_of_rows() -> None:
    """One of two rows agrees."""
    assert (
        top1_agreement(actual=torch.tensor([[1.0, 0.0], [1.0, 0.0]]), expected=torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
        == 0.5
    )


def test_greedy_texts_differ_benignly_only_at_a_near_tie() -> None:
    """The first other token is weighed by the gap of the oracle's logits there; what follows is not."""
    logits = torch.tensor([[5.0, 1.0, 0.0], [2.0, 1.9, 0.0], [0.0, 0.0, 9.0]])
    assert greedy_margin_z(actual=[0, 0, 2], expected=[0, 0, 2], logits=logits, uncertainty=0.1) == (0.0, 3)
    z, place = greedy_margin_z(actual=[0, 1, 0], expected=[0, 0, 2], logits=logits, uncertainty=0.1)
    assert z == pytest.approx(1.0)
    assert place == 1
    assert greedy_margin_z(actual=[1], expected=[0, 0, 2], logits=logits, uncertainty=0.1)[0] == pytest.approx(40.0)


def test_a_text_that_ends_early_or_is_no_token_is_no_tie() -> None:
    """A missing token, or an id outside the vocabulary, is infinitely far."""
    logits = torch.tensor([[5.0, 1.0], [2.0, 1.0]])
    assert greedy_margin_z(actual=[0], expected=[0, 0], logits=logits, uncertainty=1.0)[0] == math.inf
    assert greedy_margin_z(actual=[9, 0], expected=[0, 0], logits=logits, uncertainty=1.0)[0] == math.inf


def test_a_p90_needs_64_samples() -> None:
    """With fewer samples there is no p90 and no jitter, rather than a wrong one."""
    assert p90([1.0] * 63) is None
    assert jitter_ratio([1.0] * 63) is None
    assert p90([float(i) for i in range(101)]) == 90.0
    assert jitter_ratio([2.0] * 64) == 1.0


def test_quantiles_do_not_hide_nan_or_emptiness() -> None:
    """No samples, or a NaN among them, give NaN."""
    assert math.isnan(median([]))
    assert math.isnan(quantile([1.0, math.nan, 2.0], 0.5))
    assert median([3.0, 1.0]) == 2.0


def test_a_plan_of_nothing_proves_nothing() -> None:
    """Peak over plan is a ratio; without a plan or a peak it is NaN, which no limit accepts."""
    assert peak_over_plan(peak_bytes=3, planned_bytes=2) == 1.5
    assert math.isnan(peak_over_plan(peak_bytes=3, planned_bytes=0))
    assert math.isnan(peak_over_plan(peak_bytes=0, planned_bytes=3))
