from __future__ import annotations

import pytest
import torch

from accel_impl.cache import CacheFull, PagedCache
from harness.errors import PortError


def cache(pages: int = 6, slots: int = 2) -> PagedCache:
    widths = {"latent": 3, "rope": 2, "index": 4}
    return PagedCache(layers=[0, 1], widths=widths, pages=pages, page_tokens=4, slots=slots, dtype=torch.float32)


def whole(facts: dict[str, int]) -> bool:
    return facts["pages_free"] + facts["pages_used"] == facts["pages_total"]


def test_what_is_written_is_read_across_page_edges() -> None:
    """Values written in spans of 3, 4, 5 and 1 tokens by two slots in turn are read back in order from each."""
    store, slots = cache(pages=8), []
    values = torch.randn(2, 13, 3)
    slots = [store.open(), store.open()]
    for start, stop in ((0, 3), (3, 7), (7, 12), (12, 13)):
        for slot in slots:
            store.extend(slot, start, stop)
            store.write(1, "latent", slot, start, values[slots.index(slot), None, start:stop])
            assert whole(store.facts())
    for row, slot in enumerate(slots):
        assert torch.equal(store.read(1, "latent", slot, 13)[0], values[row])
        chosen = torch.tensor([[[0, 12, 5, -1]]])
        assert torch.equal(store.gather(1, "latent", slot, chosen)[0, 0, :3], values[row, [0, 12, 5]])
    assert not store.read(0, "latent", slots[0], 13).any()


def test_freed_pages_come_back_and_are_given_again() -> None:
    """After a slot is freed every page is free, and the next request gets the very same ones."""
    store = cache()
    slot = store.open()
    store.extend(slot, 0, 9)
    pages = list(store.block_tables[slot])
    assert store.facts()["pages_free"] == 3
    store.free(slot)
    assert store.facts()["pages_free"] == store.facts()["pages_total"] == 6
    assert store.facts()["slots_free"] == 2
    again = store.open()
    store.extend(again, 0, 9)
    assert store.block_tables[again] == pages


def test_a_full_cache_says_so_and_takes_nothing() -> None:
    """A request for more pages than are free raises CacheFull and changes no accounting."""
    store = cache(pages=2)
    slot = store.open()
    store.extend(slot, 0, 4)
    with pytest.raises(CacheFull, match="expected 2 free pages"):
        store.extend(slot, 4, 12)
    assert store.facts()["pages_free"] == 1
    store.extend(slot, 4, 8)
    store.open()
    with pytest.raises(CacheFull, match="all 2 taken"):
        store.open()


def test_holes_and_closed_slots_are_refused() -> None:
    """A step that skips tokens, or a slot that is not open, is the caller's error."""
    store = cache()
    slot = store.open()
    store.extend(slot, 0, 2)
    with pytest.raises(PortError, match="expected tokens from 2 on"):
        store.extend(slot, 3, 4)
    store.free(slot)
    for act in (lambda: store.free(slot), lambda: store.extend(slot, 0, 1)):
        with pytest.raises(PortError, match="expected an open slot"):
            act()
