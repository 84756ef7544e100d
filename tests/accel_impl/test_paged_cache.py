from __future__ import annotations

import random

import pytest
import torch

from accel_impl.cache import CacheFull, PagedCache
from accel_impl.states import StateCache
from accel_impl.store import NEVER, Memory, SlotStore
from harness.errors import PortError


def cache(pages: int = 6, slots: int = 2) -> PagedCache:
    widths = {"latent": 3, "rope": 2, "index": 4}
    return PagedCache(layers=[0, 1], widths=widths, pages=pages, page_tokens=4, slots=slots, dtype=torch.float32)


def memory(pages: int = 12, slots: int = 3) -> Memory:
    states = StateCache(layers=[2], memory=(2, 3, 4), inputs=(3, 5), features=6, slots=slots, dtype=torch.float32)
    return Memory(cache(pages, slots), states)


def fill(kept: Memory, slot: int, start: int, stop: int, value: float) -> None:
    """Process tokens of a slot: values that tell whose they are, and a state that tells how far it is."""
    store = SlotStore(kept, [slot], [start], stop - start)
    new = value + torch.arange(start, stop, dtype=torch.float32)[None, :, None]
    for layer in (0, 1):
        store.put(layer, {"latent": new.expand(1, -1, 3), "rope": new.expand(1, -1, 2), "index": new.expand(1, -1, 4)})
    store.memory_of(2)[store.index_B] = value + stop
    store.put_inputs(2, torch.full((1, 3, 5), value + stop))
    store.put_norm(torch.full((1, 6), value + stop))


def seen(kept: Memory, slot: int) -> list[torch.Tensor]:
    """Return everything that a slot holds, wherever it lies."""
    pages, stop = kept.pages, kept.pages.lengths[slot]
    rows = pages.rows(slot, 0, stop)
    pictures = pages.picture_rows(slot, len(kept.picture_places[slot]))
    fields = [pages.read(layer, field, at) for layer, field in pages.pools for at in (rows, pictures)]
    return [*fields, *(tensor[slot].clone() for tensor in kept.states.tensors), kept.picture_places[slot]]


def whole(facts: dict[str, int]) -> bool:
    return facts["pages_free"] + facts["pages_used"] == facts["pages_total"]


def test_what_is_written_is_read_across_page_edges() -> None:
    """Values written in spans of 3, 4, 5 and 1 tokens by two slots in turn are read back in order from each."""
    store = cache(pages=8)
    values = torch.randn(2, 13, 3)
    slots = [store.open(), store.open()]
    for start, stop in ((0, 3), (3, 7), (7, 12), (12, 13)):
        for row, slot in enumerate(slots):
            store.extend(slot, start, stop)
            store.write(1, "latent", store.rows(slot, start, stop), values[row, start:stop])
            assert whole(store.facts())
    for row, slot in enumerate(slots):
        assert torch.equal(store.read(1, "latent", store.rows(slot, 0, 13)), values[row])
    assert not store.read(0, "latent", store.rows(slots[0], 0, 13)).any()


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


def test_a_slot_that_was_used_begins_from_nothing() -> None:
    """Every state of a slot is 0 for the request that opens it, whatever the one before left there."""
    kept = memory(slots=1)
    slot = kept.open()
    fill(kept, slot, 0, 5, 100.0)
    assert all(tensor[slot].any() for tensor in kept.states.tensors)
    kept.free(slot)
    assert kept.open() == slot
    assert not any(tensor[slot].any() for tensor in kept.states.tensors)


