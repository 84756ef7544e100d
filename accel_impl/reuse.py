"""Requests that begin as earlier ones did: their pages and states taken up instead of computed again.

Knows slots, pages and states; what a prefix is, `accel_impl.prefix` knows. Must not know layers.

    slot, done = reuse.resume(inputs)              # a slot that holds the first `done` tokens
    stop = reuse.stop(done, length, chunk)         # steps end where a snapshot is due
    port.step(slot, inputs, done, stop, record)
    reuse.keep(slot, inputs)                       # where one is due
    reuse.free(slot, inputs)                       # what is there is kept as well, to its last token
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accel_impl.cache import CacheFull
from accel_impl.prefix import Chain, Hit, PrefixIndex, picture_runs
from accel_impl.prepare import placeholders
from harness.adapter import Inputs
from harness.errors import PortError

if TYPE_CHECKING:
    from accel_impl.port import AccelAdapter


class Reuse:
    """The prefixes of one port. `stride` tokens lie between snapshots of states; `snapshots` 0 keeps nothing."""

    def __init__(self, port: AccelAdapter, *, snapshots: int, stride: int) -> None:
        self.port, self.memory, self.stride = port, port.memory_in_use(), stride
        self.index = PrefixIndex(self.memory.pages, snapshots=snapshots)
        self.memory.pages.reclaim, self.memory.pages.moved = self.index.reclaim, self.index.moved
        self._chains: dict[int, Chain] = {}

    def resume(self, inputs: Inputs, *, further: bool = True) -> tuple[int, int]:
        """Take a slot and put into it the longest beginning of the request that is there; return both.

        `further`: the layer for one more token runs, too. Raises CacheFull if no slot is free.
        """
        slot = self.port.open()
        vision, size = self.port.config.vision, self.memory.pages.page_tokens
        merge = vision.spatial_merge_size if vision is not None else 1
        runs = picture_runs(inputs, self.port.config.image_token_id, merge)
        self._chains[slot] = chain = Chain(b"further" if further else b"", size, runs)
        hit = self.index.find(chain, inputs)
        if hit is None:
            return slot, 0
        try:
            self._adopt(slot, hit, self._places(inputs), whole=all(first < hit.tokens for first, _, _ in runs))
        except CacheFull:
            self.free(slot)
            raise
        return slot, hit.tokens

    def stop(self, done: int, length: int, chunk: int) -> int:
        """Return where a step from `done` on ends: after at most `chunk` tokens, and where a snapshot is due.

        The last one is due before the last token, so that the same request can be taken up as well.
        """
        stop = min(length, done + chunk)
        due = min(stop, length - 1) // self.stride * self.stride
        return due if self.index.most_snapshots and done < due else stop

    def keep(self, slot: int, inputs: Inputs, *, due: bool = True) -> None:
        """Keep what a slot holds of a request: where a snapshot is due, or at any length.

        Raises PortError for a slot that `resume` did not give.
        """
        if slot not in self._chains:
            raise PortError(f"expected a slot that resume() gave, found {slot}; those are {sorted(self._chains)}")
        tokens = self.memory.pages.lengths[slot]
        wanted = 0 < tokens <= inputs.token_ids.shape[-1] and not (due and tokens % self.stride)
        if wanted and self.index.most_snapshots:
            self._put(slot, inputs, tokens)

    def free(self, slot: int, inputs: Inputs | None = None) -> None:
        """Give a slot back; what it holds of a request that is shown is kept."""
        if inputs is not None:
            self.keep(slot, inputs, due=False)
        self.port.free(slot)

    def ended(self, slot: int) -> None:
        """Know that a slot holds nothing any more."""
        self._chains.pop(slot, None)

    def forget(self) -> None:
        """Give up every page and snapshot that is kept."""
        self.index.clear()

    def facts(self) -> dict[str, int]:
        """Return what is kept and how often it helped."""
        return self.index.facts()

    def _adopt(self, slot: int, hit: Hit, places_M: Tensor, *, whole: bool) -> None:
        """Share full pages, copy a partial one, restore the states.

        The keys of pictures are shared if they are all there; if more pictures follow, the request writes its own.
        """
        pages, full = self.memory.pages, hit.tokens // self.memory.pages.page_tokens
        pages.hold([*hit.pages, *hit.beside])  # a copy below may have to reclaim pages: not these
        try:
            shared = hit.beside if whole else ()
            self.memory.adopt(slot, hit.pages[:full], hit.snapshot, shared, places_M if shared else places_M[:0])
            if full < len(hit.pages):
                pages.copy(slot, hit.pages[full], hit.tokens % pages.page_tokens)
        finally:
            pages.release([*hit.pages, *hit.beside])

    def _put(self, slot: int, inputs: Inputs, tokens: int) -> None:
        chain = self._chains[slot]
        if self.index.has(chain, inputs, tokens):
            return
        pages = self.memory.pages
        rows = int((self._places(inputs) < _begun(chain, tokens)).sum())
        beside = pages.picture_tables[slot][: -(-rows // pages.page_tokens)]
        states = self.memory.states.snapshot(slot)
        self.index.put(chain, inputs, tokens, pages.block_tables[slot], states, beside)

    def _places(self, inputs: Inputs) -> Tensor:
        """Return the places of placeholders, if the request has pictures."""
        if "pixel_values" not in inputs.extras:
            return torch.empty(0, dtype=torch.int64)
        return placeholders(inputs, self.port.config.image_token_id)


def _begun(chain: Chain, tokens: int) -> int:
    """Return the end of the last picture that begins before a prefix ends: all its keys belong to the prefix."""
    return max((end for first, end, _ in chain.pictures if first < tokens), default=0)
