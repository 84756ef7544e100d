from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from accel_impl.reuse import Reuse
from harness.adapter import Inputs, silent
from harness.cases import ModelInfo, image_case, seeded_ids, text_case
from harness.types import Case

STRIDE, CHUNK = 8, 24
Filled = tuple[int, int, torch.Tensor]


@pytest.fixture(params=["bfloat16", "float32"])
def port(opened: Any, request: Any) -> Any:
    return opened(request.param)


@pytest.fixture
def reuse(port: Any) -> Iterator[Reuse]:
    made = Reuse(port, snapshots=16, stride=STRIDE)
    yield made
    made.forget()
    assert port.cache_facts()["pages_free"] == port.cache_facts()["pages_total"]


def prepared(port: Any, *ids: int) -> Inputs:
    found: Inputs = port.prepare(Case(id="x", token_ids=ids), silent)
    return found


def filled(reuse: Reuse, inputs: Inputs) -> Filled:
    """Take a request to its end as an engine does; return slot, first token computed, logits of what follows each."""
    slot, begun = reuse.resume(inputs)
    done, length, found = begun, inputs.token_ids.shape[-1], []
    while done < length:
        stop = reuse.stop(done, length, CHUNK)
        out = reuse.port.advance(slot, inputs, done, stop, silent)
        found.append(torch.cat((out.logits[0], out.further[0]), dim=-1))
        done = stop
        reuse.keep(slot, inputs)
    return slot, begun, torch.cat(found)


def both(reuse: Reuse, earlier: Inputs, inputs: Inputs, *, exact: bool = True) -> int:
    """Compute a request alone, then after an earlier one; compare, and return where it was taken up.

    Where the same steps were taken the bits are the same; where not, float32 is looked at alone.
    """
    slot, begun, alone = filled(reuse, inputs)
    assert begun == 0
    reuse.free(slot)
    reuse.forget()
    slot, _, _ = filled(reuse, earlier)
    reuse.free(slot, earlier)
    slot, begun, after = filled(reuse, inputs)
    reuse.free(slot, inputs)
    if exact:
        assert torch.equal(alone[begun:], after)
    elif reuse.port.dtype == torch.float32:
        assert float((alone[begun:] - after).norm() / after.norm()) < 1e-4
    return begun


def test_a_prefix_hit_gives_the_logits_of_no_hit(reuse: Reuse, port: Any, info: ModelInfo) -> None:
    """Logits of the next token and of the one after it have the same bits, whether 24 tokens were taken up or not."""
    ids = seeded_ids(info, 61, seed=5)
    assert both(reuse, prepared(port, *ids[:30], *ids[:9]), prepared(port, *ids)) == 24


def test_the_same_request_again_is_taken_up_before_its_last_token(reuse: Reuse, port: Any, info: ModelInfo) -> None:
    """Of a request that was there as a whole all is taken up but what lies behind the last snapshot."""
    inputs = port.prepare(text_case(info, 41, seed=6), silent)
    assert both(reuse, inputs, inputs) == 40


def test_a_conversation_goes_on_in_a_copy_of_its_last_page(reuse: Reuse, port: Any, info: ModelInfo) -> None:
    """What a request had when it ended is taken up to its last token, though its last page is not full; that one is
    copied, so two requests can go on from it in their own ways."""
    ids = seeded_ids(info, 50, seed=7)
    first = prepared(port, *ids[:27])
    assert both(reuse, first, prepared(port, *ids), exact=False) == 27
    slot, begun, _ = filled(reuse, prepared(port, *ids[:27], *ids[:5]))
    assert begun == 27
    kept = [pool.clone() for pool in port.memory.pages.pools.values()]
    page = port.memory.pages.block_tables[slot][6]
    other, begun, _ = filled(reuse, prepared(port, *ids[:27], *ids[5:12]))
    assert begun == 27
    assert port.memory.pages.block_tables[other][6] != page
    assert port.memory.pages.block_tables[other][:6] == port.memory.pages.block_tables[slot][:6]
    for now, before in zip(port.memory.pages.pools.values(), kept, strict=True):
        assert torch.equal(now[port.memory.pages.block_tables[slot]], before[port.memory.pages.block_tables[slot]])
    reuse.free(slot)
    reuse.free(other)


