"""What earlier requests left in pages and snapshots, found again by content. Knows digests and page numbers; must not
know tensors of the model, threads or what a snapshot holds.

A prefix is named by a chain of digests, one for each page, over everything that its keys and states follow from: token
ids, positions, and the bytes of the pictures whose rows lie in it. Keys in pages can be taken up at any token, a
recurrent state only where a snapshot of it was kept. So every path in the index ends in a snapshot, and a request takes
up the longest one that is a prefix of its own.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from accel_impl.prepare import placeholders
from harness.adapter import Inputs

DIGEST_BYTES = 16


class Pages(Protocol):
    """The pool of pages (`accel_impl.cache.PagedCache`). `holders`: how many hold each."""

    page_tokens: int
    holders: list[int]

    def hold(self, pages: Sequence[int]) -> None:
        """Hold pages."""

    def release(self, pages: Sequence[int]) -> None:
        """Let go of pages; who lets go last frees them."""


@dataclass(slots=True, eq=False)
class Node:
    """The last page of a prefix of `tokens` tokens; partly used where they do not fill it."""

    key: bytes
    parent: Node | None
    page: int
    tokens: int
    children: int = 0
    snapshot: Any = None
    beside: tuple[int, ...] = ()
    """Pages that the snapshot needs beside those of its tokens: the keys of pictures."""
    tails: dict[int, int] = field(default_factory=dict)
    """Lengths in tokens of the partial pages that follow, and how many of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A prefix that is there: its pages in order, the last perhaps used in part, its states, and pages beside."""

    tokens: int
    pages: tuple[int, ...]
    snapshot: Any
    beside: tuple[int, ...] = ()


class Chain:
    """The digests of a growing request's prefixes. `root` names everything that all requests share."""

    def __init__(self, root: bytes, page_tokens: int, pictures: Sequence[tuple[int, int, bytes]] = ()) -> None:
        """Begin a chain; pictures: (first token, one past the last, digest of its pixels)."""
        self.page_tokens, self.pictures = page_tokens, pictures
        self._keys = [_digest(root)]

    def key(self, inputs: Inputs, tokens: int) -> bytes:
        """Return the digest of the first `tokens` tokens; its full pages are kept."""
        pages, rest = divmod(tokens, self.page_tokens)
        while len(self._keys) <= pages:
            at = (len(self._keys) - 1) * self.page_tokens
            self._keys.append(_digest(self._keys[-1], self._content(inputs, at, at + self.page_tokens)))
        if not rest:
            return self._keys[pages]
        return _digest(self._keys[pages], self._content(inputs, tokens - rest, tokens))

    def _content(self, inputs: Inputs, start: int, stop: int) -> bytes:
        parts = [stop.to_bytes(8, "little"), _bytes(inputs.token_ids[..., start:stop])]
        if inputs.position_ids is not None:
            parts.append(_bytes(inputs.position_ids[..., start:stop]))
        for first, end, digest in self.pictures:
            if first < stop and end > start:
                parts += [first.to_bytes(8, "little"), digest]
        return b"".join(parts)


