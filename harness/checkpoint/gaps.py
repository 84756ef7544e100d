"""Which tensor's rows belong where a weight that is made of several holds rows of none. Knows orders and names alone.

Three sources of evidence, the surest first: a run of a tensor that breaks off goes on; tensors that differ by a number
stand at equal distances; what is left over takes the places that are left over, if there are exactly as many.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_NUMBER = re.compile(r"\d+")
Place = tuple[int, int]
"""A stream of an order, and a row within it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """Rows `start` .. `start + count` of `source` belong at rows `held`, `held + step`, .. of a weight."""

    source: str
    start: int
    count: int
    held: int
    step: int


def due_rows(order: str, rows: Mapping[str, int]) -> list[Due]:
    """Return what belongs in the gaps of an order, in the order of the weight's rows.

    `rows`: how many rows each tensor has that is in the order already, or may be missing from it.
    """
    value = json.loads(order) if order else {}
    streams, stride = value.get("streams"), value.get("stride", 1)
    if not streams:
        return []
    origins, gaps = _read(streams)
    known = {name: place for name, place in origins.items() if name in rows}
    placed = {**_predicted(known, rows), **known}
    found = [
        Due(source=name, start=first - begin, count=last - first, held=stream + stride * first, step=stride)
        for stream, at, count in gaps
        for name, (there, begin) in placed.items()
        if there == stream
        and (first := max(at, begin)) < (last := min(at + count, begin + rows[name]))
    ]  # fmt: skip
    found += _left_over(gaps, found, {n: c for n, c in rows.items() if n not in placed}, stride)
    return sorted(found, key=lambda due: due.held)


def _read(streams: Iterable[Iterable[tuple[str, int, int]]]) -> tuple[dict[str, Place], list[tuple[int, int, int]]]:
    """Return where each source begins (by most of its rows), and the gaps as [stream, row, count]."""
    votes: dict[str, Counter[Place]] = defaultdict(Counter)
    gaps = []
    for stream, runs in enumerate(streams):
        at = 0
        for source, start, count in runs:
            if source:
                votes[source][stream, at - start] += count
            else:
                gaps.append((stream, at, count))
            at += count
    return {source: counter.most_common(1)[0][0] for source, counter in votes.items()}, gaps


def _predicted(known: Mapping[str, Place], rows: Mapping[str, int]) -> dict[str, Place]:
    """Place what is missing by the distances of tensors that differ from it by one number."""
    families: dict[str, dict[tuple[int, ...], Place]] = defaultdict(dict)
    for name, place in known.items():
        families[_NUMBER.sub("#", name)][_numbers(name)] = place
    steps: Counter[tuple[int, float]] = Counter()
    for members in families.values():
        ordered = sorted(members)
        for a, b in itertools.pairwise(ordered):
            apart = [i for i in range(len(a)) if a[i] != b[i]]
            if len(apart) == 1 and members[a][0] == members[b][0]:
                axis = apart[0]
                steps[axis, (members[b][1] - members[a][1]) / (b[axis] - a[axis])] += 1
    if not steps:
        return {}
    (axis, step), _ = steps.most_common(1)[0]
    found = {}
    for name in rows:
        members, own = families.get(_NUMBER.sub("#", name), {}), _numbers(name)
        alike = [m for m in members if all(a == b for i, (a, b) in enumerate(zip(m, own, strict=True)) if i != axis)]
        if name in known or not alike:
            continue
        nearest = min(alike, key=lambda m: abs(m[axis] - own[axis]))
        stream, begin = members[nearest]
        found[name] = (stream, round(begin + step * (own[axis] - nearest[axis])))
    return found


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(n) for n in _NUMBER.findall(name))


def _left_over(
    gaps: Iterable[tuple[int, int, int]], found: Iterable[Due], rows: Mapping[str, int], stride: int
) -> list[Due]:
    """Give the rows that are still nobody's to the family of tensors of exactly as many rows, in their order."""
    taken = {due.held + i * due.step for due in found for i in range(due.count)}
    free = sorted(
        held for stream, at, count in gaps for i in range(count) if (held := stream + stride * (at + i)) not in taken
    )
    families: dict[str, list[str]] = defaultdict(list)
    for name in rows:
        families[_NUMBER.sub("#", name)].append(name)
    fitting = [names for names in families.values() if sum(rows[n] for n in names) == len(free)]
    if not free or len(fitting) != 1:
        return []
    result, at = [], 0
    for name in sorted(fitting[0], key=_numbers):
        mine = free[at : at + rows[name]]
        at += rows[name]
        start = 0
        while start < len(mine):
            stop = start + 1
            while stop < len(mine) and mine[stop] - mine[stop - 1] == stride:
                stop += 1
            result.append(Due(source=name, start=start, count=stop - start, held=mine[start], step=stride))
            start = stop
    return result
