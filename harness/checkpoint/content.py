"""Find by content which checkpoint tensors a weight was put together from. Knows rows and decoders, no port.

Holds row digests (eight bytes a row) instead of tensors, so memory stays a small fraction of the weights.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.formats import Logical, decode
from harness.checkpoint.rows import Hashes, Ints, Order, RowTable, Run, constant_rows, find_order, row_hashes
from harness.checkpoint.values import rounded_digests
from harness.errors import CheckpointError

_SMALL_ELEMENTS = 1 << 18
Key = tuple[torch.dtype, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """What is kept of a weight that no name settled: digests of its rows, and of its columns as rows."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: Hashes
    columns: Hashes | None
    constant_rows: int
    digests: Mapping[str, str]
    small: Tensor | None

    @staticmethod
    def of(held: Tensor) -> Pending:
        """Digest a weight; scalars are taken as one row of one element."""
        value = held.reshape(1) if held.dim() == 0 else held
        return Pending(
            dtype=held.dtype,
            shape=tuple(value.shape),
            rows=row_hashes(value),
            columns=row_hashes(value.transpose(-1, -2)) if value.dim() >= 2 else None,
            constant_rows=constant_rows(value),
            digests=rounded_digests(held),
            small=value.flatten().clone() if value.numel() <= _SMALL_ELEMENTS else None,
        )

    @property
    def numel(self) -> int:
        """Elements in memory."""
        return torch.Size(self.shape).numel()

    def keys(self) -> set[Key]:
        """Return the row lengths worth looking for."""
        keys = {(self.dtype, self.shape[-1])}
        return keys | {(self.dtype, self.shape[-2])} if self.columns is not None else keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Where one weight comes from. `unmatched` counts elements of rows that no source has."""

    unmatched: int
    ambiguous_rows: int
    order: str
    regular: bool
    ascending: bool = True


@dataclass(slots=True)
class Explained:
    """Answers in the order asked, and for each source used (logical or stored name) rows used and rows in all."""

    answers: list[Answer] = field(default_factory=list)
    hits: dict[str, tuple[int, int]] = field(default_factory=dict)


def explain(
    checkpoint: Checkpoint,
    pending: Sequence[Pending],
    first: Sequence[Logical],
    second: Sequence[Logical],
    errors: dict[str, str],
) -> Explained:
    """Explain each weight by rows of `first`; if some rows remain, by rows of `second` too (tied copies).

    A source that cannot be decoded is noted in `errors` and left out.
    """
    keys = set().union(*(p.keys() for p in pending))
    parts: dict[Key, list[tuple[str, Hashes]]] = {k: [] for k in keys}
    vectors: dict[str, Tensor] = {}
    _collect(checkpoint, first, parts, vectors, errors)
    tables = {k: RowTable.build(v) for k, v in parts.items()}
    for more in _second_thoughts(pending, second):
        open_keys = set().union(*(p.keys() for p in pending if _best(p, tables)[1]))
        if not open_keys:
            break
        _collect(checkpoint, more, {k: parts[k] for k in open_keys}, vectors, errors)
        tables |= {k: RowTable.build(parts[k]) for k in open_keys}
    marks = {k: np.zeros(len(t.hashes), dtype=bool) for k, t in tables.items()}
    result = Explained()
    for item in pending:
        answer, positions = _answer(item, tables)
        if answer.unmatched and item.small is not None:
            joined = _joined_vectors(item, vectors)
            if joined is not None and joined[0].unmatched < answer.unmatched:
                answer, names = joined
                positions = None
                result.hits.update(dict.fromkeys(names, (1, 1)))
        if positions is not None:
            marks[positions[0]][positions[1]] = True
        result.answers.append(answer)
    for key, table in tables.items():
        _count_hits(table, marks[key], result.hits)
    return result


def _second_thoughts(pending: Sequence[Pending], second: Sequence[Logical]) -> list[list[Logical]]:
    """Order what is used already: whole copies (a tied head) are likely and cheap to look for, the rest comes after."""
    shapes = {p.shape for p in pending}
    return [[x for x in second if (x.shape in shapes) is likely] for likely in (True, False)]


def _count_hits(table: RowTable, mark: NDArray[np.bool_], hits: dict[str, tuple[int, int]]) -> None:
    for i, name in enumerate(table.sources):
        part = mark[table.starts[i] : table.starts[i + 1]]
        if part.any():
            before = hits.get(name, (0, 0))
            now = (int(part.sum()), len(part))
            # The same tensor may be a source in several precisions or lengths; the fullest use counts.
            hits[name] = max(before, now, key=lambda h: h[0] / max(1, h[1]))


def _collect(
    checkpoint: Checkpoint,
    logicals: Iterable[Logical],
    parts: dict[Key, list[tuple[str, Hashes]]],
    vectors: dict[str, Tensor],
    errors: dict[str, str],
) -> None:
    """Digest the rows of each source in every precision and length that is looked for."""
    for logical in logicals:
        if logical.problem:
            continue
        try:
            for name, value in _sources(checkpoint, logical, {dtype for dtype, _ in parts}):
                _digest(name, value, parts, rounded=name == logical.name)
                if value.dim() == 1 and 2 <= value.numel() <= _SMALL_ELEMENTS and name == logical.name:
                    vectors[name] = value
        except CheckpointError as error:
            errors[logical.name] = str(error)


def _sources(checkpoint: Checkpoint, logical: Logical, wanted: set[torch.dtype]) -> Iterator[tuple[str, Tensor]]:
    """Yield a weight decoded, and its stored parts where memory holds something of that very type."""
    value = decode(checkpoint, logical, widen=False)
    yield logical.name, value.reshape(1) if value.dim() == 0 else value
    if logical.quantised:
        for name in logical.parts.values():
            stored = checkpoint.read(name)
            if stored.dtype in wanted and stored.dim():
                yield name, stored


def _digest(name: str, value: Tensor, parts: dict[Key, list[tuple[str, Hashes]]], *, rounded: bool) -> None:
    """Add the row hashes of one source, rounded to each precision in which rows of its length are looked for."""
    kernel = torch.Size(value.shape[1:]).numel() if value.dim() >= 3 else -1
    for (dtype, length), sources in parts.items():
        if not value.numel() or length not in (value.shape[-1], kernel):
            continue
        exact = not rounded or not dtype.is_floating_point
        if value.is_floating_point() != dtype.is_floating_point or (exact and value.dtype != dtype):
            continue
        held = value.to(dtype)
        # A convolution kernel may be held as a matrix.
        sources.append((name, row_hashes(held if value.shape[-1] == length else held.flatten(1))))


def _best(item: Pending, tables: Mapping[Key, RowTable]) -> tuple[bool, int]:
    """Return whether columns explain more than rows, and how many elements remain unexplained."""
    by_rows = int((~tables[item.dtype, item.shape[-1]].found(item.rows)).sum()) * item.shape[-1]
    if item.columns is None or not by_rows:
        return False, by_rows
    by_columns = int((~tables[item.dtype, item.shape[-2]].found(item.columns)).sum()) * item.shape[-2]
    return by_columns < by_rows, min(by_rows, by_columns)


def _answer(item: Pending, tables: Mapping[Key, RowTable]) -> tuple[Answer, tuple[Key, Ints] | None]:
    transposed, unmatched = _best(item, tables)
    key = (item.dtype, item.shape[-2] if transposed else item.shape[-1])
    wanted = item.columns if transposed and item.columns is not None else item.rows
    table = tables[key]
    if unmatched >= item.numel:
        return Answer(unmatched=unmatched, ambiguous_rows=item.constant_rows, order="", regular=False), None
    order = find_order(wanted, table)
    found = Answer(
        unmatched=unmatched,
        ambiguous_rows=0 if transposed else item.constant_rows,
        order=_order_json(order, wanted, table, transposed),
        regular=order is not None and _regular(order, table),
        ascending=order is None or all(_ascending([r.source for r in s if r.source]) for s in order.streams),
    )
    return found, (key, table.positions(wanted))


def _order_json(order: Order | None, wanted: Hashes, table: RowTable, transposed: bool) -> str:
    if order is not None:
        streams = [[[r.source, r.start, r.count] for r in s] for s in order.streams]
        return json.dumps({"transposed": transposed, "stride": order.stride, "streams": streams})
    at = np.searchsorted(table.ordered, wanted).clip(max=len(table.ordered) - 1)
    rows = np.where(table.ordered[at] == wanted, table.order[at], -1).astype("<i8")
    names = "\0".join(table.sources).encode()
    digest = hashlib.blake2b(names + rows.tobytes(), digest_size=16).hexdigest()
    return json.dumps({"transposed": transposed, "permutation": digest})


def _regular(order: Order, table: RowTable) -> bool:
    """Say whether every source is taken whole, and sources that differ by a number only come in ascending order."""
    sizes = {n: int(table.starts[i + 1] - table.starts[i]) for i, n in enumerate(table.sources)}
    for stream in order.streams:
        if any(r.source == "" or r.start or r.count != sizes[r.source] for r in stream):
            return False
    return all(_ascending([r.source for r in stream]) for stream in order.streams)


def _ascending(names: Sequence[str]) -> bool:
    """Say whether sources that differ only by a number first come in ascending order."""
    last: dict[str, tuple[int, ...]] = {}
    for name in dict.fromkeys(names):
        template = re.sub(r"\d+", "#", name)
        numbers = tuple(int(d) for d in re.findall(r"\d+", name))
        if template in last and numbers <= last[template]:
            return False
        last[template] = numbers
    return True


def _joined_vectors(item: Pending, vectors: Mapping[str, Tensor]) -> tuple[Answer, list[str]] | None:
    """Explain a small weight as stored vectors one after the other (fused biases)."""
    value = item.small
    if value is None or not value.is_floating_point():
        return None
    rounded = {n: v.to(value.dtype) for n, v in vectors.items() if len(v) <= len(value) and v.is_floating_point()}
    runs: list[Run] = []
    at = unmatched = 0
    while at < len(value):
        rest = value[at:]
        fits = [
            n for n, v in rounded.items() if v[0] == rest[0] and len(v) <= len(rest) and torch.equal(v, rest[: len(v)])
        ]
        if fits:
            name = max(fits, key=lambda n: len(rounded[n]))
            runs.append(Run(source=name, start=0, count=len(rounded[name])))
            at += len(rounded[name])
            continue
        if unmatched > 64:  # not put together from vectors
            return None
        unmatched += 1
        at += 1
    if not runs:
        return None
    names = [r.source for r in runs]
    ascending = _ascending(names)
    order = json.dumps({"joined": [[r.source, r.start, r.count] for r in runs]})
    return Answer(unmatched=unmatched, ambiguous_rows=0, order=order, regular=ascending, ascending=ascending), names
