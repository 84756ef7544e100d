"""Slopes: a share of the signal is found below the norm of the noise, and noise alone has none."""

from __future__ import annotations

import pytest
import torch

from harness.metrics.real import errors_of
from harness.metrics.slopes import Products, Slopes, group_slopes, joint_slopes

TOKENS, WIDTH, EXPERTS, CHOICES = 96, 64, 12, 3
NOISE = 3e-3


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sides(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return expected, honest actual and weights."""
    expected = normal(TOKENS, WIDTH, seed=seed)
    return expected, expected + NOISE * normal(TOKENS, WIDTH, seed=seed + 1), torch.ones(TOKENS, dtype=torch.float64)


def products_of(actual: torch.Tensor, expected: torch.Tensor, groups: int) -> Products:
    errors = errors_of(actual=[actual], expected=expected, groups=groups)
    return Products(error=errors.product, signal=errors.signal)


def channel_slopes(*, actual, expected, weight, groups: int) -> Slopes:
    return first(group_slopes(products_of(actual, expected, groups), weight=weight))


def position_slopes(*, actual, expected, weight, buckets: int) -> Slopes:
    return first(group_slopes(products_of(actual, expected, 1).stretches(buckets), weight=weight))


def first(slopes: Slopes) -> Slopes:
    """Return the slopes of the only side."""
    return Slopes(value=slopes.value[0], error=slopes.error[0], samples=slopes.samples)


def beyond(slopes: Slopes) -> torch.Tensor:
    return slopes.beyond(honest=torch.zeros_like(slopes.value), tests=4096)


def test_one_percent_in_one_head_is_found_there_and_nowhere_else():
    """A head scaled by 1 % has a slope of 0.01, beyond its interval; the other heads have none."""
    expected, actual, weight = sides()
    actual[:, 16:32] += 0.01 * expected[:, 16:32]
    slopes = channel_slopes(actual=actual, expected=expected, weight=weight, groups=4)
    assert float(slopes.value[1]) == pytest.approx(0.01, rel=0.1)
    assert (beyond(slopes) > 5e-3).tolist() == [False, True, False, False]


def test_one_percent_in_a_stretch_of_positions_is_found_there():
    """The last quarter scaled by 1 % is found in its own bucket alone."""
    expected, actual, weight = sides()
    actual[72:] *= 1.01
    found = beyond(position_slopes(actual=actual, expected=expected, weight=weight, buckets=4))
    assert (found > 2e-3).tolist() == [False, False, False, True]


def test_noise_has_no_slope():
    """Over two hundred honest sides and all their slices, nothing lies beyond its interval."""
    for seed in range(0, 400, 2):
        expected, actual, weight = sides(seed)
        found = [
            channel_slopes(actual=actual, expected=expected, weight=weight, groups=8),
            position_slopes(actual=actual, expected=expected, weight=weight, buckets=8),
        ]
        assert all(float(beyond(s).max()) == 0 for s in found)


def test_experts_that_share_tokens_are_told_apart():
    """One expert of twelve at +1 % reads 0.01 in a joint fit; its companions on the same tokens read none."""
    weight = torch.ones(TOKENS, dtype=torch.float64)
    parts = normal(TOKENS, CHOICES, WIDTH, seed=5)
    owner = torch.stack(
        [torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(t))[:CHOICES] for t in range(TOKENS)]
    )
    error = NOISE * normal(TOKENS, WIDTH, seed=6) + 0.01 * (parts * (owner == 7)[..., None]).sum(dim=1)
    slopes = first(joint_slopes(error=error[None], parts=parts, owner=owner, weight=weight, owners=EXPERTS))
    assert float(slopes.value[7]) == pytest.approx(0.01, rel=0.1)
    assert [i for i, b in enumerate(beyond(slopes)) if b > 2e-3] == [7]


def test_an_expert_seen_once_is_still_told():
    """A single token is enough for an expert at +10 %: its part is a direction of its own."""
    parts = normal(8, 2, WIDTH, seed=1)
    owner = torch.tensor([[0, 1]] * 7 + [[0, 2]])
    error = NOISE * normal(8, WIDTH, seed=2) + 0.1 * (parts * (owner == 2)[..., None]).sum(dim=1)
    weight = torch.ones(8, dtype=torch.float64)
    slopes = first(joint_slopes(error=error[None], parts=parts, owner=owner, weight=weight, owners=4))
    assert float(slopes.value[2]) == pytest.approx(0.1, rel=0.1)
    assert float(beyond(slopes)[2]) > 0.05
    assert torch.isinf(slopes.error[3])  # never chosen: nothing is said of it


def test_what_honest_runs_show_is_taken_off():
    """A slope that the reference itself has in this precision is no error of the port."""
    expected, actual, weight = sides()
    biased = actual * 0.995
    mine = channel_slopes(actual=biased, expected=expected, weight=weight, groups=1)
    floor = channel_slopes(actual=biased, expected=expected, weight=weight, groups=1)
    assert float(beyond(mine)) > 3e-3
    assert float(mine.beyond(honest=floor.value.abs(), tests=4096)) == 0
    assert torch.isnan(
        channel_slopes(actual=actual * torch.nan, expected=expected, weight=weight, groups=1).value
    ).all()


def test_a_joint_fit_in_float32_is_that_of_float64():
    """Slopes and intervals of experts made from float32 products are those of float64, far inside of their interval."""
    parts, owner = normal(TOKENS, CHOICES, WIDTH, seed=5), torch.arange(TOKENS * CHOICES).reshape(TOKENS, -1) % EXPERTS
    weight = normal(TOKENS, seed=9).square() * 1e9
    error = NOISE * normal(1, TOKENS, WIDTH, seed=6) + 0.01 * parts.sum(dim=1)
    wide = joint_slopes(error=error, parts=parts, owner=owner, weight=weight, owners=EXPERTS)
    narrow = joint_slopes(error=error.float(), parts=parts.float(), owner=owner, weight=weight, owners=EXPERTS)
    assert torch.allclose(narrow.error, wide.error, rtol=1e-4)
    assert float(((narrow.value - wide.value) / wide.error).abs().max()) < 1e-3
