"""The cause of a difference, with all that an audit can read: stored parts, and those of neighbours. Knows no port.

A search costs more than a comparison, so that only so many are made, and fewer of the dear kind that tries two
mistakes at once and parts of neighbours: where a thousand weights are wrong in one way, the first ones tell it, and
what explained those is tried on the others.
"""

from __future__ import annotations

import re

from harness.checkpoint.causes import Pair, cause_of, stored_weight
from harness.checkpoint.formats import Logical
from harness.checkpoint.ledger import Ledger
from harness.checkpoint.neighbours import beside

_NUMBER = re.compile(r"\d+")
MOST_SEARCHES = 256
"""Weights whose cause is looked for, in the order in which a port shows them."""
MOST_DEEP = 6
"""Weights of one format and kind for which everything is tried."""


def reason(audit: Ledger, logical: Logical, pair: Pair, columns: tuple[int, int] | None = None) -> str:
    """Return what memory holds instead, in words after "memory holds"; "" where nothing is known of it.

    `columns`: the pair is of a slice of the weight's columns only.
    """
    audit.searches += 1
    if audit.searches > MOST_SEARCHES:
        return ""
    parts = audit.parts(logical)
    stored = stored_weight(logical, parts) if parts is not None and columns is None else None
    kind = f"{logical.format} {_NUMBER.sub('#', logical.name)}"
    audit.deep[kind] += 1
    if audit.deep[kind] <= MOST_DEEP:
        found = cause_of(pair, stored=stored, beside=beside(audit, logical, stored))
    else:
        found = cause_of(pair, stored=stored, pairs=audit.causes)
    if found is not None and found.exact:
        audit.causes.add(found.words)
    return found.words if found is not None else ""
