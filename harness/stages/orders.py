"""How a weight was put together, in words and for comparison. Knows orders that an audit tells; no limits or files."""

from __future__ import annotations

import json
import re
from typing import Any


def template(name: str) -> str:
    """Return a name with its numbers taken out."""
    return re.sub(r"\d+", "#", name)


def layerless(order: str) -> str:
    """Return an order without the number of the layer that its sources lie in."""
    return re.sub(r"\b(layers|blocks|h)\.\d+\.", r"\1.#.", order)


def order_words(order: str) -> str:
    """Return an order as a person reads it: `rows 0-63 of q_proj.weight, rows 0-15 of k_proj.weight`."""
    value = json.loads(order)
    runs = [run for stream in value.get("streams", []) for run in stream]
    if not runs:
        return str(value.get("how") or value.get("joined") or order[:120])
    parts = [f"rows {start}-{start + count - 1} of {source or 'nothing known'}" for source, start, count in runs[:4]]
    more = [f"{len(runs) - 4} more"] if len(runs) > 4 else []
    return ", ".join([*parts, *more]) + (", transposed" if value.get("transposed") else "")


def canonical(order: str) -> Any:
    """Return an order for comparison: a reshape keeps the order of the elements."""
    value = json.loads(order)
    return {"how": "same"} if value.get("how") in ("reshape", "padded") else value


def sources(order: str) -> int:
    """Count the tensors that an order takes rows of."""
    value = json.loads(order)
    runs = [r for stream in value.get("streams", [value.get("joined", [])]) for r in stream]
    return len({r[0] for r in runs})
