"""Recordings of several ranks become one trace."""

from __future__ import annotations

import pytest
import torch

from harness.errors import TraceError
from harness.golden import merge_ranks
from harness.types import Case, Run, Setup, Tap, Trace

CASE = Case(id="r", token_ids=(1, 2, 3))


def rank(number: int, tensors: dict, *, tp: int = 2, pp: int = 1, shards: dict | None = None, **facts) -> Trace:
    return Trace(
        setup=Setup(side="accel", role="accel", adapter="dropin"),
        run=Run(id="recorded/r", stage="text", kind="forward", case=facts.pop("case", CASE)),
        taps={name: Tap(name=name, dims=("token", "feature")) for name in tensors},
        tensors=tensors,
        facts={"rank": number, "layout": {"tp": tp, "pp": pp}, "shards": shards or {}, **facts},
    )


def test_shards_are_put_together_and_sums_summed():
    """A tensor cut along its last axis is concatenated in rank order, partial sums are added, equal ones taken once."""
    whole = torch.randn(3, 8)
    parts = [whole[:, :4], whole[:, 4:]]
    sides = [
        rank(i, {"q": parts[i], "o": torch.full((3, 2), i + 1.0), "h": whole}, shards={"q": -1, "o": "sum"})
        for i in range(2)
    ]
    merged = merge_ranks(sides, place="here")
    assert torch.equal(merged.tensors["q"], whole)
    assert torch.equal(merged.tensors["o"], torch.full((3, 2), 3.0))
    assert torch.equal(merged.tensors["h"], whole)


def test_stages_of_a_pipeline_are_joined_in_order():
    """What only one stage has is taken from there; the order is that of the stages, whatever the order of files."""
    sides = [
        rank(1, {"layers.1": torch.ones(3, 2)}, tp=1, pp=2),
        rank(0, {"layers.0": torch.zeros(3, 2)}, tp=1, pp=2),
    ]
    assert list(merge_ranks(sides, place="here").tensors) == ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("apart", "'h' in here differs between ranks 0 .* and 1"),
        ("missing rank", "found no recording of rank 1"),
        ("missing part", "expected 'q' of each of 2 tensor-parallel ranks"),
        ("shape", "the parts of 'q' in here do not fit"),
        ("other request", "rank 1 in here recorded another request"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(change, said):
    """A replicated tensor that differs, a rank, a part or a shape that does not fit, another request: TraceError."""
    first = rank(0, {"q": torch.ones(3, 4), "h": torch.ones(3, 2)}, shards={"q": -1})
    other = {"q": torch.ones(3, 4), "h": torch.ones(3, 2)}
    case = CASE
    if change == "apart":
        other["h"] = other["h"] + 1
    elif change == "missing part":
        del other["q"]
    elif change == "shape":
        other["q"] = torch.ones(4, 4)
    elif change == "other request":
        case = Case(id="s", token_ids=(9,))
    second = rank(1, other, shards={"q": -1}, case=case)
    with pytest.raises(TraceError, match=said):
        merge_ranks([first] if change == "missing rank" else [first, second], place="here")
