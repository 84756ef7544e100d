"""The paged cache: pages, block tables, slots and their accounting. Knows widths and lengths; must not know the model.

A page holds `page_tokens` rows of every layer that has keys. A request has pages for its tokens, and others for its
pictures, whose rows are keys as well. Pages are counted, so several requests may begin with the same ones.

Legend: G pages, P rows of a page, N = G * P, B requests side by side, T tokens of each, K chosen, M picture rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from harness.errors import PortError

FIELDS = ("latent", "rope", "index")


def pages_for(tokens: int, picture_rows: int, page_tokens: int) -> int:
    """Return how many pages a request takes: rows of pictures have pages of their own."""
    return -(-tokens // page_tokens) + -(-picture_rows // page_tokens)


class CacheFull(PortError):
    """No slot or page is free; the request can be tried again after another one ends."""


class PagedCache:
    """One pool of pages per layer and field, shared by all slots through their block tables.

    Freed pages are given again first, uncleared.
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
        device: torch.device | str = "cpu",
    ) -> None:
        self.page_tokens, self.pages, self.slots, self.device = page_tokens, pages, slots, torch.device(device)
        self.pools = {
            (layer, field): torch.zeros(pages, page_tokens, widths[field], dtype=dtype, device=device)
            for layer in layers
            for field in FIELDS
        }
        self.free_pages = list(range(pages))
        self.free_slots = list(range(slots))
        self.block_tables: dict[int, list[int]] = {}
        self.picture_tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.holders = [0] * pages
        self.reclaim: Callable[[int], int] | None = None
        """Asked for so many pages where too few are free: who keeps pages of ended requests gives some up."""
        self.moved: Callable[[Sequence[int]], None] | None = None
        """Told where each page went when pages change places."""

    # ---- accounting

    def open(self) -> int:
        """Take a slot. Raises CacheFull if none is free."""
        if not self.free_slots:
            raise CacheFull(f"expected a free slot, found all {self.slots} taken; free one first")
        slot = self.free_slots.pop()
        self.block_tables[slot], self.picture_tables[slot], self.lengths[slot] = [], [], 0
        return slot

    def extend(self, slot: int, start: int, stop: int) -> None:
        """Make room for tokens [start, stop) of a slot. Raises CacheFull, or PortError if `start` leaves a hole."""
        self.check(slot)
        if start != self.lengths[slot]:
            raise PortError(f"expected tokens from {self.lengths[slot]} on in slot {slot}, found a step from {start}")
        table = self.block_tables[slot]
        table += self._take(slot, -(-stop // self.page_tokens) - len(table))
        self.lengths[slot] = stop

    def add_pictures(self, slot: int, rows: int) -> None:
        """Make room for rows of pictures, once for a request. Raises CacheFull."""
        self.check(slot)
        if self.picture_tables[slot]:
            raise PortError(f"expected pictures once in slot {slot}, found some there already")
        self.picture_tables[slot] = self._take(slot, -(-rows // self.page_tokens))

    def adopt(self, slot: int, pages: Sequence[int], pictures: Sequence[int] = ()) -> None:
        """Begin a request with whole pages of tokens that lie in the cache already; nothing is ever written to them."""
        self.check(slot)
        if self.lengths[slot]:
            raise PortError(f"expected an empty slot to adopt pages, found {self.lengths[slot]} tokens in {slot}")
        for page in (*pages, *pictures):
            self.holders[page] += 1
            if self.holders[page] == 1:
                self.free_pages.remove(page)
        self.block_tables[slot], self.picture_tables[slot] = list(pages), list(pictures)
        self.lengths[slot] = len(pages) * self.page_tokens

    def hold(self, pages: Sequence[int]) -> None:
        """Keep pages that a slot has, beyond its end."""
        for page in pages:
            self.holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Give up pages; those that nobody holds any more are free."""
        for page in reversed(pages):
            self.holders[page] -= 1
            if not self.holders[page]:
                self.free_pages.append(page)

    def truncate(self, slot: int, length: int) -> None:
        """Forget a slot's tokens from `length` on, and give back pages that no token is left in."""
        self.check(slot)
        if not 0 <= length <= self.lengths[slot]:
            raise PortError(f"expected at most {self.lengths[slot]} tokens to keep in slot {slot}, found {length}")
        table, kept = self.block_tables[slot], -(-length // self.page_tokens)
        self.release(table[kept:])
        del table[kept:]
        self.lengths[slot] = length

    def free(self, slot: int) -> None:
        """Give a slot and its pages back."""
        self.check(slot)
        self.release(self.picture_tables.pop(slot))
        self.release(self.block_tables.pop(slot))
        self.free_slots.append(slot)
        del self.lengths[slot]

    def check(self, slot: int) -> None:
        """Raise PortError for a slot that is not open."""
        if slot not in self.block_tables:
            raise PortError(f"expected an open slot, found {slot}; open are {sorted(self.block_tables)}")

    def copy(self, slot: int, page: int, count: int) -> None:
        """Go on with a copy of a page whose first `count` tokens lie in the cache already; it may be written to."""
        self.check(slot)
        (own,) = self._take(slot, 1)
        for pool in self.pools.values():
            pool[own] = pool[page]
        self.block_tables[slot].append(own)
        self.lengths[slot] += count

    def _take(self, slot: int, wanted: int) -> list[int]:
        if wanted > len(self.free_pages) and self.reclaim is not None:
            self.reclaim(wanted - len(self.free_pages))
        if wanted > len(self.free_pages):
            raise CacheFull(
                f"expected {wanted} free pages for slot {slot}, found {len(self.free_pages)} of {self.pages}"
            )
        taken = [self.free_pages.pop() for _ in range(max(0, wanted))]
        self.hold(taken)
        return taken

    # ---- contents

    def rows(self, slot: int, start: int, stop: int) -> Tensor:
        """Return the rows [stop - start] of the pools that tokens [start, stop) of a slot lie in."""
        return self._rows(self.block_tables[slot], start, stop)

    def picture_rows(self, slot: int, count: int) -> Tensor:
        """Return the rows [count] of the pools that a slot's picture rows lie in."""
        return self._rows(self.picture_tables[slot], 0, count)

    def _rows(self, table: Sequence[int], start: int, stop: int) -> Tensor:
        place = torch.arange(start, stop)
        page = torch.tensor(table, dtype=torch.int64)[place // self.page_tokens] if len(table) else place[:0]
        return (page * self.page_tokens + place % self.page_tokens).to(self.device)

    def pool(self, layer: int, field: str) -> Tensor:
        """Return a pool as rows [N, width]."""
        return self.pools[layer, field].flatten(0, 1)

    def write(self, layer: int, field: str, rows: Tensor, values: Tensor) -> None:
        """Store values [..., width] at rows [...] of the pools."""
        self.pool(layer, field)[rows.flatten()] = values.flatten(0, -2).to(self.pools[layer, field].dtype)

    def read(self, layer: int, field: str, rows: Tensor) -> Tensor:
        """Return the values [..., width] at rows [...]; rows of -1 give row 0."""
        return self.pool(layer, field)[rows.clamp(min=0)]

    # ---- reorganisation

    def permute(self, target: Sequence[int]) -> None:
        """Move the contents of each page g to page target[g], and all tables with them. Raises PortError if not 1:1."""
        if sorted(target) != list(range(self.pages)):
            raise PortError(f"expected each of {self.pages} pages once as a target, found {list(target)}")
        source = torch.empty(self.pages, dtype=torch.int64)
        source[torch.tensor(target)] = torch.arange(self.pages)
        source = source.to(self.device)
        for key, pool in self.pools.items():
            self.pools[key] = pool.index_select(0, source)
        for tables in (self.block_tables, self.picture_tables):
            for slot, table in tables.items():
                tables[slot] = [target[page] for page in table]
        self.free_pages = [target[page] for page in self.free_pages]
        holders = list(self.holders)
        for page, moved in enumerate(target):
            self.holders[moved] = holders[page]
        if self.moved is not None:
            self.moved(target)

    def defragment(self) -> list[int]:
        """Move the pages of all slots to the front, each request's in a row; return where each page went."""
        order = [page for slot in sorted(self.block_tables) for page in self.block_tables[slot]]
        order += [page for slot in sorted(self.picture_tables) for page in self.picture_tables[slot]]
        order = list(dict.fromkeys([*order, *(g for g in range(self.pages) if self.holders[g]), *range(self.pages)]))
        target = [0] * self.pages
        for place, page in enumerate(order):
            target[page] = place
        self.permute(target)
        return target

    # ---- facts

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.numel() * pool.element_size() for pool in self.pools.values())

    def facts(self) -> dict[str, int]:
        """Return the accounting: free and used pages add up to all of them."""
        return {
            "pages_total": self.pages,
            "pages_free": len(self.free_pages),
            "pages_used": sum(count > 0 for count in self.holders),
            "page_tokens": self.page_tokens,
            "slots_total": self.slots,
            "slots_free": len(self.free_slots),
            "bytes": self.nbytes,
        }
