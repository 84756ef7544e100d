"""Real-valued metrics: scale, rounding and NaN."""

import math

import pytest
import torch

from harness.metrics.real import Errors, cosine, errors_of, max_abs_error, mismatches, pcc, rel_rms_error


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_the_error_of_one_rounding(dtype: torch.dtype) -> None:
    """The norm predicted for one rounding is the one that rounding really has, within three percent."""
    values = normal(10, 10_000)
    error = (values.to(dtype).double() - values).norm().item()
    assert math.sqrt(rounding(values, dtype).rounding.sum()) == pytest.approx(error, rel=0.03)


def rounding(values: torch.Tensor, dtype: torch.dtype) -> Errors:
    return errors_of(actual=[], expected=values, dtype=dtype)


def test_zeros_round_exactly() -> None:
    """A zero has no rounding error, so it gives no slack."""
    assert float(rounding(torch.zeros(1, 8), torch.bfloat16).rounding) == 0.0


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
    """Rows, columns and groups of one error add up to the same whole, however it is cut into blocks, kept or not."""
    a, e = normal(37, 24), normal(37, 24, seed=1)
    whole = float((a - e).square().sum())
    for block, kept in ((1 << 18, 1 << 22), (24 * 5, 1 << 22), (24 * 5, 0)):
        monkeypatch.setattr("harness.metrics.real._BLOCK_ELEMENTS", block)
        monkeypatch.setattr("harness.metrics.real._KEPT_ELEMENTS", kept)
        sums = errors_of(actual=[a, e], expected=e, groups=4)
        assert float(sums.error[0].sum()) == pytest.approx(whole)
        assert float(sums.error[1].sum()) == 0
        assert float(sums.column[0].sum()) == pytest.approx(whole)
        assert torch.allclose(sums.product[0, :, 1], ((a - e) * e)[:, 6:12].sum(dim=1))
        assert torch.allclose(sums.signal[:, 1], e[:, 6:12].square().sum(dim=1))


def test_nan_propagates() -> None:
    """A NaN anywhere makes every aggregate NaN."""
    a = normal(4, 4)
    a[2, 1] = math.nan
    assert math.isnan(errors_of(actual=[a], expected=normal(4, 4)).error.sum())
    assert math.isnan(max_abs_error(actual=a, expected=normal(4, 4)))


def test_accumulation_is_wide() -> None:
    """Many small squares are not lost beside a large one, as they would be in float32."""
    a = torch.full((1, 200_000), 1e-4, dtype=torch.float32)
    a[0, 0] = 100.0
    assert float(errors_of(actual=[a], expected=torch.zeros_like(a)).error) == pytest.approx(
        1e4 + 199_999e-8, rel=1e-12
    )


def test_mismatches_compare_values_not_bytes() -> None:
    """Minus zero equals zero, NaN equals nothing, and other shapes are refused."""
    assert mismatches(actual=torch.tensor([-0.0, 1.0]), expected=torch.tensor([0.0, 1.0])) == 0
    assert mismatches(actual=torch.tensor([math.nan]), expected=torch.tensor([math.nan])) == 1
    with pytest.raises(ValueError, match="equal shapes"):
        mismatches(actual=torch.zeros(2), expected=torch.zeros(3))


def test_what_is_measured_stays_as_it_is() -> None:
    """Sums of squares never write into their input, in no precision (a float64 oracle needs no widening copy)."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        value = torch.arange(6, dtype=dtype).reshape(2, 3)
        kept = value.clone()
        errors_of(actual=[value], expected=value, dtype=torch.bfloat16, groups=3)
        assert torch.equal(value, kept)


@pytest.mark.parametrize("expected_in", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_sums_in_float32_lose_nothing_that_matters(scale: float, expected_in: torch.dtype) -> None:
    """Sums over float32 rows of any magnitude are those of float64: of errors, signal and rounding, weighted or not."""
    e = (normal(24, 96) * scale).to(expected_in)
    a = (e * (1 + 1e-3 * normal(24, 96, seed=1))).float()
    weight = normal(24, seed=2).square() / scale**2
    narrow = errors_of(actual=[a], expected=e, dtype=torch.bfloat16, groups=8, weigh=lambda *_: weight)
    wide = errors_of(actual=[a.double()], expected=e.double(), dtype=torch.bfloat16, groups=8,
                     weigh=lambda *_: weight)  # fmt: skip
    assert narrow.narrow == (1e-10 < scale < 1e13)
    for name in ("error", "signal", "rounding", "column"):
        assert torch.allclose(getattr(narrow, name), getattr(wide, name), rtol=2e-6, atol=0)
    size = (wide.error[:, :, None] * wide.signal).sqrt()
    assert float(((narrow.product - wide.product) / size).abs().max()) < 2e-6


def test_a_square_that_overflows_float32_is_still_a_number() -> None:
    """A finite value whose square float32 cannot hold gives a finite sum; an infinite one an infinite sum."""
    e, a = torch.ones(4, 8), torch.ones(4, 8)
    a[1, 2] = 1e25
    assert float(errors_of(actual=[a], expected=e).error.sum()) == pytest.approx(1e50, rel=1e-5)
    a[1, 2] = math.inf
    assert float(errors_of(actual=[a], expected=e).error.sum()) == math.inf
