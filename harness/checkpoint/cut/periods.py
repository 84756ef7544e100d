"""Keys that say every how many layers something comes. Knows remainders; must not know what it is that comes.

A period still describes a cut where each chosen layer has the remainder of its new number, or where another period puts
the special layers in the same places. Whether the special one is the first or the last of each period is not guessed: a
list or the tensors must show it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from harness.checkpoint.cut.layers import spelt
from harness.checkpoint.names import tower

_PERIOD = re.compile(r"interval|freq|period|pattern|(layer|sparse)_step$|every|layers_per_|share_factor$")
_NOT = re.compile(r"rope_(theta|scaling|parameters|base|freq)|time_step|theta|base_freq|local_freq|max_period")


class Periods:
    """The periods of one configuration. `sets` are the sets of layers that lists and tensors show."""

    def __init__(self, layers: Sequence[int], depth: int, sets: Set[frozenset[int]]) -> None:
        self.layers, self.depth, self.sets = tuple(layers), depth, sets
        self.notes: list[str] = []
        self.open: dict[str, int] = {}

    def rewritten(
        self, config: Mapping[str, Any], result: Mapping[str, Any], owns: Callable[[Mapping[str, Any]], bool]
    ) -> dict[str, Any]:
        """Return an edited configuration with its periods edited too; those that no number says stay open."""
        new = dict(result)
        for key, value in config.items():
            if isinstance(value, dict) and isinstance(new.get(key), dict):
                within = tower(key) == "text" and "encoder" not in key and not _NOT.search(key)
                if within and (owns(config) or key.endswith("_config")):
                    new[key] = self.rewritten(value, new[key], owns)
            elif owns(config) and _is_period(key, value):
                new.update(self._one(key, value, config))
        return new

    def _one(self, key: str, period: int, owner: Mapping[str, Any]) -> dict[str, int]:
        """Return what to write for one period: nothing where it still holds, or cannot be said."""
        if all(layer % period == j % period for j, layer in enumerate(self.layers)):
            return {}
        if period > self.depth and self.layers[0] == 0:
            return {}  # nothing comes but, perhaps, the first
        offset_key = re.sub(r"period|interval|freq", "offset", key)
        offset = owner.get(offset_key) if offset_key != key else None
        shown = [offset % period] if isinstance(offset, int) else self.phases(period)
        if len(shown) == 1:
            wanted = [layer % period == shown[0] for layer in self.layers]
            for shorter in range(1, len(self.layers) + 2):
                for phase in range(shorter) if isinstance(offset, int) else self._like(shown[0], period, shorter):
                    if [j % shorter == phase for j in range(len(self.layers))] == wanted:
                        return {key: shorter, **({offset_key: phase} if isinstance(offset, int) else {})}
        self.open[key] = period
        return {}

    def _like(self, phase: int, period: int, shorter: int) -> list[int]:
        """Return where the special layer of another period is: the first of it, or the last, as it was."""
        return [shorter - 1] if phase == period - 1 else [0] if phase == 0 else []

    def phases(self, period: int) -> list[int]:
        """Return the remainders that lists or tensors show to be special."""
        everything = frozenset(range(self.depth))
        found = []
        for phase in range(min(period, self.depth)):
            special = frozenset(n for n in everything if n % period == phase)
            if special and (special in self.sets or everything - special in self.sets):
                found.append(phase)
        return found

    def settle(self, key: str, classes: Set[frozenset[int]]) -> None:
        """Take a list that is written out as the answer for each open period that it shows."""
        self.sets = classes
        for name, period in list(self.open.items()):
            if self.phases(period):
                del self.open[name]
                self.notes.append(f"{name} ({period}) no longer says which layers; {key} does")

    def refusals(self) -> list[str]:
        """Say for each open period what could be chosen instead."""
        if not self.open:
            return []
        every = math.lcm(*self.open.values())
        aligned = self._aligned(every)
        instead = [f"layers 0-{every - 1}"] if every <= self.depth else []
        instead += [f"layers {spelt(aligned)}"] if aligned else []
        keys = ", ".join(f"{key} = {value}" for key, value in self.open.items())
        keep = " or ".join(instead) or "the first layers without a gap"
        return [f"{keys} cannot say which of them are special; {keep} keep the pattern"]

    def _aligned(self, every: int) -> list[int]:
        """Return layers near the chosen ones whose remainders are those of their new numbers; none if there are not."""
        found: list[int] = []
        for j, layer in enumerate(self.layers):
            after = max(layer, found[-1] + 1 if found else 0)
            found.append(after + (j - after) % every)
        return found if found[-1] < self.depth else []


def _is_period(key: str, value: Any) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool) and value > 1
    return whole and bool(_PERIOD.search(key)) and not _NOT.search(key) and tower(key) == "text"
