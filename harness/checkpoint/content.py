"""Find by content which checkpoint tensors a weight was put together from. Knows rows and decoders, no port.

Holds row digests (eight bytes a row) instead of tensors, so memory stays a small fraction of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.checkpoint.answers import Answer, answer_of, best, joined_vectors
from harness.checkpoint.container import Checkpoint
from harness.checkpoint.formats import Logical, decode
from harness.checkpoint.pending import Key, Pending
from harness.checkpoint.rows import Hashes, RowTable, row_hashes
from harness.checkpoint.slices import cut_name, cut_of
from harness.errors import CheckpointError

_VECTORS = 1 << 26
"""Bytes of vectors that are kept to recognise fused biases."""
_NARROWEST, _MOST = 4, 64
"""Columns of a slice, and slices of a matrix, that are looked for."""


class Digest(Protocol):
    """What adds the digests of one source to the tables of the lengths that are looked for."""

    def __call__(self, name: str, value: Tensor, parts: dict[Key, list[tuple[str, Hashes]]], *, rounded: bool) -> None:
        """Digest one decoded tensor; `rounded`: it may be rounded to the dtype of memory first."""


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
    for more, digest in _second_thoughts(pending, first, second):
        # What is mostly known already is no slice: its few wrong rows are not looked for in slices of everything.
        enough = 0.5 if digest is _slices_of else 0.0
        open_keys = set().union(*(p.keys() for p in pending if best(p, tables)[1] > enough * p.numel))
        if not open_keys:
            break
        _collect(checkpoint, more, {k: parts[k] for k in open_keys}, vectors, errors, digest)
        tables |= {k: RowTable.build(parts[k]) for k in open_keys}
    marks = {k: np.zeros(len(t.hashes), dtype=bool) for k, t in tables.items()}
    result = Explained()
    for item in pending:
        answer, positions = answer_of(item, tables)
        if answer.unmatched and item.small is not None:
            joined = joined_vectors(item, vectors)
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


def _second_thoughts(
    pending: Sequence[Pending], first: Sequence[Logical], second: Sequence[Logical]
) -> list[tuple[list[Logical], Digest]]:
    """Order what else is looked at: whole copies of what is used already (a tied head) are likely and cheap.

    Then come slices of columns (of a matrix cut over ranks along its input), and rows of all that is used already.
    """
    shapes = {p.shape for p in pending}
    likely, rest = ([x for x in second if (x.shape in shapes) is same] for same in (True, False))
    return [(likely, _rows_of), (list(first), _slices_of), (rest, _rows_of), ([*likely, *rest], _slices_of)]


def _count_hits(table: RowTable, mark: NDArray[np.bool_], hits: dict[str, tuple[int, int]]) -> None:
    """Count the rows used of each source; slices of one tensor count together, each row of one as its share."""
    now: dict[str, tuple[int, int]] = {}
    for i, name in enumerate(table.sources):
        part = mark[table.starts[i] : table.starts[i + 1]]
        base, columns = cut_of(name)
        if columns is not None:
            hit, rows = now.get(base, (0, 0))
            now[base] = hit + int(part.sum()), rows + len(part)
        elif part.any():
            now[name] = int(part.sum()), len(part)
    for name, count in now.items():
        if count[0]:
            # The same tensor may be a source in several precisions or lengths; the fullest use counts.
            hits[name] = max(hits.get(name, (0, 0)), count, key=lambda h: h[0] / max(1, h[1]))


def _collect(
    checkpoint: Checkpoint,
    logicals: Iterable[Logical],
    parts: dict[Key, list[tuple[str, Hashes]]],
    vectors: dict[str, Tensor],
    errors: dict[str, str],
    digest: Digest | None = None,
) -> None:
    """Digest the rows of each source in every precision and length that is looked for; the rest is not even read."""
    digest = digest or _rows_of
    lengths = {length for _, length in parts}
    for logical in logicals:
        if logical.problem or not _may_match(checkpoint, logical, lengths, digest):
            continue
        try:
            for name, value in _sources(checkpoint, logical, {dtype for dtype, _ in parts}):
                digest(name, value, parts, rounded=name == logical.name)
                kept = sum(v.nbytes for v in vectors.values()) if value.dim() == 1 else 0
                if value.dim() == 1 and value.numel() >= 2 and name == logical.name and kept + value.nbytes <= _VECTORS:
                    vectors[name] = value
        except CheckpointError as error:
            errors[logical.name] = str(error)


def _may_match(checkpoint: Checkpoint, logical: Logical, lengths: set[int], digest: Digest) -> bool:
    """Say from shapes alone whether rows of a length that is looked for can be in a weight."""
    shapes = [logical.shape, *(checkpoint.tensors[n].shape for n in logical.parts.values())]
    if len(logical.shape) <= 1:
        return True
    if digest is _slices_of:
        return any(_slices(logical.shape[-1], length) for length in lengths)
    return any(s and (s[-1] in lengths or prod(s[1:]) in lengths) for s in shapes)


def _sources(checkpoint: Checkpoint, logical: Logical, wanted: set[torch.dtype]) -> Iterator[tuple[str, Tensor]]:
    """Yield a weight decoded, and its stored parts where memory holds something of that very type."""
    value = decode(checkpoint, logical, widen=False)
    yield logical.name, value.reshape(1) if value.dim() == 0 else value
    if logical.quantised:
        for name in logical.parts.values():
            stored = checkpoint.read(name)
            if stored.dtype in wanted and stored.dim():
                yield name, stored


def _rows_of(name: str, value: Tensor, parts: dict[Key, list[tuple[str, Hashes]]], *, rounded: bool) -> None:
    """Add the row hashes of one source, rounded to each precision in which rows of its length are looked for."""
    kernel = torch.Size(value.shape[1:]).numel() if value.dim() >= 3 else -1
    for (dtype, length), sources in parts.items():
        if value.numel() and length in (value.shape[-1], kernel) and _comparable(value, dtype, rounded=rounded):
            held = value.to(dtype)
            # A convolution kernel may be held as a matrix.
            sources.append((name, row_hashes(held if value.shape[-1] == length else held.flatten(1))))


def _slices_of(name: str, value: Tensor, parts: dict[Key, list[tuple[str, Hashes]]], *, rounded: bool) -> None:
    """Add the row hashes of equal slices of columns, where rows as long as a slice are looked for."""
    if value.dim() < 2 or not rounded:
        return
    for (dtype, length), sources in parts.items():
        if _slices(value.shape[-1], length) and _comparable(value, dtype, rounded=rounded):
            held = value.to(dtype)
            for start in range(0, value.shape[-1], length):
                sources.append((cut_name(name, start, start + length), row_hashes(held[..., start : start + length])))


def _slices(width: int, length: int) -> int:
    """Return into how many equal slices a width is cut, 0 for none that is usual."""
    return width // length if length >= _NARROWEST and width % length == 0 and 2 <= width // length <= _MOST else 0


def _comparable(value: Tensor, dtype: torch.dtype, *, rounded: bool) -> bool:
    exact = not rounded or not dtype.is_floating_point
    return value.is_floating_point() == dtype.is_floating_point and not (exact and value.dtype != dtype)
