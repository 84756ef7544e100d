"""Whether both sides isolated the same piece in a replay. Knows tap names and what was overwritten; knows no limits.

A replay overwrites the taps that a port shows. Where the reference was overwritten inside a unit and the port was not
(it is compiled, or fuses parts), what comes behind that place in the unit holds more of the port's roundings than of
the floor's: the two cannot be compared at that level. A shallower level, which overwrites less, judges the unit; the
shallowest always does.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare.subject import Scene
from harness.taps import DECISION_KINDS, is_input, layer_of, unit_of


def not_isolated(scene: Scene) -> frozenset[str]:
    """Return the taps whose values this replay cannot compare: none in one of layers, or on the port's own values."""
    theirs, mine = scene.oracle.facts.get("pinned"), scene.accel.facts.get("pinned")
    if scene.run.level <= 1 or scene.run.pin_role == "accel" or theirs is None or mine is None:
        return frozenset()
    both = frozenset(theirs) & frozenset(mine)
    lost = [t for t in theirs if t not in both and layer_of(t) != t and not _decides(scene, t)]
    found: set[str] = set()
    for place in lost:
        outer = next((u for u in _around(place) if u in both), layer_of(place))
        behind = scene.order.get(place, 0)
        found |= {
            name for name, order in scene.order.items()
            if order > behind and (unit_of(name) == outer or unit_of(name).startswith(outer + "."))
        }  # fmt: skip
    return frozenset(found)


def _decides(scene: Scene, tap: str) -> bool:
    """Decisions that were not overwritten are dealt with by looking at tokens that agree."""
    return tap in scene.oracle.taps and scene.oracle.taps[tap].kind in DECISION_KINDS


def _around(tap: str) -> Sequence[str]:
    """Return the units around a tap, the innermost first; a unit's input lies inside of it."""
    parts = unit_of(tap).split(".")
    return [".".join(parts[:i]) for i in range(len(parts) if is_input(tap) else len(parts) - 1, 0, -1)]
