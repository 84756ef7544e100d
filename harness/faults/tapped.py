"""An adapter that hands other values to its recorder than it computed. Knows the protocol; must not know ports.

A port goes on with what its recorder returns, so a change there is a change of the port: before the recorder sees a
value (`made`: the unit computes it wrongly), or after it (`handed`: the right value reaches the wrong place).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from harness.adapter import Inputs, Recorder, Weight
from harness.faults.catalogue import NoPlace
from harness.types import Tap


@dataclass(slots=True)
class Call:
    """What is running: tokens [start, stop), in which request since the port was opened (from 1; 0 without a cache)."""

    start: int = 0
    stop: int = 0
    request: int = 0

    @property
    def rows(self) -> int:
        """Tokens of this call."""
        return self.stop - self.start


Change = Callable[[Tensor, Call], Tensor]


class Tapped:
    """Places in any adapter, by the taps that a reference of it has. `taps` are in execution order."""

    def __init__(self, adapter: Any, taps: Mapping[str, Tap]) -> None:
        self.adapter, self.taps = adapter, taps
        self.call = Call()
        self._requests = 0
        self._made: dict[str, Change] = {}
        self._handed: dict[str, Change] = {}
        self._inputs: Callable[[Inputs, Call], Inputs] = lambda inputs, _: inputs
        self._around()

    # --- places ---

    def find(self, pattern: str) -> str:
        """Return a tap whose name matches, in the third layer if there is one there, else the last one."""
        found = [name for name in self.taps if re.search(pattern, name)]
        if not found:
            raise NoPlace(f"no tap here is called {pattern}")
        return next((n for n in found if n.startswith(("layers.2.", "layers.2"))), found[-1])

    def axis(self, tap: str, name: str) -> int:
        """Return the axis of a tap by its name."""
        dims = self.taps[tap].dims
        if name not in dims:
            raise NoPlace(f"{tap} has no axis {name}")
        return dims.index(name)

    # --- ways ---

    def made(self, tap: str, change: Change) -> None:
        """Change what a unit computes."""
        self._made[tap] = change

    def handed(self, tap: str, change: Change) -> None:
        """Change what goes on to the units behind, after it was recorded."""
        self._handed[tap] = change

    def inputs(self, change: Callable[[Inputs, Call], Inputs]) -> None:
        """Change the inputs of every call."""
        self._inputs = change

    def weights(self, change: Callable[[Weight], Weight]) -> None:
        """Change what memory is said to hold."""
        told = self.adapter.weights

        def weights() -> Iterator[Weight]:
            return (change(weight) for weight in told())

        self.adapter.weights = weights

    # --- inside ---

    def _around(self) -> None:
        """Put a recorder of our own between the port and whoever listens."""
        adapter = self.adapter
        prepare, forward = adapter.prepare, adapter.forward

        def prepared(case: Any, record: Recorder) -> Inputs:
            return prepare(case, self._recorder(record))  # type: ignore[no-any-return]

        def whole(inputs: Inputs, record: Recorder) -> Tensor:
            self.call.start, self.call.stop, self.call.request = 0, int(inputs.token_ids.shape[-1]), 0
            return forward(self._inputs(inputs, self.call), self._recorder(record))  # type: ignore[no-any-return]

        adapter.prepare, adapter.forward = prepared, whole
        if not hasattr(adapter, "step"):
            return
        open_, step = adapter.open, adapter.step

        def opened() -> int:
            self._requests += 1
            return int(open_())

        def stepped(slot: int, inputs: Inputs, start: int, stop: int, record: Recorder) -> Tensor:
            self.call.start, self.call.stop, self.call.request = start, stop, self._requests
            return step(slot, self._inputs(inputs, self.call), start, stop, self._recorder(record))  # type: ignore[no-any-return]

        adapter.open, adapter.step = opened, stepped

    def _recorder(self, record: Recorder) -> Recorder:
        def recorded(tap: str, tensor: Tensor, *, dims: str = "", kind: str = "") -> Tensor:
            if tap in self._made:
                tensor = self._made[tap](tensor, self.call)
            given = record(tap, tensor, dims=dims, kind=kind)
            return self._handed[tap](given, self.call) if tap in self._handed else given

        return recorded


def renamed(weight: Weight, tensor: Tensor) -> Weight:
    """Return a weight with another value."""
    return dataclasses.replace(weight, tensor=tensor)
