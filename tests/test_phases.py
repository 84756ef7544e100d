from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from harness.adapter import Inputs, Recorder, silent
from harness.errors import PortError
from harness.phases import Walk, walked
from harness.recorder import TraceRecorder
from harness.types import Case, Run

IDS = tuple(7 * n % 23 for n in range(24))
CHUNKS = ((0, 9), (9, 15), (15, 19), (19, 24))
STEPS = ((0, 14), *((n, n + 1) for n in range(14, 24)))
OTHER, OTHERS = [3, 1, 2], [[5] * 13, [6] * 40]


class Toy:
    """A port whose logits are the sum of all tokens of a slot so far, over the last ones that it still has."""

    def __init__(self) -> None:
        self.slots: dict[int, list[int]] = {}
        self.kept: list[list[int]] = []

    def prepare(self, case: Case, record: Recorder) -> Inputs:
        return Inputs(token_ids=torch.tensor([case.token_ids]))

    def open(self) -> int:
        slot = next(n for n in range(9) if n not in self.slots)
        self.slots[slot] = []
        return slot

    def step(self, slot: int, inputs: Inputs, start: int, stop: int, record: Recorder) -> torch.Tensor:
        held = self.slots[slot]
        assert len(held) == start
        sums = []
        for token in inputs.token_ids[0, start:stop].tolist():
            held.append(token)
            sums.append(sum(held))
        return record("logits", torch.tensor(sums, dtype=torch.float32)[None, :, None], dims="batch token vocab")

    def free(self, slot: int) -> None:
        del self.slots[slot]

    def resume(self, inputs: Inputs) -> tuple[int, int]:
        slot, ids = self.open(), inputs.token_ids[0].tolist()
        fits = [kept for kept in self.kept if kept == ids[: len(kept)] and len(kept) < len(ids)]
        self.slots[slot] = self.taken(max(fits, key=len, default=[]))
        return slot, len(self.slots[slot])

    def taken(self, kept: list[int]) -> list[int]:
        return list(kept)

    def keep(self, slot: int, inputs: Inputs) -> None:
        self.kept.append(list(self.slots[slot]))

    def forget(self) -> None:
        self.kept.clear()

    def mark(self, slot: int) -> list[int]:
        return list(self.slots[slot])

    def rewind(self, slot: int, mark: list[int]) -> None:
        self.slots[slot] = mark

    def step_together(
        self, slots: Sequence[int], inputs: Sequence[Inputs], starts: Sequence[int], record: Recorder, seen: int
    ) -> torch.Tensor:
        told = [record if number == seen else silent for number in range(len(slots))]
        each = zip(slots, inputs, starts, told, strict=True)
        return torch.cat([self.step(slot, one, at, at + 1, to) for slot, one, at, to in each])


class Coarse(Toy):
    """Takes up whole fours of tokens only: no fault."""

    def taken(self, kept: list[int]) -> list[int]:
        return kept[: len(kept) // 4 * 4]


class Aliased(Toy):
    """Requests that take up the same prefix write what follows to the same page."""

    def __init__(self) -> None:
        super().__init__()
        self.page: dict[int, int] = {}

    def step(self, slot: int, inputs: Inputs, start: int, stop: int, record: Recorder) -> torch.Tensor:
        held = self.slots[slot]
        held[:] = [self.page.get(place, token) for place, token in enumerate(held)]
        out = super().step(slot, inputs, start, stop, record)
        if self.kept:
            self.page.update({place: held[place] for place in range(max(start, 15), stop)})
        return out


class Emptied(Toy):
    """Takes up the places of a prefix, but not what they held."""

    def taken(self, kept: list[int]) -> list[int]:
        return [0] * len(kept)


class Forgetful(Toy):
    """Takes tokens back by place, but not what became of them."""

    def rewind(self, slot: int, mark: list[int]) -> None:
        held = self.slots[slot]
        mark[-1] += sum(held) - sum(mark)
        self.slots[slot] = mark


class Mixed(Toy):
    """Decodes several requests with the memory of the first."""

    def step_together(self, slots: Sequence[int], *how: Any) -> torch.Tensor:
        self.slots[slots[1]][0] = self.slots[slots[0]][0]
        return super().step_together(slots, *how)


def recorded(port: Any, way: str, spans: Sequence[tuple[int, int]], **options: Any) -> tuple[list[float], Any]:
    case = Case(id="c", token_ids=IDS)
    run = Run(id="r", stage="text", kind="steps", case=case, steps=tuple(spans), options={"walk": way, **options})
    recorder = TraceRecorder()
    walk = Walk(port=port, run=run, inputs=port.prepare(case, silent), recorder=recorder, wait=lambda: None)
    facts = walked(walk, spans)
    assert not port.slots
    assert len(walk.seconds) == len(spans)
    return recorder.tensors()["logits"].flatten().tolist(), facts


WALKS = {
    "prefix": (CHUNKS, {"other": OTHER}),
    "rewound": (STEPS, {"other": OTHER}),
    "together": (STEPS, {"others": OTHERS}),
}
EXPECTED = [float(sum(IDS[: n + 1])) for n in range(len(IDS))]


@pytest.mark.parametrize("way", WALKS)
def test_every_walk_records_the_request_alone(way: str) -> None:
    """Whatever the port does in between, each token is recorded once, in order, as plain steps have it."""
    spans, options = WALKS[way]
    assert recorded(Toy(), "", spans)[0] == EXPECTED
    found, facts = recorded(Toy(), way, spans, **options)
    assert found == EXPECTED
    assert facts in ({"resumed_tokens": 15}, {"rewound_steps": 5}, {"steps_together": 10})


def test_a_port_that_takes_up_less_is_right_too() -> None:
    """What is missing of a prefix is computed once more, and told by the tokens that were there."""
    found, facts = recorded(Coarse(), "prefix", CHUNKS, other=OTHER)
    assert found == EXPECTED
    assert facts == {"resumed_tokens": 12}


@pytest.mark.parametrize(
    ("port", "way", "first"),
    [(Aliased, "prefix", 19), (Emptied, "prefix", 15), (Forgetful, "rewound", 14), (Mixed, "together", 14)],
)
def test_what_requests_do_to_each_other_is_seen(port: type[Toy], way: str, first: int) -> None:
    """A shared page, an empty prefix, states that stay, mixed rows: wrong from where it can first be seen."""
    spans, options = WALKS[way]
    found, _ = recorded(port(), way, spans, **options)
    assert found[:first] == EXPECTED[:first]
    assert found[first:] != EXPECTED[first:]


def test_a_port_that_forgets_nothing_is_told_so() -> None:
    """A prefix that is there after forget() is the port's error, not a hit."""
    port = Toy()
    port.kept.append(list(IDS[:8]))
    port.forget = lambda: None  # type: ignore[method-assign]
    with pytest.raises(PortError, match="nothing to be there after forget"):
        recorded(port, "prefix", CHUNKS, other=OTHER)
