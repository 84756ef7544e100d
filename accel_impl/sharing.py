"""What requests of one cache share, as the harness asks for it: prefixes, steps taken back, steps in one call.

Knows slots; the work is done by `accel_impl.reuse` and the store. Must not know layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from torch import Tensor

from accel_impl.reuse import Reuse
from accel_impl.speculate import generated
from accel_impl.store import Kept
from harness.adapter import Inputs, Recorder, TokenIds
from harness.errors import PortError
from harness.types import Facts

if TYPE_CHECKING:
    from accel_impl.port import AccelAdapter


class Sharing:
    """The capabilities `resumes`, `rewinds`, `drafts` and `batches` of the port (`harness.adapter`)."""

    _reuse: Reuse | None = None

    @property
    def _port(self) -> AccelAdapter:
        return cast("AccelAdapter", self)

    def reuse(self) -> Reuse:
        """Return what is kept of ended requests, empty where the cache is new."""
        if self._reuse is None or self._reuse.memory is not self._port.memory_in_use():
            options = self._port.options
            self._reuse = Reuse(self._port, snapshots=int(options["snapshots"]), stride=int(options["stride"]))
        return self._reuse

    # ---- resumes

    def resume(self, inputs: Inputs) -> tuple[int, int]:
        """Take a slot; return it, and how many of the request's first tokens it holds already."""
        return self.reuse().resume(inputs)

    def keep(self, slot: int, inputs: Inputs) -> None:
        """Let later requests take up what a slot holds now."""
        self.reuse().keep(slot, inputs, due=False)

    def forget(self) -> None:
        """Give up all that was kept."""
        self.reuse().forget()

    # ---- rewinds

    def mark(self, slot: int) -> Kept:
        """Return how far a slot is, and its states."""
        return self._port.memory_in_use().snapshot(slot)

    def rewind(self, slot: int, mark: Kept) -> None:
        """Go back to where a slot was."""
        self._port.memory_in_use().restore(slot, mark)

    # ---- drafts

    def speculate(self, inputs: Inputs, max_new_tokens: int, drafts: int) -> tuple[TokenIds, Facts]:
        """Generate with drafts; how many were made, and how many were right."""
        return generated(self._port, inputs, max_new_tokens, drafts)

    # ---- batches

    def step_together(
        self, slots: Sequence[int], inputs: Sequence[Inputs], starts: Sequence[int], record: Recorder, seen: int
    ) -> Tensor:
        """Process one more token of each slot in one call, the request number `seen` recorded as if it were alone."""
        lengths = [self._port.memory_in_use().pages.lengths[slot] for slot in slots]
        if lengths != list(starts):
            raise PortError(f"expected steps from {lengths} on in slots {list(slots)}, found {list(starts)}")
        tokens = [int(one.token_ids[0, start]) for one, start in zip(inputs, starts, strict=True)]
        totals = [one.token_ids.shape[-1] for one in inputs]
        row = OneRequest(record, seen, totals[seen])
        return self._port.decode_together(slots, tokens, record=row, total=max(totals)).logits


class OneRequest:
    """The recorder of one request among several: its row is recorded, and overwritten where the recorder says so."""

    def __init__(self, record: Recorder, row: int, total: int) -> None:
        """Record row `row` of each tensor; keys beyond `total` belong to longer requests."""
        self._record, self._row, self._total = record, row, total

    def __call__(self, tap: str, tensor: Tensor, *, dims: str = "", kind: str = "") -> Tensor:
        """Record the row; return all rows, this one as it came back."""
        width = self._total if dims.endswith("key") else tensor.shape[-1]
        own = tensor[self._row : self._row + 1, ..., :width]
        given = self._record(tap, own, dims=dims, kind=kind)
        if given is own:
            return tensor
        together = tensor.clone()
        together[self._row, ..., :width] = given[0]
        return together
