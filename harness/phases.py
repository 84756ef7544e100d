"""How a request walks through a cache beside step after step: begun as an earlier one, taken back, among others.

Knows the capabilities of a port that a run of steps may need (checked by the caller); must not know limits or files.
The reference walks each of these as plain steps: whatever a port does in between, one oracle answers all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from harness.adapter import Inputs, Recorder, silent
from harness.errors import PortError
from harness.recorder import TraceRecorder
from harness.types import Case, Facts, Run

MOST_WRONG = 3
"""Tokens of a step that is taken back, at most: one more each time, then one again."""
NEEDS = {"prefix": "resumes", "rewound": "rewinds", "together": "batches"}
"""Walks (`Run.options["walk"]`) and the capability that each needs beside `phases`."""


@dataclass(kw_only=True)
class Walk:
    """A request on its way. `wait` returns when the device has done what it was told."""

    port: Any
    run: Run
    inputs: Inputs
    recorder: TraceRecorder
    wait: Callable[[], None]
    seconds: list[float] = field(default_factory=list)
    done: int = 0

    @property
    def record(self) -> Recorder:
        """What the port is given."""
        return self.recorder if self.run.observe else silent

    def step(self, slot: int, start: int, stop: int) -> None:
        """Take a step of the run in a slot."""
        self.told(start, stop, lambda: self.port.step(slot, self.inputs, start, stop, self.record))

    def told(self, start: int, stop: int, act: Callable[[], Tensor]) -> None:
        """Time what gives the logits of tokens [start, stop); record them if the port did not."""
        self.recorder.span(start, stop)
        begin = time.perf_counter()
        logits = act()
        self.wait()
        self.seconds.append(time.perf_counter() - begin)
        self.done += stop - start
        if self.recorder.tokens("logits") < self.done:
            self.recorder("logits", logits, dims="batch token vocab", kind="logits")

    def otherwise(self, length: int, others: Sequence[int]) -> Inputs:
        """Return the first `length` tokens of the request and others after them."""
        ids = [int(i) for i in self.inputs.token_ids.reshape(-1)[:length]]
        inputs: Inputs = self.port.prepare(Case(id="otherwise", token_ids=(*ids, *others)), silent)
        return inputs


def walked(walk: Walk, spans: Sequence[tuple[int, int]]) -> Facts:
    """Take all steps of a run in the way that it asks for, and return what that showed."""
    way = str(walk.run.options.get("walk", ""))
    ways = {"": _plain, "prefix": _prefix, "rewound": _rewound, "together": _together}
    return ways[way](walk, spans)


def _plain(walk: Walk, spans: Sequence[tuple[int, int]]) -> Facts:
    """Step after step, in a slot that another request has used where the run says so."""
    slot = walk.port.open()
    if walk.run.before:
        earlier = Inputs(token_ids=walk.inputs.token_ids.new_tensor([walk.run.before]))
        walk.port.step(slot, earlier, 0, len(walk.run.before), silent)
        walk.port.free(slot)
        slot = walk.port.open()
    for start, stop in spans:
        walk.step(slot, start, stop)
    walk.port.free(slot)
    return {}


def _prefix(walk: Walk, spans: Sequence[tuple[int, int]]) -> Facts:
    """Take up what an earlier request left, while a third one that takes up the same goes on otherwise.

    The earlier one walks to the beginning of the last step but one, and goes on otherwise from there. Where the port
    has less than that, what is missing is computed once more, as pinned as the first time.
    """
    port, others, first = walk.port, [int(i) for i in walk.run.options["other"]], spans[-2][0]
    port.forget()
    slot, there = port.resume(walk.inputs)
    if there:
        raise PortError(f"expected nothing to be there after forget(), found {there} tokens of the request")
    for start, stop in spans[:-2]:
        walk.step(slot, start, stop)
        port.keep(slot, walk.inputs)
    _goes_on(walk, slot, first, first, others)
    slot, there = port.resume(walk.inputs)
    if there > first:
        raise PortError(f"expected at most the {first} tokens that an earlier request had, found {there}")
    if there < first:
        missing = TraceRecorder(pins=walk.recorder.pins)
        missing.span(there, first)
        port.step(slot, walk.inputs, there, first, missing)
    walk.step(slot, *spans[-2])
    third, begun = port.resume(walk.otherwise(first, others[::-1]))
    _goes_on(walk, third, begun, first, others[::-1])
    walk.step(slot, *spans[-1])
    port.free(slot)
    port.forget()
    return {"resumed_tokens": there}


def _goes_on(walk: Walk, slot: int, start: int, first: int, others: Sequence[int]) -> None:
    """Let a request that holds `start` tokens go on with other ones from `first` on, and end."""
    inputs = walk.otherwise(first, others)
    walk.port.step(slot, inputs, start, first + len(others), silent)
    walk.port.keep(slot, inputs)
    walk.port.free(slot)


def _rewound(walk: Walk, spans: Sequence[tuple[int, int]]) -> Facts:
    """Before every second step take one of wrong tokens, and take it back."""
    port, others = walk.port, [int(i) for i in walk.run.options["other"]]
    slot, count = port.open(), 0
    for number, (start, stop) in enumerate(spans):
        if start and number % 2:
            length = 1 + count % MOST_WRONG
            mark = port.mark(slot)
            port.step(slot, walk.otherwise(start, others[:length]), start, start + length, silent)
            port.rewind(slot, mark)
            count += 1
        walk.step(slot, start, stop)
    port.free(slot)
    return {"rewound_steps": count}


def _together(walk: Walk, spans: Sequence[tuple[int, int]]) -> Facts:
    """Decode beside a shorter and a longer request, all in one call, the request itself between them."""
    port, others = walk.port, walk.run.options["others"]
    steps = sum(stop - start == 1 and start > 0 for start, stop in spans)
    beside = [walk.otherwise(0, ids) for ids in others]
    starts = [inputs.token_ids.shape[-1] - steps for inputs in beside]
    slots = [port.open() for _ in range(len(beside) + 1)]
    for slot, inputs, start in zip(slots[1:], beside, starts, strict=True):
        port.step(slot, inputs, 0, start, silent)
    order = [slots[1], slots[0], *slots[2:]]
    asked, count = [beside[0], walk.inputs, *beside[1:]], 0
    for start, stop in spans:
        if stop - start != 1 or not start:
            walk.step(slots[0], start, stop)
            continue
        places = [starts[0] + count, start, *(at + count for at in starts[1:])]

        def act(places: list[int] = places) -> Tensor:
            logits: Tensor = port.step_together(order, asked, places, walk.record, 1)
            return logits[1:2]

        walk.told(start, stop, act)
        count += 1
    for slot in slots:
        port.free(slot)
    return {"steps_together": count}
