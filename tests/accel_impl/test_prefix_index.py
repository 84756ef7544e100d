from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from accel_impl.prefix import Chain, PrefixIndex, picture_digests, picture_runs
from harness.adapter import Inputs


class Pool:
    """Pages that only count their holders."""

    page_tokens = 4

    def __init__(self) -> None:
        self.holders = [0] * 40

    def hold(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            assert self.holders[page] > 0
            self.holders[page] -= 1


def request(*ids: int) -> Inputs:
    return Inputs(token_ids=torch.tensor([ids]), position_ids=torch.arange(len(ids))[None])


def chain(pictures: list[tuple[int, int, bytes]] | None = None) -> Chain:
    return Chain(b"", Pool.page_tokens, pictures or [])


def put(index: PrefixIndex, inputs: Inputs, tokens: int, first_page: int, snapshot: str) -> None:
    """Keep a prefix as a request does that holds its pages and ends."""
    pages = list(range(first_page, first_page - (-tokens // 4)))
    index.pages.hold(pages)
    index.put(chain(), inputs, tokens, pages, snapshot)
    index.pages.release(pages)


LONG = tuple(range(10, 30))


def test_the_longest_prefix_with_a_snapshot_is_found() -> None:
    """Full pages lead to the last snapshot on their path; a partial page is found where its tokens agree."""
    index = PrefixIndex(Pool(), snapshots=8)
    put(index, request(*LONG), 8, 0, "eight")
    put(index, request(*LONG), 14, 10, "fourteen")
    hit = index.find(chain(), request(*LONG))
    assert hit is not None
    assert (hit.tokens, hit.pages, hit.snapshot) == (14, (0, 1, 12, 13), "fourteen")
    other = index.find(chain(), request(*LONG[:13], 99, 98))
    assert other is not None
    assert (other.tokens, other.snapshot) == (8, "eight")


def test_at_least_one_token_is_left_to_compute() -> None:
    """A request that is there as a whole takes up less than itself."""
    index = PrefixIndex(Pool(), snapshots=8)
    put(index, request(*LONG), 4, 0, "four")
    put(index, request(*LONG), 8, 0, "eight")
    hit = index.find(chain(), request(*LONG[:8]))
    assert hit is not None
    assert hit.tokens == 4
    assert index.find(chain(), request(*LONG[:4])) is None


@pytest.mark.parametrize("what", ["token", "position", "picture", "place"])
def test_whatever_keys_follow_from_is_part_of_the_name(what: str) -> None:
    """Another token, position, picture or place of one in the prefix is another prefix; the same again is the same."""
    index, inputs = PrefixIndex(Pool(), snapshots=8), request(*LONG)
    pictures = [(2, 4, b"red")]
    index.put(chain(pictures), inputs, 8, [0, 1], "eight")
    assert index.find(chain(pictures), request(*LONG)) is not None
    ids, positions = inputs.token_ids.clone(), torch.arange(len(LONG))[None]
    if what == "token":
        ids[0, 3] = 99
    elif what == "position":
        positions[0, 3] = 99
    elif what == "picture":
        pictures = [(2, 4, b"blue")]
    else:
        pictures = [(3, 4, b"red")]
    assert index.find(chain(pictures), Inputs(token_ids=ids, position_ids=positions)) is None


def test_a_picture_behind_a_prefix_is_no_part_of_it() -> None:
    """Requests that differ in a later picture share what comes before it."""
    index = PrefixIndex(Pool(), snapshots=8)
    index.put(chain([(9, 12, b"red")]), request(*LONG), 8, [0, 1], "eight")
    assert index.find(chain([(9, 12, b"blue")]), request(*LONG)) is not None


def test_the_least_recently_used_goes_first_and_leaves_first() -> None:
    """Pages come back from the oldest path on, its end first; one that a request holds stays."""
    pool = Pool()
    index = PrefixIndex(pool, snapshots=8)
    put(index, request(*LONG), 8, 0, "old")
    put(index, request(*LONG[::-1]), 8, 10, "new")
    put(index, request(*LONG[:4], *LONG), 8, 20, "branch")
    assert index.find(chain(), request(*LONG)) is not None  # now the most recent one
    pool.hold([11])  # a request holds the end of "new"
    assert index.reclaim(1) == 1
    assert pool.holders[21] == 0
    assert index.reclaim(5) == 2
    assert {page for page, count in enumerate(pool.holders) if count} == {10, 11}
    pool.release([11])
    assert index.reclaim(5) == 2
    assert index.facts()["pages_kept"] == index.facts()["snapshots"] == 0


def test_more_snapshots_than_asked_for_are_not_kept() -> None:
    """The oldest snapshot goes, and with it the pages that led only to it."""
    pool = Pool()
    index = PrefixIndex(pool, snapshots=2)
    put(index, request(*LONG), 4, 0, "a")
    put(index, request(*LONG), 12, 0, "b")
    put(index, request(*LONG[::-1]), 8, 10, "c")
    hit = index.find(chain(), request(*LONG))
    assert hit is not None
    assert hit.snapshot == "b"
    assert index.facts()["snapshots"] == 2
    put(index, request(5, *LONG), 8, 20, "d")
    assert not pool.holders[10]
    assert not pool.holders[11]
    index.clear()
    assert not any(pool.holders)


def test_pages_beside_a_snapshot_stay_and_go_with_it() -> None:
    """The keys of pictures are held as long as the snapshot that needs them, and no longer."""
    pool = Pool()
    index = PrefixIndex(pool, snapshots=1)
    index.put(chain(), request(*LONG), 4, [0], "a", beside=[30, 31])
    hit = index.find(chain(), request(*LONG))
    assert hit is not None
    assert hit.beside == (30, 31)
    index.put(chain(), request(*LONG), 8, [0, 1], "b", beside=[31])
    assert [pool.holders[page] for page in (0, 1, 30, 31)] == [1, 1, 0, 1]
    assert index.reclaim(1) == 3
    assert not any(pool.holders)


def test_pictures_are_named_by_their_own_bytes() -> None:
    """Two pictures of a request have a digest each, from patches and shape; their runs are found in the tokens."""
    pixels = torch.arange(12 * 3.0).view(12, 3)
    extras = {"pixel_values": pixels, "image_grid": torch.tensor([[1, 2, 2], [1, 2, 4]])}
    inputs = Inputs(token_ids=torch.tensor([[5, 7, 6, 7, 7, 5]]), extras=extras)
    first, second = picture_digests(extras)
    assert picture_runs(inputs, 7, 2) == [(1, 2, first), (3, 5, second)]
    turned = {**extras, "image_grid": torch.tensor([[1, 2, 2], [1, 4, 2]])}
    assert picture_digests(turned)[0] == first
    assert picture_digests(turned)[1] != second
    assert not picture_runs(request(1, 2), 7, 2)
