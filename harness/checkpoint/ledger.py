"""What one audit knows so far: facts of weights, tensors used, what is still looked for. Knows no rule of judgement."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.fact import WeightFact
from harness.checkpoint.formats import Logical
from harness.checkpoint.gaps import Due
from harness.checkpoint.near import Near
from harness.checkpoint.pending import Pending

_NUMBER = re.compile(r"\d+")
KEPT = 1 << 26
"""Bytes of small weights that may be kept: fused biases are recognised by them."""


@dataclass(slots=True)
class Ledger:
    """The state of one pass over the weights."""

    checkpoint: Checkpoint
    logicals: dict[str, Logical]
    suffixes: dict[str, str | None]
    owners: dict[str, str]
    float32_is_rare: bool
    near: Near | None = None
    facts: list[WeightFact] = field(default_factory=list)
    pending: list[tuple[int, Pending]] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    raw_used: set[str] = field(default_factory=set)
    errors: dict[str, str] = field(default_factory=dict)
    searches: int = 0
    deep: Counter[str] = field(default_factory=Counter)
    """By kind of weight: causes that everything was tried for."""
    causes: set[str] = field(default_factory=set)
    """Words of causes that explained a weight."""
    assembled: int = 0
    kept: int = 0
    """Bytes of small weights that are kept as they are."""
    guesses: dict[str, str] = field(default_factory=dict)
    """For a weight that differs from the one tensor whose name ends as its own does: that tensor."""
    _kinds: dict[str, list[Logical]] = field(default_factory=dict)
    dues: dict[int, list[Due]] = field(default_factory=dict)
    """By the number of a fact: rows of tensors that belong where no row of the checkpoint is."""

    def kinds(self) -> dict[str, list[Logical]]:
        """Return all weights by their names without numbers (`#` for each); worked out once."""
        if not self._kinds:
            for x in self.logicals.values():
                self._kinds.setdefault(_NUMBER.sub("#", x.name), []).append(x)
        return self._kinds

    def parts(self, logical: Logical) -> dict[str, Tensor] | None:
        """Read a quantised weight as it is stored, by role; None for one that is stored as it is."""
        if not logical.quantised:
            return None
        return {role: self.checkpoint.read(name) for role, name in logical.parts.items()}
