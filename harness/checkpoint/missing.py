"""Which tensor belongs where an audit found none: in the gaps of merged weights, in weights never filled. No values.

Attributing a tensor keeps it from being told twice: once as wrong where it belongs, and once as used nowhere.
"""

from __future__ import annotations

import dataclasses
import json
import re

from harness.checkpoint.fact import WeightFact, only_source, order_sources, several
from harness.checkpoint.formats import Logical
from harness.checkpoint.gaps import due_rows
from harness.checkpoint.ledger import Ledger
from harness.checkpoint.paired import pairs

_LAYER = re.compile(r"(^|\.)(?:layers|blocks|h)\.(\d+)\.")


def attribute_gaps(audit: Ledger, hit: set[str]) -> None:
    """Find what belongs where merged weights hold rows of none, among tensors that are nowhere else."""
    taken = audit.used | hit
    for at, fact in enumerate(audit.facts):
        if fact.match != "content" or not fact.unmatched or not fact.order:
            continue
        length = row_length(fact)
        inside = order_sources(fact.order)
        layers = {_layer(s) for s in inside}
        rows = {
            x.name: x.numel // length
            for x in audit.logicals.values()
            if not x.problem and (x.name in inside or (x.name not in taken and _layer(x.name) in layers))
            and _has_rows(x, length)
        }  # fmt: skip
        dues = due_rows(fact.order, rows)
        if dues:
            audit.dues[at] = dues
            names = list(dict.fromkeys(due.source for due in dues))
            taken |= set(names)
            audit.used |= set(names)
            audit.facts[at] = dataclasses.replace(fact, source=several(names))


def row_length(fact: WeightFact) -> int:
    """Return how long the rows are that an order tells of: a transposed weight's are its columns."""
    return fact.shape[-2 if json.loads(fact.order).get("transposed") else -1]


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
