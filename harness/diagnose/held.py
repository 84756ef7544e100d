"""What memory holds in a parameter's place, in words. Knows what the audit of weights tells; must not know limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_RUN = re.compile(r'\["([^"]*)", \d+, \d+\]')
_SURE = re.compile(
    r"permuted|tied, though|exchanged|interleaved|shifted|reversed|another tensor than its own|in the place of"
    r"|own bytes"
)
"""Patterns that say more than the order that was found."""
FEW = 3
"""Tensors that are named; the rest of a long order is left to the message."""


def held(detail: Mapping[str, Any]) -> str:
    """Return what a weight's measurement says that memory holds, in words after "memory holds"; "" if nothing.

    `detail` has the `order` in which rows of checkpoint tensors were found, the `source` that belongs there, and the
    `pattern` of values that come from no row.
    """
    order, source = str(detail.get("order", "")), str(detail.get("source", ""))
    found = list(dict.fromkeys(name for name in _RUN.findall(order) if name))
    pattern = str(detail.get("pattern") or "")
    if _SURE.search(pattern):
        return pattern
    if "permute" in order or '"transposed": true' in order:
        return "its tensor with axes exchanged: a transposition"
    if len(found) == 1 and source and found != [source] and "," not in source:
        return f"{found[0]}, another tensor than its own: names or order of the loader"
    woven = re.search(r'"stride": (\d+)', order)
    if len(found) == 1 and woven is not None and int(woven[1]) > 1:
        return "its own rows in another order, woven into each other: rotary halves against pairs, or a fused layout"
    return pattern


def joined(detail: Mapping[str, Any]) -> str:
    """Return how a parameter that is made of several tensors was put together, in words; "" where it is not."""
    order = str(detail.get("order", ""))
    found = list(dict.fromkeys(name for name in _RUN.findall(order) if name))
    if len(found) < 2:
        return ""
    woven = re.search(r'"stride": (\d+)', order)
    how = "rows by turns (interleaved) of" if woven is not None and int(woven[1]) > 1 else "the rows of"
    more = ", ..." if len(found) > FEW else ""
    return f"{how} {', '.join(found[:FEW])}{more}, in this order: the order of a fused weight"
