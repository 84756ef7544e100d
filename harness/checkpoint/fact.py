"""What is known of one weight in memory, as a record. Knows no tensors: numbers, names and orders as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.checkpoint.slices import cut_of

_FEW = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFact:
    """What is known of one weight in memory. Counts are elements unless they say otherwise.

    `match`: named (compared with `source`), raw (stored bytes as they are), content (made of checkpoint rows), derived
    (a buffer that is computed, by the stated `rule` if one is known) or none. `mismatches` are elements that differ
    from the named tensor; `unmatched` those that come from no checkpoint row either, `pattern` what they look like.
    `order` is where the rows come from, as JSON; `regular` says whether sources are whole and numbered ascending,
    `ascending` the latter alone. `due` is the tensor that an unfilled weight should have come from, as far as that is
    clear. `narrowed`: stored in float32 as an exception, held narrower. `computed`: the port says it fills it itself.

    Where the first wrong element belongs on disk: `source`, `file` and `offset` in it; `first` is its index in memory,
    `first_row` that of its row in the source. A weight made of several tensors names in `source` those that are wrong.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    match: str
    source: str = ""
    claimed: bool = False
    computed: bool = False
    lossless: bool = True
    mismatches: int = 0
    unmatched: int = 0
    max_ulp: float = 0.0
    worst: tuple[int, ...] = ()
    first: tuple[int, ...] = ()
    first_row: int | None = None
    file: str = ""
    offset: int | None = None
    expected: str = ""
    found: str = ""
    relative_error: str = ""
    pattern: str = ""
    nonfinite: int = 0
    padding_rows: int = 0
    ambiguous_rows: int = 0
    order: str = ""
    due: str = ""
    rule: str = ""
    regular: bool = True
    ascending: bool = True
    narrowed: bool = False
    digests: Mapping[str, str] = field(default_factory=dict)


def several(names: Iterable[str]) -> str:
    """Return names as one text, the first few of many."""
    given = list(names)
    return ", ".join(given[:_FEW]) + (f", ... ({len(given)} in all)" if len(given) > _FEW else "")


def order_runs(order: str) -> list[list[Any]]:
    """Return the runs [source, start, count] of an order, all streams in one list."""
    value = json.loads(order) if order else {}
    return [run for stream in value.get("streams", []) for run in stream]


def order_sources(order: str) -> set[str]:
    """Return the tensors that an order takes rows of, whole or in slices of columns."""
    return {cut_of(str(run[0]))[0] for run in order_runs(order)} - {""}


def only_source(fact: WeightFact) -> str:
    """Return the one tensor that a weight was filled from whole, or an empty string."""
    if fact.match == "named" and not fact.mismatches:
        return fact.source
    sources = order_sources(fact.order) if fact.match == "content" and not fact.unmatched else set()
    if any(cut_of(str(run[0]))[1] is not None for run in order_runs(fact.order)):
        return ""
    return next(iter(sources)) if len(sources) == 1 else ""
