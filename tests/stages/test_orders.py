"""What changed places in a merged weight, in words; and nothing where nothing did."""

from __future__ import annotations

import json

import pytest

from harness.stages.orders import ascending, exchanged_words

EXPERTS = range(6)


def order(*names, stride=1, transposed=False, rows=8):
    streams = [[[n, 0, rows] for n in names[i::stride]] for i in range(stride)]
    return json.dumps({"transposed": transposed, "stride": stride, "streams": streams})


def expert(e, p):
    return f"model.layers.2.mlp.experts.{e}.{p}_proj.weight"


def by_turns(numbers=EXPERTS, parts=("gate", "up")):
    return [expert(e, p) for e in numbers for p in parts]


RIGHT = order(*by_turns())


@pytest.mark.parametrize(("found", "words"), [
    (RIGHT, ""),
    (order(*by_turns([0, 4, 2, 3, 1, 5])), "experts 1 and 4 exchanged"),
    (order(*by_turns([1, 2, 3, 4, 5, 0])), "experts shifted by 1"),
    (order(*by_turns([3, 5, 0, 1, 2, 4])), "experts in another order"),
    (order(*by_turns(parts=("up", "gate"))), "gate_proj and up_proj exchanged (everywhere)"),
    (order(*by_turns([0]), *by_turns([1], ("up", "gate")), *by_turns(range(2, 6))), "exchanged (in 2 of 12 places)"),
    (order(*by_turns(), transposed=True), "axes exchanged"),
    (order(*by_turns(), stride=2), "interleaved (row by row, by turns) where one belongs after the other"),
    (order(*[expert(e, p) for p in ("gate", "up") for e in EXPERTS]), "all of one before the other"),
    (order(*by_turns([0, 1, 1, 3, 4, 5])), "experts.1.gate_proj.weight in the place of"),
    (order(*by_turns(), rows=4), "another rank's slice"),
], ids=["right", "two", "shifted", "mixed", "parts", "one", "axes", "woven", "apart", "twice", "cut"])  # fmt: skip
def test_what_changed_places_is_told(found, words):
    """Experts, projections, axes, turns and slices in another order than the reference's have words of their own."""
    said = exchanged_words(found, RIGHT)
    assert words in said if words else said == ""


def test_numbers_ascend_where_no_reference_tells():
    """Without a reference, tensors that differ by a number belong in ascending order, ten after nine."""
    assert json.loads(ascending(RIGHT)) == json.loads(RIGHT)
    mixed = order(*by_turns([0, 10, 9]))
    assert exchanged_words(mixed, ascending(mixed)) == "experts 9 and 10 exchanged"