@pytest.mark.parametrize("sizes", [[(48, 32)], [(48, 32), (16, 64)]])
def test_pictures_are_taken_up(reuse: Reuse, port: Any, info: ModelInfo, sizes: list[tuple[int, int]]) -> None:
    """A prefix with a picture in it is taken up by a request with the same picture, and with a further one after it."""
    first = image_case(info, [(48, 32)], length=40, seed=8)
    more = image_case(info, sizes, length=40, seed=8)
    at = (20, 38)[: len(sizes)]
    earlier = Case(id="a", token_ids=first.token_ids, images=first.images, image_at=(20,))
    later = Case(id="b", token_ids=(*(first.token_ids or ()), 5, 6), images=more.images, image_at=at)
    found = both(reuse, port.prepare(earlier, silent), port.prepare(later, silent), exact=False)
    assert found == (46 if len(sizes) == 1 else 40)


def test_prefixes_move_with_their_pages(reuse: Reuse, port: Any, info: ModelInfo) -> None:
    """After the cache was put in another order, with and without holes, prefixes are where they went."""
    inputs = port.prepare(image_case(info, [(48, 32)], length=30, seed=8), silent)
    slot, _, alone = filled(reuse, inputs)
    reuse.free(slot, inputs)
    for order in (lambda: port.memory.pages.permute(range(1023, -1, -1)), port.memory.pages.defragment):
        order()
        slot, begun, after = filled(reuse, inputs)
        assert begun == 32
        assert torch.equal(alone[begun:], after)
        reuse.free(slot)


def test_another_picture_is_not_taken_up(reuse: Reuse, port: Any, info: ModelInfo) -> None:
    """The same tokens around another picture share only what comes before it."""
    one, two = (
        Case(id="x", token_ids=seeded_ids(info, 40, seed=9), image_at=(30,), images=(image,))
        for seed in (1, 2)
        for image in image_case(info, [(48, 32)], seed=seed).images
    )
    assert both(reuse, port.prepare(one, silent), port.prepare(two, silent)) == 24


def test_kept_pages_give_way_to_requests(info: ModelInfo, checkpoint: Any) -> None:
    """In a cache of 24 pages, requests that need all of them are served while prefixes are kept, least recent first."""
    from accel_runs import setup_of

    import accel_impl

    setup = setup_of("bfloat16", pages="24")
    port = accel_impl.adapter(checkpoint, setup)
    port.load(checkpoint, setup)
    reuse = Reuse(port, snapshots=16, stride=STRIDE)
    for seed in (1, 2, 1, 3, 4):
        inputs = port.prepare(text_case(info, 61, seed=seed), silent)
        slot, begun, _ = filled(reuse, inputs)
        assert begun == 0 or seed == 1
        reuse.free(slot, inputs)
        facts = {**port.cache_facts(), **reuse.facts()}
        assert facts["pages_free"] + facts["pages_kept"] == facts["pages_total"]
    assert facts["pages_kept"] > 0
    reuse.forget()
    assert port.cache_facts()["pages_free"] == 24
    port.close()


def test_nothing_is_kept_where_nothing_is_asked_for(opened: Any, info: ModelInfo) -> None:
    """Without snapshots every request begins at its first token."""
    port = opened("bfloat16")
    reuse = Reuse(port, snapshots=0, stride=STRIDE)
    inputs = port.prepare(text_case(info, 20, seed=1), silent)
    for _ in range(2):
        slot, begun, _ = filled(reuse, inputs)
        assert begun == 0
        reuse.free(slot, inputs)
    assert port.cache_facts()["pages_free"] == port.cache_facts()["pages_total"]
