"""What honest runs differ by along an error, as a share of theirs."""

import math

import pytest
import torch
from torch import Tensor

from harness.metrics import shared
from harness.metrics.shared import shared_of

ROWS, WIDTH = 400, 64


def noise(seed: int, *shape: int) -> Tensor:
    """Return seeded float64 noise."""
    return torch.randn(*(shape or (ROWS, WIDTH)), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def told(own: Tensor, honest: list[Tensor]) -> Tensor:
    """Return the shares of all rows, errors given."""
    expected = noise(99)
    return shared_of(
        actual=expected + own, honest=[expected + e for e in honest], expected=expected, rows=torch.arange(ROWS)
    )


@pytest.mark.parametrize("sides", [2, 3, 12])
def test_independent_errors_share_one_in_n(sides: int) -> None:
    """Of n independent numbers one n-th lies along another error on average, however many runs are seen."""
    honest = [noise(s) for s in range(1, 1 + sides)]
    assert float(told(noise(50), honest).mean()) == pytest.approx(1 / WIDTH, rel=0.15)


def test_one_factor_shares_nearly_all() -> None:
    """Errors that are one number times a pattern share what is not their mean, at any size of the number."""
    pattern = noise(7)
    honest = [pattern * size for size in (1.0, -1.0, 0.0)]
    assert told(30 * pattern, honest) == pytest.approx(torch.full((ROWS,), 1.5).double())
    assert float(told(noise(8), honest).mean()) < 0.05


def test_what_is_common_does_not_count() -> None:
    """Equal honest errors share nothing but rounding, whatever the port's is."""
    assert float(told(noise(8), [noise(1)] * 3).max()) < 1e-20


def test_blocks_and_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows, a few at a time, read as they do among all; one that is not finite is NaN and no other."""
    expected, own, honest = noise(99), noise(50), [noise(s) for s in (1, 2, 3)]
    own[5, 3] = math.nan
    whole = told(own, honest)
    assert whole.isnan().nonzero().reshape(-1).tolist() == [5]
    monkeypatch.setattr(shared, "_BLOCK_ELEMENTS", 3 * WIDTH)
    rows = torch.tensor([2, 5, 6, 7, 100, 399, 17])
    some = shared_of(actual=expected + own, honest=[expected + e for e in honest], expected=expected, rows=rows)
    assert torch.equal(some, whole[rows]) or torch.allclose(some, whole[rows], equal_nan=True, rtol=1e-12)