class PrefixIndex:
    """Pages and snapshots of earlier requests; the least recently used go first. Not for several threads at once."""

    def __init__(self, pages: Pages, *, snapshots: int) -> None:
        self.pages, self.most_snapshots = pages, snapshots
        self._nodes: OrderedDict[bytes, Node] = OrderedDict()
        self._snapshots: OrderedDict[bytes, Node] = OrderedDict()
        self.hits = self.hit_tokens = self.asked_tokens = 0

    def find(self, chain: Chain, inputs: Inputs) -> Hit | None:
        """Return the longest prefix that is there and leaves at least one token to compute.

        The caller holds its pages before it does anything else; a partly used one it copies first.
        """
        size, most = self.pages.page_tokens, inputs.token_ids.shape[-1] - 1
        self.asked_tokens += most + 1
        node, best = self._nodes.get(chain.key(inputs, 0)), None
        if node is None:
            return None
        while node is not None:
            ends = [t for t in sorted(node.tails, reverse=True) if t <= most]
            here = next((n for t in ends if (n := self._nodes.get(chain.key(inputs, t))) is not None), node)
            best = here if here.snapshot is not None else best
            after = node.tokens + size
            node = self._nodes.get(chain.key(inputs, after)) if after <= most else None
        if best is None:
            return None
        path = self._touch(best)
        self.hits, self.hit_tokens = self.hits + 1, self.hit_tokens + best.tokens
        return Hit(tokens=best.tokens, pages=tuple(n.page for n in path), snapshot=best.snapshot, beside=best.beside)

    def has(self, chain: Chain, inputs: Inputs, tokens: int) -> bool:
        """Say whether a prefix of exactly this length can be taken up."""
        node = self._nodes.get(chain.key(inputs, tokens))
        return node is not None and node.snapshot is not None

    def put(
        self,
        chain: Chain,
        inputs: Inputs,
        tokens: int,
        pages: Sequence[int],
        snapshot: Any,
        beside: Sequence[int] = (),
    ) -> None:
        """Keep a prefix: `pages` of the request that computed it, its states after `tokens` tokens, pages beside.

        A page that is there already is not kept twice. A partly used page must not be written below `tokens` again.
        """
        if tokens < 1 or self.most_snapshots < 1:
            return
        size = self.pages.page_tokens
        node = self._root(chain, inputs)
        for number in range(-(-tokens // size)):
            end = min(tokens, (number + 1) * size)
            node = self._nodes.get(chain.key(inputs, end)) or self._grown(
                node, chain.key(inputs, end), pages[number], end
            )
        if node.snapshot is None:
            self.pages.hold(beside)
            node.snapshot, node.beside = snapshot, tuple(beside)
        self._touch(node)
        while len(self._snapshots) > self.most_snapshots:
            self._forget(next(iter(self._snapshots.values())))

    def reclaim(self, count: int) -> int:
        """Free at least `count` pages that only this index holds, if there are so many; return how many became free."""
        freed = 0
        for node in list(self._nodes.values()):  # a child is always older than its parent
            if freed >= count:
                break
            leaf = node.key in self._nodes and not node.children and node.parent is not None
            if leaf and any(self.pages.holders[page] == 1 for page in (node.page, *node.beside)):
                freed += self._drop(node)
        return freed

    def moved(self, target: Sequence[int]) -> None:
        """Know that page g is page target[g] now."""
        for node in self._nodes.values():
            node.page = target[node.page] if node.parent is not None else node.page
            node.beside = tuple(target[page] for page in node.beside)

    def clear(self) -> None:
        """Forget everything."""
        for node in self._nodes.values():
            self.pages.release([*node.beside, *([node.page] if node.parent is not None else [])])
        self._nodes.clear()
        self._snapshots.clear()

    def facts(self) -> dict[str, int]:
        """Return what is held and how often it helped."""
        kept = {page for n in self._nodes.values() if n.parent is not None for page in (n.page, *n.beside)}
        return {
            "pages_kept": len(kept),
            "snapshots": len(self._snapshots),
            "prefix_hits": self.hits,
            "prefix_hit_tokens": self.hit_tokens,
            "prefix_asked_tokens": self.asked_tokens,
        }

    def _root(self, chain: Chain, inputs: Inputs) -> Node:
        key = chain.key(inputs, 0)
        if key not in self._nodes:
            self._nodes[key] = Node(key=key, parent=None, page=-1, tokens=0)
        return self._nodes[key]

    def _grown(self, parent: Node, key: bytes, page: int, tokens: int) -> Node:
        self.pages.hold([page])
        node = self._nodes[key] = Node(key=key, parent=parent, page=page, tokens=tokens)
        parent.children += 1
        if tokens % self.pages.page_tokens:
            parent.tails[tokens] = parent.tails.get(tokens, 0) + 1
        return node

    def _touch(self, node: Node) -> list[Node]:
        """Make a path and the snapshot at its end the most recent ones; return the path. Its end is its oldest node."""
        path: list[Node] = []
        self._snapshots[node.key] = node
        self._snapshots.move_to_end(node.key)
        at: Node | None = node
        while at is not None:
            self._nodes.move_to_end(at.key)
            if at.parent is not None:
                path.append(at)
            at = at.parent
        return path[::-1]

    def _forget(self, node: Node) -> None:
        """Drop a snapshot, and the pages that lead to nothing else."""
        self._bare(node)
        if not node.children:
            self._drop(node)

    def _bare(self, node: Node) -> int:
        """Take a node's snapshot away; return how many pages that freed."""
        freed = self._released(node.beside)
        node.snapshot, node.beside = None, ()
        self._snapshots.pop(node.key, None)
        return freed

    def _released(self, pages: Sequence[int]) -> int:
        freed = sum(self.pages.holders[page] == 1 for page in pages)
        self.pages.release(pages)
        return freed

    def _drop(self, node: Node) -> int:
        """Take a leaf out; return how many pages that freed, the pages that now lead to nothing included."""
        freed = 0
        at: Node | None = node
        while at is not None and at.parent is not None and not at.children and (at is node or at.snapshot is None):
            del self._nodes[at.key]
            freed += self._bare(at) + self._released([at.page])
            parent = at.parent
            parent.children -= 1
            if at.tokens % self.pages.page_tokens:
                parent.tails[at.tokens] -= 1
                if not parent.tails[at.tokens]:
                    del parent.tails[at.tokens]
            at = parent
        return freed


def picture_digests(extras: Mapping[str, Tensor]) -> list[bytes]:
    """Return for each picture the digest of its patches and grid."""
    if "pixel_values" not in extras:
        return []
    grids = extras["image_grid"]
    parts = extras["pixel_values"].split([int(n) for n in grids.prod(-1)])
    return [_digest(_bytes(grid), _bytes(part)) for grid, part in zip(grids, parts, strict=True)]


def picture_runs(inputs: Inputs, image_token: int, merge: int) -> list[tuple[int, int, bytes]]:
    """Return for each picture of a request its first token, one past its last, and its digest."""
    digests = picture_digests(inputs.extras)
    if not digests:
        return []
    places = placeholders(inputs, image_token)
    runs, at = [], 0
    for digest, grid in zip(digests, inputs.extras["image_grid"], strict=True):
        count = int(grid.prod()) // merge**2
        runs.append((int(places[at]), int(places[at + count - 1]) + 1, digest))
        at += count
    return runs


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().to("cpu").contiguous().view(torch.uint8).numpy())


def _digest(*parts: bytes) -> bytes:
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.digest()
