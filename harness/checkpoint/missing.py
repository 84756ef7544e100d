"""Which tensor belongs where an audit found none: in the gaps of merged weights, in weights never filled. No values.

Attributing a tensor keeps it from being told twice: once as wrong where it belongs, and once as used nowhere.
"""

from __future__ import annotations

import dataclasses
import json
import re

from harness.checkpoint.fact import WeightFact, only_source, order_runs, several
from harness.checkpoint.formats import Logical
from harness.checkpoint.gaps import due_rows
from harness.checkpoint.ledger import Ledger
from harness.checkpoint.paired import pairs
from harness.checkpoint.slices import cut_name, cut_of

_NUMBER = re.compile(r"\d+")
_LAYER = re.compile(r"(^|\.)(?:layers|blocks|h)\.(\d+)\.")


def attribute_gaps(audit: Ledger, hit: set[str]) -> None:
    """Find what belongs where merged weights hold rows of none, among tensors that are nowhere else."""
    taken = audit.used | hit
    for at, fact in enumerate(audit.facts):
        if fact.match != "content" or not fact.unmatched or not fact.order:
            continue
        dues = due_rows(fact.order, _candidates(audit, fact, taken))
        if dues:
            audit.dues[at] = dues
            names = list(dict.fromkeys(due.source for due in dues))
            taken |= {cut_of(name)[0] for name in names}
            audit.used |= {cut_of(name)[0] for name in names}
            audit.facts[at] = dataclasses.replace(fact, source=several(names))


def _candidates(audit: Ledger, fact: WeightFact, taken: set[str]) -> dict[str, int]:
    """Return the rows of each tensor that is in an order already, or lies in its layer and is nowhere else."""
    length = row_length(fact)
    named = {str(run[0]) for run in order_runs(fact.order)} - {""}
    inside = {cut_of(name)[0] for name in named}
    layers = {_layer(name) for name in inside}
    kinds = {_NUMBER.sub("#", name) for name in inside}
    cuts = {columns for name in named if (columns := cut_of(name)[1]) is not None}
    rows: dict[str, int] = {}
    for x in audit.logicals.values():
        known = x.name in inside or (bool(cuts) and _NUMBER.sub("#", x.name) in kinds)
        if x.problem or not x.shape or _layer(x.name) not in layers or (x.name in taken and not known):
            continue
        if _has_rows(x, length):
            rows[x.name] = x.numel // length
        elif x.shape[-1] % length == 0:
            count = x.numel // x.shape[-1]
            rows |= {cut_name(x.name, *columns): count for columns in cuts if columns[1] <= x.shape[-1]}
    return rows


def row_length(fact: WeightFact) -> int:
    """Return how long the rows are that an order tells of: columns where it is transposed, less any padding."""
    order = json.loads(fact.order)
    return fact.shape[-2 if order.get("transposed") else -1] - int(order.get("padded_columns", 0))


def _has_rows(logical: Logical, length: int) -> bool:
    shape = logical.shape
    return (
        bool(shape) and length > 0 and (shape[-1] == length or (len(shape) > 2 and logical.numel == shape[0] * length))
    )


def _layer(name: str) -> str:
    found = _LAYER.search(name)
    return found.group(2) if found else ""


def pair_the_rest(audit: Ledger) -> None:
    """Name the tensor that each weight without one should have come from, as its siblings in other layers did."""
    pending = dict(audit.pending)
    unfilled = {f.name: i for i, f in enumerate(audit.facts) if f.match == "none" and not f.source and i in pending}
    unused = {
        x.name: x.shape for x in audit.logicals.values() if x.name not in audit.used and x.name not in audit.errors
    }  # fmt: skip
    known = [(f.name, source) for f in audit.facts if (source := only_source(f))]
    found = pairs({n: audit.facts[i].shape for n, i in unfilled.items()}, known, unused)
    guessed = {n: g for n, g in audit.guesses.items() if n in unfilled and g in unused and g not in found.values()}
    for name, source in {**guessed, **found}.items():
        at = unfilled[name]
        audit.facts[at] = dataclasses.replace(audit.facts[at], due=source)
