"""How a merged weight was put together of which no row is the checkpoint's: by names and shapes, for values to confirm.

Where every row is wrong (all experts decoded with one mistake), no content tells what belongs where. Names do: the
weight and its tensors lie in one module, have as many elements, and are joined in one of a few usual ways.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.checkpoint.fact import WeightFact
from harness.checkpoint.formats import Logical
from harness.checkpoint.gaps import Due

_NUMBER = re.compile(r"\d+")
_USUAL = ("q", "k", "v", "query", "key", "value", "gate", "up", "w1", "w3", "w2", "down")
_MOST_FAMILIES = 10
_MOST_PARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """One way to put a weight together: the rows of each tensor in it, and whether its last two axes are exchanged."""

    transposed: bool
    dues: tuple[Due, ...]

    @property
    def order(self) -> str:
        """The order in the words of an audit, as far as rows follow each other."""
        stride = self.dues[0].step
        streams: list[list[list[object]]] = [[] for _ in range(stride)]
        for due in sorted(self.dues, key=lambda d: d.held):
            streams[due.held % stride].append([due.source, due.start, due.count])
        return json.dumps({"transposed": self.transposed, "stride": stride, "streams": streams})


def assemblies(fact: WeightFact, free: Iterable[Logical]) -> Iterator[Assembly]:
    """Yield the ways in which tensors that nothing uses could make up a weight, the likeliest first.

    `free`: tensors that no weight holds.
    """
    shape = fact.shape
    if len(shape) < 2:
        return
    total = 1
    for size in shape:
        total *= size
    for families in _sets(fact.name, total, list(free)):
        for transposed in (False, True):
            length = shape[-2 if transposed else -1]
            if all(x.shape and x.shape[-1] == length for family in families for x in family):
                yield from (Assembly(transposed=transposed, dues=dues) for dues in _joined(families, length))


def _sets(name: str, total: int, free: Sequence[Logical]) -> Iterator[list[list[Logical]]]:
    """Yield sets of families in one module with the weight that have as many elements, those of its own words first."""
    parts = name.split(".")
    seen: set[tuple[str, ...]] = set()
    for depth in range(len(parts) - 1, 0, -1):
        stem = _stem(parts[:depth])
        if not stem:
            return
        pool: dict[str, list[Logical]] = defaultdict(list)
        for x in free:
            if f".{x.name}".find(f".{stem}.") >= 0:
                pool[_NUMBER.sub("#", x.name)].append(x)
        if not 0 < len(pool) <= _MOST_FAMILIES:
            continue
        for count in range(1, _MOST_PARTS + 1):
            chosen = list(itertools.combinations(sorted(pool, key=_place), count))
            for templates in sorted(chosen, key=lambda c: -sum(_word(t) in parts[-1] + parts[-2] for t in c)):
                families = [sorted(pool[t], key=_numbers) for t in templates]
                fits = sum(x.numel for f in families for x in f) == total and len({len(f) for f in families}) == 1
                if fits and templates not in seen:
                    seen.add(templates)
                    yield families


def _stem(parts: Sequence[str]) -> str:
    """Return the end of a path from its layer on: what both sides call it alike."""
    numbered = [i for i, p in enumerate(parts) if p.isdecimal()]
    return ".".join(parts[numbered[0] :]) if numbered else ""


def _word(template: str) -> str:
    """Return the telling word of a tensor's name: gate of `experts.#.gate_proj.weight`."""
    words = [w for w in template.split(".") if w not in ("weight", "bias", "#")]
    return re.split(r"[_.]", words[-1])[0] if words else template


def _place(template: str) -> tuple[int, str]:
    word = _word(template)
    return (_USUAL.index(word) if word in _USUAL else len(_USUAL), template)


def _numbers(logical: Logical) -> tuple[int, ...]:
    return tuple(int(n) for n in _NUMBER.findall(logical.name))


def _joined(families: list[list[Logical]], length: int) -> Iterator[tuple[Due, ...]]:
    """Yield the usual ways to join: one member of each after the other, woven into each other, family by family."""
    members = [list(group) for group in zip(*families, strict=True)]
    yield _one_after_the_other([x for group in members for x in group], length)
    rows = {x.numel // length for family in families for x in family}
    if len(families) > 1 and len(rows) == 1:
        yield tuple(
            Due(source=x.name, start=0, count=n, held=i * n * len(families) + j, step=len(families))
            for n in rows
            for i, group in enumerate(members)
            for j, x in enumerate(group)
        )  # fmt: skip
    if len(families) > 1 and len(members) > 1:
        yield _one_after_the_other([x for family in families for x in family], length)


def _one_after_the_other(parts: Iterable[Logical], length: int) -> tuple[Due, ...]:
    found, at = [], 0
    for x in parts:
        rows = x.numel // length
        found.append(Due(source=x.name, start=0, count=rows, held=at, step=1))
        at += rows
    return tuple(found)
