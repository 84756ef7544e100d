"""Decisions as sets."""

import math

import torch

from harness.metrics.discrete import as_sets, margin_z, score_error, valid_candidates


def test_order_and_padding_do_not_change_a_set() -> None:
    """The same ids in another order, or with padding, are the same set; a repeated id makes it smaller."""
    sets = as_sets(torch.tensor([[2, 0, -1], [0, 2, -1], [2, 2, 0]]), candidates=4)
    assert torch.equal(sets.member[0], sets.member[1])
    assert sets.size.tolist() == [2, 2, 2]
    assert as_sets(torch.tensor([[1, 1, 1]]), candidates=4).size.tolist() == [1]


def test_ids_out_of_range_are_strays() -> None:
    """An id outside the candidates is counted, padding is not."""
    assert as_sets(torch.tensor([[7, -1, -3]]), candidates=4).strays.tolist() == [2]


def test_masked_scores_are_no_candidates() -> None:
    """-inf, NaN and a dtype's most negative values stand for masked, ordinary negative scores do not."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        scores = torch.tensor([-math.inf, math.nan, torch.finfo(dtype).min, -100.0, 0.0], dtype=dtype)
        assert valid_candidates(scores).tolist() == [False, False, False, True, True]


def test_margin_is_the_worst_exchange_in_units_of_uncertainty() -> None:
    """Dropping a 3 for a 1 with an uncertainty of 0.5 is z 4, whatever else was exchanged; equal sets are z 0."""
    scores = torch.tensor([[3.0, 1.0, 2.0, 2.9], [3.0, 1.0, 2.0, 2.9]])
    oracle = as_sets(torch.tensor([[0, 3], [0, 3]]), candidates=4).member
    accel = as_sets(torch.tensor([[1, 2], [3, 0]]), candidates=4).member
    z = margin_z(actual=accel, expected=oracle, scores=scores, uncertainty=torch.tensor([0.5, 0.5]))
    assert z.tolist() == [4.0, 0.0]


def test_a_tie_is_no_fault_even_without_uncertainty() -> None:
    """Exchanging equal scores is z 0; exchanging different ones where nothing is uncertain is infinite."""
    scores = torch.tensor([[1.0, 1.0], [1.0, 0.5]])
    oracle, accel = torch.tensor([[True, False]] * 2), torch.tensor([[False, True]] * 2)
    z = margin_z(actual=accel, expected=oracle, scores=scores, uncertainty=torch.zeros(2))
    assert z.tolist() == [0.0, math.inf]


def test_uncertainty_is_pooled_or_half_of_the_rows_largest() -> None:
    """A quiet row has the pooled error, a loud one half of its own largest; masked candidates count for nothing."""
    expected = torch.zeros(2, 4)
    actual = torch.tensor([[0.0, 0.0, 0.0, 9.0], [4.0, 0.0, 0.0, 0.0]])
    valid = torch.tensor([[True, True, True, False], [True, True, True, True]])
    error = score_error(actual=actual, expected=expected, valid=valid)
    assert error[0] == math.sqrt(16 / 7)
    assert error[1] == 2.0
