"""The paged cache: pages, block tables, slots and their accounting. Knows widths and lengths; must not know the model.

Legend: G pages, P tokens of a page, B batch (1), T queries, S keys, K chosen, L latent, R rotary, I indexer features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.errors import PortError

FIELDS = ("latent", "rope", "index")


class CacheFull(PortError):
    """No slot or page is free; the request can be tried again after another one ends."""


class PagedCache:
    """One pool of pages per layer and field, shared by all slots through their block tables.

    A page holds `page_tokens` tokens of every layer in `layers`. Freed pages are given again first, uncleared.
    """

    def __init__(
        self,
        *,
        layers: Sequence[int],
        widths: Mapping[str, int],
        pages: int,
        page_tokens: int,
        slots: int,
        dtype: torch.dtype,
    ) -> None:
        self.page_tokens, self.pages, self.slots = page_tokens, pages, slots
        self.pools = {
            (layer, field): torch.zeros(pages, page_tokens, widths[field], dtype=dtype)
            for layer in layers
            for field in FIELDS
        }
        self.free_pages = list(range(pages))
        self.free_slots = list(range(slots))
        self.block_tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def open(self) -> int:
        """Take a slot. Raises CacheFull if none is free."""
        if not self.free_slots:
            raise CacheFull(f"expected a free slot, found all {self.slots} taken; free one first")
        slot = self.free_slots.pop()
        self.block_tables[slot], self.lengths[slot] = [], 0
        return slot

    def extend(self, slot: int, start: int, stop: int) -> None:
        """Make room for tokens [start, stop) of a slot. Raises CacheFull, or PortError if `start` leaves a hole."""
        if slot not in self.block_tables:
            raise PortError(f"expected an open slot, found {slot}; open are {sorted(self.block_tables)}")
        if start != self.lengths[slot]:
            raise PortError(f"expected tokens from {self.lengths[slot]} on in slot {slot}, found a step from {start}")
        table = self.block_tables[slot]
        wanted = -(-stop // self.page_tokens) - len(table)
        if wanted > len(self.free_pages):
            raise CacheFull(
                f"expected {wanted} free pages for slot {slot}, found {len(self.free_pages)} of {self.pages}"
            )
        for _ in range(wanted):
            table.append(self.free_pages.pop())
        self.lengths[slot] = stop

    def free(self, slot: int) -> None:
        """Give a slot and its pages back."""
        if slot not in self.block_tables:
            raise PortError(f"expected an open slot, found {slot}; open are {sorted(self.block_tables)}")
        self.free_pages.extend(reversed(self.block_tables.pop(slot)))
        self.free_slots.append(slot)
        del self.lengths[slot]

    def places(self, slot: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return for token numbers of a slot the page and the place inside it."""
        table = torch.tensor(self.block_tables[slot], dtype=torch.int64)
        return table[tokens // self.page_tokens], tokens % self.page_tokens

    def write(self, layer: int, field: str, slot: int, start: int, values: Tensor) -> None:
        """Store values [1, T, width] of tokens [start, start + T)."""
        page, place = self.places(slot, torch.arange(start, start + values.shape[1]))
        self.pools[layer, field][page, place] = values[0]

    def read(self, layer: int, field: str, slot: int, stop: int) -> Tensor:
        """Return the values of tokens [0, stop) as [1, stop, width], page by page through the block table."""
        count = -(-stop // self.page_tokens)
        table = torch.tensor(self.block_tables[slot][:count], dtype=torch.int64)
        return self.pools[layer, field][table].flatten(0, 1)[None, :stop]

    def gather(self, layer: int, field: str, slot: int, chosen_BTK: Tensor) -> Tensor:
        """Return the values of chosen tokens only, as [1, T, K, width]; places of -1 hold token 0's."""
        page, place = self.places(slot, chosen_BTK.clamp(min=0))
        return self.pools[layer, field][page, place]

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.numel() * pool.element_size() for pool in self.pools.values())

    def facts(self) -> dict[str, int]:
        """Return the accounting: free and used pages add up to all of them."""
        used = sum(len(table) for table in self.block_tables.values())
        return {
            "pages_total": self.pages,
            "pages_free": len(self.free_pages),
            "pages_used": used,
            "page_tokens": self.page_tokens,
            "slots_total": self.slots,
            "slots_free": len(self.free_slots),
            "bytes": self.nbytes,
        }


class NoCache:
    """The keys of one whole prefill, kept nowhere (a store for `accel_impl.model`)."""

    sparse = False

    def put(self, layer: int, values: Mapping[str, Tensor]) -> None:
        """Hold the values of the current layer."""
        self._values = values

    def all(self, layer: int, field: str) -> Tensor:
        """Return what was put."""
        return self._values[field]

    def chosen(self, layer: int, field: str, chosen_BTK: Tensor) -> Tensor:
        """Refuse: a whole prefill has all keys at hand."""
        raise PortError("expected the prefill path for a request without a cache, found the decode path")


class SlotStore:
    """One step of one slot (a store for `accel_impl.model`). `sparse` asks for the decode path."""

    def __init__(self, cache: PagedCache, slot: int, start: int, stop: int) -> None:
        cache.extend(slot, start, stop)
        self.cache, self.slot, self.start, self.stop = cache, slot, start, stop
        self.sparse = stop - start == 1 and start > 0

    def put(self, layer: int, values: Mapping[str, Tensor]) -> None:
        """Write the step's tokens."""
        for field, value in values.items():
            self.cache.write(layer, field, self.slot, self.start, value)

    def all(self, layer: int, field: str) -> Tensor:
        """Return everything in the slot so far."""
        return self.cache.read(layer, field, self.slot, self.stop)

    def chosen(self, layer: int, field: str, chosen_BTK: Tensor) -> Tensor:
        """Return only what was chosen."""
        return self.cache.gather(layer, field, self.slot, chosen_BTK)
