"""One step of requests side by side over pages and states: what a model reads and writes. Must not know the model.

    memory = Memory(pages, states)
    slot = memory.open()                     # pages counted, states reset
    store = SlotStore(memory, [slot], [start], count)
    ... model.run(step, store, record) ...
    kept = memory.snapshot(slot); ...; memory.restore(slot, kept)      # speculation that was not accepted
    memory.free(slot)

Legend: B slots of this step, T tokens of each, S tokens of the longest so far, M picture rows, N rows of a pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accel_impl.cache import PagedCache
from accel_impl.states import Snapshot, StateCache
from harness.errors import PortError

NEVER = 1 << 62
"""The place of a picture row that is not there: no token comes after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A request at one moment: how many tokens it had, and its states."""

    length: int
    states: Snapshot


class Memory:
    """Pages and states of all slots, opened, freed and moved together."""

    def __init__(self, pages: PagedCache, states: StateCache) -> None:
        self.pages, self.states = pages, states
        self.picture_places: dict[int, Tensor] = {}

    def open(self) -> int:
        """Take a slot and reset its states. Raises CacheFull if none is free."""
        slot = self.pages.open()
        self.states.reset(slot)
        self.picture_places[slot] = torch.empty(0, dtype=torch.int64)
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back."""
        self.pages.free(slot)
        del self.picture_places[slot]

    def add_pictures(self, slot: int, places_M: Tensor) -> None:
        """Make room for rows of pictures that stand at these places of the request."""
        self.pages.add_pictures(slot, len(places_M))
        self.picture_places[slot] = places_M.cpu()

    def adopt(
        self, slot: int, pages: Sequence[int], states: Snapshot, pictures: Sequence[int], places_M: Tensor
    ) -> None:
        """Begin a request with whole pages and the states at their end, as another request left them."""
        self.pages.adopt(slot, pages, pictures)
        self.states.restore(slot, states)
        self.picture_places[slot] = places_M.cpu()

    def snapshot(self, slot: int) -> Kept:
        """Note how far a request is, and copy its states."""
        self.pages.check(slot)
        return Kept(length=self.pages.lengths[slot], states=self.states.snapshot(slot))

    def restore(self, slot: int, kept: Kept) -> None:
        """Go back to where a request was: later tokens are forgotten."""
        self.pages.truncate(slot, kept.length)
        self.states.restore(slot, kept.states)

    def swap(self, slot: int, other: int) -> None:
        """Let two slots change places, open or not; requests go on under the other number."""
        pages = self.pages
        for table in (pages.block_tables, pages.picture_tables, pages.lengths, self.picture_places):
            one, two = table.pop(slot, None), table.pop(other, None)  # type: ignore[attr-defined]
            table.update({n: v for n, v in ((slot, two), (other, one)) if v is not None})  # type: ignore[attr-defined]
        names = {slot: other, other: slot}
        pages.free_slots = [names.get(s, s) for s in pages.free_slots]
        self.states.permute([names.get(s, s) for s in range(self.states.slots)])

    @property
    def nbytes(self) -> int:
        """Bytes of pages and states."""
        return self.pages.nbytes + self.states.nbytes

    def facts(self) -> dict[str, int]:
        """Return the accounting."""
        return {**self.pages.facts(), "bytes": self.nbytes, "state_bytes": self.states.nbytes}


