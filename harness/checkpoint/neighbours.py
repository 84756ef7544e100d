"""Readings of a quantised weight with a part of another tensor: its neighbour's scales, codes, or global scale.

Knows names and stored parts. Neighbours are those that a loader can take by mistake: the same part of another expert,
layer or projection. They are read one at a time, only as far as they are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import Tensor

from harness.checkpoint.causes import Mistake, Stored, stored_weight
from harness.checkpoint.formats import Logical
from harness.checkpoint.ledger import Ledger
from harness.errors import CheckpointError

MOST = 12
"""Neighbours that are tried."""
_NUMBER = re.compile(r"\d+")
_ROLES = (("scale", "the scales"), ("global", "the global scale"), ("zero", "the zero points"), ("weight", "the codes"))


def beside(audit: Ledger, logical: Logical, stored: Stored | None) -> Iterator[Mistake]:
    """Yield the weight as it reads with a part of each neighbour in place of its own."""
    parts = audit.parts(logical) if stored is not None else None
    if stored is None or parts is None:
        return
    for name in neighbours(logical, audit.logicals):
        other = audit.logicals[name]
        for role, what in _ROLES:
            if role in parts and role in other.parts:
                mistake = _with(audit, logical, parts, other, role, f"{what} of {name} (another tensor's)")
                if mistake is not None:
                    yield mistake


def neighbours(logical: Logical, logicals: Mapping[str, Logical]) -> list[str]:
    """Return weights of one format and shape whose names differ in one number or one word, the nearest first."""
    own, found = logical.name.split("."), []
    numbers = [int(n) for n in _NUMBER.findall(logical.name)]
    for other in _alike(logical, logicals):
        words = other.name.split(".")
        apart = [i for i, (a, b) in enumerate(zip(own, words, strict=True)) if a != b]
        if len(apart) == 1:
            distance = sum(abs(a - b) for a, b in zip(numbers, map(int, _NUMBER.findall(other.name)), strict=False))
            found.append((distance, other.name))
    return [name for _, name in sorted(found)][:MOST]


def _alike(logical: Logical, logicals: Mapping[str, Logical]) -> Iterator[Logical]:
    for other in logicals.values():
        same = other.format == logical.format and other.shape == logical.shape and not other.problem
        if same and other.name != logical.name and other.name.count(".") == logical.name.count("."):
            yield other


def _with(
    audit: Ledger, logical: Logical, parts: Mapping[str, Tensor], other: Logical, role: str, words: str
) -> Mistake | None:
    if audit.checkpoint.tensors[other.parts[role]].shape != tuple(parts[role].shape):
        return None
    try:
        foreign = audit.checkpoint.read(other.parts[role])
    except CheckpointError:
        return None
    changed = stored_weight(logical, {**parts, role: foreign})
    return Mistake(part=role, words=words, change=lambda _: changed) if changed is not None else None
