"""Mean errors and rises: what noise reads, and from which size on an effect shows."""

from __future__ import annotations

import math

import pytest
import torch

from harness.metrics.structure import (
    clustered,
    honest_mean,
    mean_by_channel,
    mean_by_group,
    rise,
    splits_of,
)

TESTS = 4096


def noise(tokens: int, width: int, seed: int) -> torch.Tensor:
    """Return seeded noise of size 0.8, a little heavier in the tails than normal."""
    draw = torch.Generator().manual_seed(seed)
    z = torch.randn(tokens, width, generator=draw)
    return 0.8 * z * (0.7 + 0.6 * torch.rand(tokens, 1, generator=draw))


@pytest.mark.parametrize("tokens", [16, 61, 257])
def test_noise_has_no_mean_beyond_its_interval(tokens: int) -> None:
    """In 300 draws no channel, no group and no whole lies beyond its interval (family rate 1e-3 of 4096 tests)."""
    for seed in range(300):
        z = clustered(noise(tokens, 64, seed))
        assert not mean_by_channel(z, tests=TESTS * 64).excess.any()
        assert not mean_by_group(z, groups=8, tests=TESTS).excess.any()
        assert not mean_by_group(z, groups=1, tests=TESTS).excess.any()


def test_noise_along_few_directions_has_no_mean_beyond_its_interval() -> None:
    """Errors of all channels that move together count as one: the interval grows with what they have in common."""
    for seed in range(300):
        z = noise(61, 1, seed) * noise(1, 64, 7)
        assert not mean_by_group(z, groups=1, tests=TESTS).excess.any()


def test_a_mean_in_many_channels_shows_far_below_the_noise() -> None:
    """Half of the floor as a constant in every channel is found; a channel alone needs about one whole floor."""
    sign = noise(1, 64, 3).sign()
    z = noise(61, 64, 1) + 0.5 * sign
    assert float(mean_by_group(z, groups=1, tests=TESTS).excess) > 0.1
    one = noise(61, 64, 1)
    one[:, 5] += 1.2
    found = mean_by_channel(one, tests=TESTS * 64).excess
    assert int(found.argmax()) == 5
    assert float(found[5]) > 0.1


def test_an_honest_mean_is_counted_without_what_chance_gives() -> None:
    """A side whose mean error is 0.5 reads about 0.5; noise alone reads next to nothing."""
    assert float(honest_mean(noise(61, 64, 1) + 0.5, groups=1)) == pytest.approx(0.5, abs=0.05)
    assert float(honest_mean(noise(61, 64, 1), groups=1)) < 0.05


@pytest.mark.parametrize("tokens", [8, 16, 61, 1024])
def test_noise_does_not_rise(tokens: int) -> None:
    """In 300 draws no place has larger errors behind it than noise explains."""
    splits = splits_of(tokens)
    for seed in range(300):
        assert not rise(noise(tokens, 32, seed).norm(dim=1) / 5, splits=splits, tests=TESTS).excess.any()


def test_an_error_that_begins_late_is_found_where_it_begins() -> None:
    """Errors twice as large in the last sixteen of 61 tokens are found at about their first one."""
    ratio = noise(61, 32, 2).norm(dim=1) / 5
    ratio[45:] *= 2
    splits = splits_of(61)
    found = rise(ratio, splits=splits, tests=TESTS).excess
    assert abs(int(splits[found.argmax()]) - 45) <= 3
    assert float(found.max()) > 0.2


def test_one_outlier_at_the_end_is_no_rise() -> None:
    """A single token a hundred times off is the token slice's business."""
    ratio = noise(61, 32, 2).norm(dim=1) / 5
    ratio[-1] *= 100
    assert not rise(ratio, splits=splits_of(61), tests=TESTS).excess.any()


def test_nan_stays_nan() -> None:
    """A NaN reaches the measurement instead of a number."""
    z = noise(61, 64, 1)
    z[3, 5] = math.nan
    assert torch.isnan(mean_by_channel(z, tests=TESTS).excess[5])
    assert torch.isnan(mean_by_group(z, groups=1, tests=TESTS).excess).all()
    assert torch.isnan(rise(z.norm(dim=1), splits=splits_of(61), tests=TESTS).excess).all()


def test_no_error_at_all_has_no_mean():
    """Equal values give an effect of 0, not of nothing: a port that is exact in a place is not refused there."""
    found = mean_by_group(torch.zeros(16, 8), groups=2, tests=100)
    assert found.excess.tolist() == [0.0, 0.0]