class SlotStore:
    """One step of some slots: `count` tokens of each, from `starts` on.

    `sparse` asks for the decode path: one token each, after others.
    """

    def __init__(self, memory: Memory, slots: Sequence[int], starts: Sequence[int], count: int) -> None:
        if len(set(slots)) != len(slots) or len(slots) != len(starts) or count < 1:
            raise PortError(f"expected different slots, a start for each, and tokens; found {slots}, {starts}, {count}")
        for slot, start in zip(slots, starts, strict=True):
            memory.pages.extend(slot, start, start + count)
        self.memory, self.slots, self.starts, self.count = memory, list(slots), list(starts), count
        self.sparse = count == 1 and min(starts) > 0
        pages = memory.pages
        self.index_B = torch.tensor(self.slots, dtype=torch.int64, device=pages.device)
        self._new_BT = torch.stack([pages.rows(s, a, a + count) for s, a in zip(slots, starts, strict=True)])
        self._all_BS = _padded([pages.rows(s, 0, a + count) for s, a in zip(slots, starts, strict=True)], -1)

    @property
    def places(self) -> Tensor:
        """Return where the step's tokens stand in their requests [B, T], on the device."""
        places = torch.tensor(self.starts, dtype=torch.int64)[:, None] + torch.arange(self.count)
        return places.to(self.memory.pages.device)

    # ---- keys

    def put(self, layer: int, values: Mapping[str, Tensor]) -> None:
        """Write fields [B, T, width] of the step's tokens."""
        for field, value in values.items():
            self.memory.pages.write(layer, field, self._new_BT, value)

    def all(self, layer: int, field: str) -> Tensor:
        """Return a field of all tokens so far [B, S, width]; beyond a shorter request's end lies anything."""
        return self.memory.pages.read(layer, field, self._all_BS)

    def pool(self, layer: int, field: str) -> Tensor:
        """Return a field's whole pool [N, width]."""
        return self.memory.pages.pool(layer, field)

    def rows(self, places_BTK: Tensor) -> Tensor:
        """Return the rows of the pools at which tokens lie, by their places; -1 stays -1."""
        b = torch.arange(len(self.slots), device=places_BTK.device)[:, None, None]
        found = self._all_BS.to(places_BTK.device)[b, places_BTK.clamp(min=0)]
        return found.masked_fill(places_BTK < 0, -1)

    # ---- pictures

    def open_pictures(self, places_M: Tensor) -> None:
        """Make room for the rows of the pictures of the only request of this step."""
        if len(self.slots) != 1:
            raise PortError(f"expected a step of one request to bring pictures, found slots {self.slots}")
        self.memory.add_pictures(self.slots[0], places_M)

    @property
    def lacks_pictures(self) -> bool:
        """Say whether the only request of this step has no rows of pictures yet, of its own or taken up."""
        return not len(self.memory.picture_places[self.slots[0]])

    def put_pictures(self, layer: int, latent_ML: Tensor) -> None:
        """Write the keys of pictures: latents, and nothing where a key has its rotary part."""
        pages = self.memory.pages
        rows = pages.picture_rows(self.slots[0], len(latent_ML))
        pages.write(layer, "latent", rows, latent_ML)
        pages.write(layer, "rope", rows, latent_ML.new_zeros(len(rows), pages.pool(layer, "rope").shape[-1]))

    def pictures(self) -> tuple[Tensor, Tensor]:
        """Return rows of the pools and places [B, M] of picture rows, padded with -1 and NEVER."""
        places = [self.memory.picture_places[slot] for slot in self.slots]
        rows = [self.memory.pages.picture_rows(s, len(p)) for s, p in zip(self.slots, places, strict=True)]
        return _padded(rows, -1), _padded(places, NEVER).to(self.memory.pages.device)

    # ---- states

    def inputs(self, layer: int) -> Tensor:
        """Return the last inputs of a convolution [B, W, C]."""
        return self.memory.states.inputs[layer][self.index_B]

    def put_inputs(self, layer: int, values_BWC: Tensor) -> None:
        """Keep the last inputs of a convolution."""
        self.memory.states.inputs[layer][self.index_B] = values_BWC

    def memory_of(self, layer: int) -> Tensor:
        """Return the recurrent states of all slots [Z, H, K, V], which are changed in place at `index_B`."""
        return self.memory.states.memory[layer]

    def norm(self) -> Tensor:
        """Return the last `norm` of each request [B, F]."""
        return self.memory.states.norm[self.index_B]

    def put_norm(self, values_BF: Tensor) -> None:
        """Keep the last `norm` of each request."""
        self.memory.states.norm[self.index_B] = values_BF


def _padded(rows: Sequence[Tensor], value: int) -> Tensor:
    """Return rows of different lengths as one matrix, `value` behind the shorter ones."""
    longest = max(len(row) for row in rows)
    return torch.stack([torch.nn.functional.pad(row, (0, longest - len(row)), value=value) for row in rows])
