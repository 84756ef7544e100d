"""Hooks on a module: which place a call of a unit is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harness.adapters.hooks import Taps
from harness.adapters.structure import Structure


class Tables(nn.Module):
    """Tables for several kinds of layers; a weight of its own only where it has one."""

    def __init__(self, *, weight: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1)) if weight else None

    def forward(self, x: Tensor, kind: str) -> Tensor:
        """Return one table."""
        return x * len(kind)


class Model(nn.Module):
    """Makes its tables in any order."""

    def __init__(self, order: tuple[str, ...], *, weight: bool = False) -> None:
        super().__init__()
        self.rope, self.order = Tables(weight=weight), order

    def forward(self, x: Tensor) -> None:
        """Make the tables."""
        for kind in self.order:
            self.rope(x + 0, kind)


def seen(model: Model) -> dict[str, float]:
    """Return what is recorded by tap."""
    heard: dict[str, float] = {}

    def record(tap: str, value: Tensor, **_: object) -> Tensor:
        heard[tap] = float(value[0, 0])
        return value

    taps = Taps(model, Structure(names={"rope": "rotary_emb"}), observable=lambda _: True)
    with taps.listening(record, tokens=3, decisions=False):
        model(torch.ones(3, 2))
    return heard


def test_a_call_that_is_told_by_a_word_is_a_place_of_its_own():
    """Tables of several kinds have the same names in whichever order they are made; other calls are counted."""
    orders = [seen(Model(order)) for order in (("full", "sliding"), ("sliding", "full"))]
    assert orders[0] == orders[1]
    assert orders[0]["rotary_emb.full"] == 4
    assert orders[0]["rotary_emb.sliding"] == 7
    assert "rotary_emb.call1" in seen(Model(("full", "sliding"), weight=True))
