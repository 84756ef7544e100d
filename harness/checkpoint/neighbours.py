"""Readings of a quantised weight with a part of another tensor: its neighbour's scales, codes, or global scale.

Knows names and stored parts. Neighbours are those that a loader can take by mistake: the same part of another expert,
layer or projection. They are read one at a time, only as far as they are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from harness.checkpoint.causes import Mistake, Stored, stored_weight
from harness.checkpoint.formats import Logical
from harness.checkpoint.ledger import Ledger
from harness.errors import CheckpointError

MOST = 12
"""Neighbours that are tried."""
_NUMBER = re.compile(r"\d+")
_STEPS = (1, -1, 2, -2, 3, -3)
_ROLES = (("scale", "the scales"), ("global", "the global scale"), ("zero", "the zero points"), ("weight", "the codes"))


def beside(audit: Ledger, logical: Logical, stored: Stored | None) -> Iterator[Mistake]:
    """Yield the weight as it reads with a part of each neighbour in place of its own."""
    parts = audit.parts(logical) if stored is not None else None
    if stored is None or parts is None:
        return
    for name in neighbours(logical, audit.logicals, audit.kinds()):
        other = audit.logicals[name]
        for role, what in _ROLES:
            if role in parts and role in other.parts:
                mistake = _with(audit, logical, parts, other, role, f"{what} of {name} (another tensor's)")
                if mistake is not None:
                    yield mistake


def neighbours(logical: Logical, logicals: Mapping[str, Logical], kinds: Iterable[str]) -> list[str]:
    """Return weights of one format and shape whose names differ in one number or one word, the nearest first.

    `kinds`: the names of all weights without their numbers (`#` for each), once.
    """
    template, numbers = _NUMBER.sub("#", logical.name), _NUMBER.findall(logical.name)
    names = []
    for step in _STEPS:
        for i, number in enumerate(numbers):
            names.append(_filled(template, [*numbers[:i], str(int(number) + step), *numbers[i + 1 :]]))
    own = template.split(".")
    for kind in kinds:
        words = kind.split(".")
        alike = len(words) == len(own) and kind.count("#") == len(numbers)
        if alike and sum(a != b for a, b in zip(own, words, strict=True)) == 1:
            names.append(_filled(kind, numbers))
    found = (logicals[n] for n in names if n in logicals)
    return [x.name for x in found if (x.format, x.shape, x.problem) == (logical.format, logical.shape, "")][:MOST]


def _filled(template: str, numbers: Sequence[str]) -> str:
    given = iter(numbers)
    return re.sub("#", lambda _: next(given), template)


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
