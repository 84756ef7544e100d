"""Say of one weight which rows it is made of, and in which order. Knows digests of rows; reads no checkpoint.

Rows of zeros after the last row of a tensor are padding: they are counted, and nothing that is missing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harness.checkpoint.pending import Key, Pending, Reading
from harness.checkpoint.rows import Hashes, Ints, Order, RowTable, Run, find_order, row_hashes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Where one weight comes from. `unmatched` counts elements of rows that no source has.

    `padding_rows`: rows of zeros after the last row of a tensor. `note`: what else is odd, in words.
    """

    unmatched: int
    ambiguous_rows: int
    order: str
    regular: bool
    ascending: bool = True
    padding_rows: int = 0
    note: str = ""


def best(item: Pending, tables: Mapping[Key, RowTable]) -> tuple[Reading, int]:
    """Return the reading that explains most, and how many elements remain unexplained."""
    left = [int((~tables[item.dtype, r.length].found(r.hashes)).sum()) * r.length for r in item.readings]
    least = left.index(min(left))
    return item.readings[least], left[least]


def answer_of(item: Pending, tables: Mapping[Key, RowTable]) -> tuple[Answer, tuple[Key, Ints] | None]:
    """Return what one weight is made of, and which rows of which table it uses."""
    reading, unmatched = best(item, tables)
    key, wanted = (item.dtype, reading.length), reading.hashes
    table = tables[key]
    if unmatched >= len(wanted) * reading.length:
        return Answer(unmatched=item.numel, ambiguous_rows=item.constant_rows, order="", regular=False), None
    order = find_order(wanted, table)
    padding, inserted = 0, ""
    if order is not None:
        order, padding, inserted = _padding(order, wanted, table, item.dtype, reading.length)
    found = Answer(
        unmatched=unmatched - padding * reading.length,
        ambiguous_rows=0 if reading.transposed else item.constant_rows,
        order=_order_json(order, wanted, table, reading),
        regular=order is not None and _regular(order, table),
        ascending=order is None or all(is_ascending([r.source for r in s if r.source]) for s in order.streams),
        padding_rows=padding,
        note=inserted,
    )
    return found, (key, table.positions(wanted))


def _padding(order: Order, wanted: Hashes, table: RowTable, dtype: torch.dtype, length: int) -> tuple[Order, int, str]:
    """Mark the rows of zeros that follow the last row of a tensor (start -1), count them; name those within one."""
    zero = row_hashes(torch.zeros(1, length).to(dtype))[0]
    padding, words, streams = 0, "", []
    for offset, stream in enumerate(order.streams):
        mine, at, runs = wanted[offset :: order.stride], 0, list(stream)
        for i, run in enumerate(stream):
            if i and run.source == "" and bool((mine[at : at + run.count] == zero).all()):
                before, after = stream[i - 1], stream[i + 1] if i + 1 < len(stream) else None
                if before.start + before.count == table.rows_of(before.source):
                    padding += run.count
                    runs[i] = Run(source="", start=-1, count=run.count)
                elif after is not None and (after.source, after.start) == (before.source, before.start + before.count):
                    words = f"{run.count} rows of zeros within {before.source} (padded after it was cut in slices)"
            at += run.count
        streams.append(tuple(runs))
    return Order(stride=order.stride, streams=tuple(streams)), padding, words


def _order_json(order: Order | None, wanted: Hashes, table: RowTable, reading: Reading) -> str:
    said: dict[str, object] = {"transposed": reading.transposed}
    if reading.cut:
        said["padded_columns"] = reading.cut
    if order is not None:
        streams = [[[r.source, r.start, r.count] for r in s] for s in order.streams]
        return json.dumps({**said, "stride": order.stride, "streams": streams})
    at = np.searchsorted(table.ordered, wanted).clip(max=len(table.ordered) - 1)
    rows = np.where(table.ordered[at] == wanted, table.order[at], -1)
    source = np.searchsorted(table.starts, rows, side="right") - 1
    state = hashlib.blake2b(digest_size=16)
    for i in np.unique(source):
        name = table.sources[i] if i >= 0 else ""
        state.update(f"\0{name}\0".encode() + np.flatnonzero(source == i).astype("<i8").tobytes())
        state.update((rows[source == i] - (table.starts[i] if i >= 0 else 0)).astype("<i8").tobytes())
    return json.dumps({**said, "permutation": state.hexdigest()})


def _regular(order: Order, table: RowTable) -> bool:
    """Say whether every source is taken whole, and sources that differ by a number only come in ascending order."""
    sizes = {n: int(table.starts[i + 1] - table.starts[i]) for i, n in enumerate(table.sources)}
    for stream in order.streams:
        if any(r.start != -1 and (r.source == "" or r.start or r.count != sizes[r.source]) for r in stream):
            return False
    return all(is_ascending([r.source for r in stream if r.source]) for stream in order.streams)


def is_ascending(names: Sequence[str]) -> bool:
    """Say whether sources that differ only by a number first come in ascending order."""
    last: dict[str, tuple[int, ...]] = {}
    for name in dict.fromkeys(names):
        template = re.sub(r"\d+", "#", name)
        numbers = tuple(int(d) for d in re.findall(r"\d+", name))
        if template in last and numbers <= last[template]:
            return False
        last[template] = numbers
    return True


def joined_vectors(item: Pending, vectors: Mapping[str, Tensor]) -> tuple[Answer, list[str]] | None:
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
    ascending = is_ascending(names)
    order = json.dumps({"joined": [[r.source, r.start, r.count] for r in runs]})
    return Answer(unmatched=unmatched, ambiguous_rows=0, order=order, regular=ascending, ascending=ascending), names
