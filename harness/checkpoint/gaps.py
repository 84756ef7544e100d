"""Which tensor's rows belong where a weight that is made of several holds rows of none. Knows orders and names alone.

Three sources of evidence, the surest first: a run of a tensor that breaks off goes on; tensors that differ by a number
stand at equal distances; what is left over takes the places that are left over, if there are exactly as many.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    gaps = _gaps(streams)
    found = [
        Due(source=s, start=g.before[1] + g.before[2], count=g.count, held=g.stream + stride * g.row, step=stride)
        for g in gaps
        if (s := g.goes_on()) in rows
    ]
    closed = {due.held for due in found}
    left = [g for g in gaps if g.stream + stride * g.row not in closed]
    origins = {name: place for name, place in _origins(streams).items() if name in rows}
    placed = {**_predicted(origins, rows), **origins}
    for gap in left:
        for name, (stream, begin) in placed.items():
            first, last = max(gap.row, begin), min(gap.row + gap.count, begin + rows[name])
            if stream == gap.stream and first < last:
                held = stream + stride * first
                found.append(Due(source=name, start=first - begin, count=last - first, held=held, step=stride))
    found += _only_one_left(left, found, streams, rows, stride)
    inside = {name for stream in streams for name, _, _ in stream if name}
    parents = {_parent(name) for name in inside}
    free = {n: c for n, c in rows.items() if n not in placed and n not in inside and _parent(n) in parents}
    found += _left_over(left, found, free, stride)
    return sorted(found, key=lambda due: due.held)


@dataclass(frozen=True, slots=True)
class _Gap:
    """Rows of a stream that are nobody's, and the runs around them (["", 0, 0] at an end)."""

    stream: int
    row: int
    count: int
    before: Sequence[Any]
    after: Sequence[Any]

    def goes_on(self) -> str:
        """Return the tensor that breaks off before the gap and goes on behind it as if it had been in it."""
        whole = self.before[0] == self.after[0] and self.after[1] == self.before[1] + self.before[2] + self.count
        return str(self.before[0]) if whole else ""


def _gaps(streams: Sequence[Sequence[Sequence[Any]]]) -> list[_Gap]:
    """Return the gaps of all streams; rows of zeros that are padding (start -1) are none."""
    gaps = []
    for stream, runs in enumerate(streams):
        at = 0
        for i, (source, start, count) in enumerate(runs):
            if not source and start >= 0:
                before = runs[i - 1] if i else ("", 0, 0)
                gaps.append(_Gap(stream, at, count, before, runs[i + 1] if i + 1 < len(runs) else ("", 0, 0)))
            at += count
    return gaps


def _origins(streams: Sequence[Sequence[Sequence[Any]]]) -> dict[str, Place]:
    """Return where each source begins, for those of which most rows say the same."""
    votes: dict[str, Counter[Place]] = defaultdict(Counter)
    for stream, runs in enumerate(streams):
        at = 0
        for source, start, count in runs:
            if source:
                votes[source][stream, at - start] += count
            at += count
    found = {}
    for source, counter in votes.items():
        place, rows = counter.most_common(1)[0]
        if 2 * rows > counter.total():
            found[source] = place
    return found


def _only_one_left(
    gaps: Iterable[_Gap], found: Iterable[Due], streams: Any, rows: Mapping[str, int], stride: int
) -> list[Due]:
    """Give a gap to the one tensor of the order that lacks exactly so many rows in one stretch."""
    taken = {due.held for due in found}
    lacking: dict[int, list[tuple[str, int]]] = defaultdict(list)
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for stream in streams:
        for source, start, count in stream:
            if source in rows:
                spans[source].append((start, start + count))
    for source, covered in spans.items():
        at = 0
        for start, stop in [*sorted(covered), (rows[source], rows[source])]:
            if start > at:
                lacking[start - at].append((source, at))
            at = max(at, stop)
    result = []
    for gap in gaps:
        held = gap.stream + stride * gap.row
        if held not in taken and len(lacking[gap.count]) == 1:
            source, start = lacking[gap.count].pop()
            result.append(Due(source=source, start=start, count=gap.count, held=held, step=stride))
    return result


def _parent(name: str) -> str:
    """Return the module that a tensor's own module lies in, without numbers."""
    return _NUMBER.sub("#", name).rsplit(".", 2)[0]


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


def _left_over(gaps: Iterable[_Gap], found: Iterable[Due], rows: Mapping[str, int], stride: int) -> list[Due]:
    """Give the rows that are still nobody's to the family of tensors of exactly as many rows, in their order."""
    taken = {due.held + i * due.step for due in found for i in range(due.count)}
    free = sorted(held for g in gaps for i in range(g.count) if (held := g.stream + stride * (g.row + i)) not in taken)
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
