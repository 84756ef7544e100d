"""The cause of a difference, with all that an audit can read: stored parts, and those of neighbours. Knows no port.

A search costs more than a comparison, so that only so many are made: where a thousand weights are wrong in one way, the
first hundred tell it.
"""

from __future__ import annotations

from harness.checkpoint.causes import Pair, cause_of, stored_weight
from harness.checkpoint.formats import Logical
from harness.checkpoint.ledger import Ledger
from harness.checkpoint.neighbours import beside

MOST_SEARCHES = 256
"""Weights whose cause is looked for, in the order in which a port shows them."""


def reason(audit: Ledger, logical: Logical, pair: Pair, columns: tuple[int, int] | None = None) -> str:
    """Return what memory holds instead, in words after "memory holds"; "" where nothing is known of it.

    `columns`: the pair is of a slice of the weight's columns only.
    """
    audit.searches += 1
    if audit.searches > MOST_SEARCHES:
        return ""
    parts = audit.parts(logical)
    stored = stored_weight(logical, parts) if parts is not None and columns is None else None
    found = cause_of(pair, stored=stored, beside=beside(audit, logical, stored))
    return found.words if found is not None else ""