def test_moving_pages_and_slots_changes_nothing_that_a_request_sees() -> None:
    """Pages permuted at random, compacted, slots swapped: every request reads its own values, and goes on with them."""
    kept, draw = memory(), random.Random(5)
    slots = [kept.open(), kept.open()]
    kept.add_pictures(slots[1], torch.tensor([1, 2, 3, 4, 5]))
    for start, stop in ((0, 3), (3, 9)):
        for slot, value in zip(slots, (100.0, 200.0), strict=True):
            fill(kept, slot, start, stop, value)
    for step in range(6):
        before, facts = [seen(kept, slot) for slot in slots], kept.facts()
        if step % 3 == 0:
            target = list(range(kept.pages.pages))
            draw.shuffle(target)
            kept.pages.permute(target)
        elif step % 3 == 1:
            assert sorted(kept.pages.defragment()) == list(range(kept.pages.pages))
            assert sorted(p for t in kept.pages.block_tables.values() for p in t) == list(range(6))
        else:
            other = next(s for s in range(3) if s not in slots)
            kept.swap(slots[0], other)
            slots[0] = other
        for slot, expected in zip(slots, before, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(seen(kept, slot), expected, strict=True)), step
        assert kept.facts() == facts
    fill(kept, slots[0], 9, 11, 100.0)
    assert kept.pages.read(0, "latent", kept.pages.rows(slots[0], 0, 11))[:, 0].tolist() == [
        100.0 + n for n in range(11)
    ]


def test_a_move_that_loses_a_page_is_refused() -> None:
    """Targets that are not each page, or each slot, exactly once are an error, and nothing is moved."""
    kept = memory()
    with pytest.raises(PortError, match="each of 12 pages once"):
        kept.pages.permute([0] * 12)
    with pytest.raises(PortError, match="each of 3 slots once"):
        kept.states.permute([0, 1, 1])


def test_going_back_forgets_later_tokens_only() -> None:
    """A request restored to an earlier moment has that moment's states and tokens, and gives later pages back."""
    kept = memory()
    slot = kept.open()
    fill(kept, slot, 0, 6, 100.0)
    earlier, moment = seen(kept, slot), kept.snapshot(slot)
    fill(kept, slot, 6, 14, 500.0)
    kept.restore(slot, moment)
    assert all(torch.equal(a, b) for a, b in zip(seen(kept, slot), earlier, strict=True))
    assert kept.facts()["pages_used"] == 2
    fill(kept, slot, 6, 7, 100.0)


def test_shared_pages_live_as_long_as_anybody_holds_them() -> None:
    """Two requests that begin with the same pages read the same, write apart, and the last one to end frees them."""
    kept = memory()
    first = kept.open()
    fill(kept, first, 0, 8, 100.0)
    pages, moment = list(kept.pages.block_tables[first]), kept.snapshot(first)
    second = kept.open()
    kept.adopt(second, pages, moment.states, (), torch.empty(0, dtype=torch.int64))
    fill(kept, second, 8, 10, 300.0)
    fill(kept, first, 8, 10, 100.0)
    assert kept.facts()["pages_used"] == 4
    kept.free(first)
    assert kept.facts()["pages_used"] == 3
    values = kept.pages.read(1, "rope", kept.pages.rows(second, 0, 10))[:, 0].tolist()
    assert values == [100.0 + n for n in range(8)] + [308.0, 309.0]
    kept.free(second)
    assert kept.facts()["pages_used"] == 0
    assert sorted(kept.pages.free_pages) == list(range(12))


def test_requests_side_by_side_read_their_own_rows() -> None:
    """A step of two slots of different lengths maps places to each slot's rows; pictures are padded with NEVER."""
    kept = memory()
    slots = [kept.open(), kept.open()]
    fill(kept, slots[0], 0, 9, 100.0)
    fill(kept, slots[1], 0, 4, 200.0)
    kept.add_pictures(slots[0], torch.tensor([2, 3]))
    store = SlotStore(kept, slots, [9, 4], 1)
    rows = store.rows(torch.tensor([[[0, 8, -1]], [[0, 3, -1]]]))
    assert store.pool(0, "latent")[rows.clamp(min=0)][..., 0].tolist()[0][0][:2] == [100.0, 108.0]
    assert store.pool(0, "latent")[rows.clamp(min=0)][..., 0].tolist()[1][0][:2] == [200.0, 203.0]
    assert (rows < 0).nonzero().tolist() == [[0, 0, 2], [1, 0, 2]]
    assert store.pictures()[1].tolist() == [[2, 3], [NEVER, NEVER]]
    assert store.sparse
