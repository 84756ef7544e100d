"""Real-valued metrics: scale, rounding and NaN."""

import math

import pytest
import torch

from harness.metrics.real import (
    cosine,
    error_sums,
    half_ulp_norm,
    max_abs_error,
    mismatches,
    pcc,
    rel_rms_error,
    rounding_sums,
    signal_sums,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_ulp_norm_is_the_error_of_one_rounding(dtype: torch.dtype) -> None:
    """The norm predicted for one rounding is the one that rounding really has, within three percent."""
    values = normal(100_000)
    error = (values.to(dtype).double() - values).norm().item()
    assert half_ulp_norm(expected=values, dtype=dtype) == pytest.approx(error, rel=0.03)


def test_zeros_round_exactly() -> None:
    """A zero has no rounding error, so it gives no slack."""
    assert half_ulp_norm(expected=torch.zeros(8), dtype=torch.bfloat16) == 0.0


def test_relative_error_sees_scale_where_cosine_and_pcc_do_not() -> None:
    """One percent of scale is one percent of error, and a perfect cosine and correlation."""
    x = normal(1000)
    assert rel_rms_error(actual=1.01 * x, expected=x) == pytest.approx(0.01)
    assert cosine(actual=1.01 * x, expected=x) == pytest.approx(1.0)
    assert pcc(actual=1.01 * x + 3, expected=x) == pytest.approx(1.0)


def test_relative_error_against_nothing() -> None:
    """Zero against zero has no relative error, something against zero an infinite one."""
    assert math.isnan(rel_rms_error(actual=torch.zeros(3), expected=torch.zeros(3)))
    assert rel_rms_error(actual=torch.ones(3), expected=torch.zeros(3)) == math.inf


def test_sums_agree_across_slices_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, columns and heads of one error add up to the same whole, however it is cut into blocks."""
    a, e = normal(37, 24), normal(37, 24, seed=1)
    whole = float((a - e).square().sum())
    for block in (1 << 22, 24 * 5):
        monkeypatch.setattr("harness.metrics.real._BLOCK_ELEMENTS", block)
        sums = error_sums(actual=a, expected=e)
        assert sums.whole == pytest.approx(whole)
        assert float(sums.channel.sum()) == pytest.approx(whole)
        assert sums.by_head(4)[1] == pytest.approx(float((a - e)[:, 6:12].square().sum()))


def test_nan_propagates() -> None:
    """A NaN anywhere makes every aggregate NaN."""
    a = normal(4, 4)
    a[2, 1] = math.nan
    assert math.isnan(error_sums(actual=a, expected=normal(4, 4)).whole)
    assert math.isnan(max_abs_error(actual=a, expected=normal(4, 4)))


def test_accumulation_is_wide() -> None:
    """Many small squares are not lost beside a large one, as they would be in float32."""
    a = torch.full((1, 200_000), 1e-4, dtype=torch.float32)
    a[0, 0] = 100.0
    assert error_sums(actual=a, expected=torch.zeros_like(a)).whole == pytest.approx(1e4 + 199_999e-8, rel=1e-12)


def test_mismatches_compare_values_not_bytes() -> None:
    """Minus zero equals zero, NaN equals nothing, and other shapes are refused."""
    assert mismatches(actual=torch.tensor([-0.0, 1.0]), expected=torch.tensor([0.0, 1.0])) == 0
    assert mismatches(actual=torch.tensor([math.nan]), expected=torch.tensor([math.nan])) == 1
    with pytest.raises(ValueError, match="equal shapes"):
        mismatches(actual=torch.zeros(2), expected=torch.zeros(3))


def test_what_is_measured_stays_as_it_is() -> None:
    """Sums of squares never write into their input, in no precision (a float64 oracle needs no widening copy)."""
    value = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    kept = value.clone()
    signal_sums(expected=value)
    error_sums(actual=value, expected=value)
    assert torch.equal(value, kept)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_sums_in_float32_lose_nothing_that_matters(scale: float) -> None:
    """Sums over float32 rows of any magnitude are those of float64: of errors, signal and rounding, weighted or not."""
    e = (normal(24, 96) * scale).float()
    a = (e * (1 + 1e-3 * normal(24, 96, seed=1))).float()
    weight = normal(24, seed=2).square() / scale**2
    for narrow, wide in (
        (
            error_sums(actual=a, expected=e, weight=weight),
            error_sums(actual=a.double(), expected=e.double(), weight=weight),
        ),
        (signal_sums(expected=e), signal_sums(expected=e.double())),
        (rounding_sums(expected=e, dtype=torch.bfloat16), rounding_sums(expected=e.double(), dtype=torch.bfloat16)),
    ):
        assert torch.allclose(narrow.token, wide.token, rtol=2e-6, atol=0)
        assert torch.allclose(narrow.channel, wide.channel, rtol=2e-6, atol=0)


def test_a_square_that_overflows_float32_is_still_a_number() -> None:
    """A finite value whose square float32 cannot hold gives a finite sum; an infinite one an infinite sum."""
    e, a = torch.ones(4, 8), torch.ones(4, 8)
    a[1, 2] = 1e25
    assert error_sums(actual=a, expected=e).whole == pytest.approx(1e50, rel=1e-5)
    a[1, 2] = math.inf
    assert error_sums(actual=a, expected=e).whole == math.inf
