"""What a damage to files is, the table of all of them, and where they are put. Knows files; not how they are found out.

A damage says by what it must be seen at the latest: the headers (with index and configuration), one pass over the
content, a suspicion of that pass, or only a digest that somebody recorded before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.faults.catalogue import NoPlace
from harness.faults.disk.files import Coded, Files

CHECKS = ("headers", "content", "suspicion", "manifest")
"""From the cheapest to the one that needs to know more than the files."""
LAYER = 3
"""The layer that is damaged: one with neighbours on both sides."""
Inflict = Callable[[Files], list[str]]
"""Breaks the files it is given. Returns globs of the tensors or files of which a good report names one.

Raises NoPlace where the format has nothing that could be broken so.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One way in which a checkpoint goes wrong. `seen`: the check that must see it at the latest.

    `cause`: expressions of which one belongs into what is said of it.
    """

    name: str
    says: str
    seen: str
    cause: tuple[str, ...]
    inflict: Inflict


DAMAGES: dict[str, Damage] = {}
HARMLESS: dict[str, Damage] = {}
"""What is no damage: `seen` is empty, and `cause` the reason that a note gives, if any."""


def damage(seen: str, cause: str) -> Callable[[Inflict], Inflict]:
    """Add a function as a damage; `cause` holds expressions separated by `|`."""
    assert seen in CHECKS, seen
    return _adding(DAMAGES, seen, cause)


def harmless(reason: str = "") -> Callable[[Inflict], Inflict]:
    """Add a function as a harmless difference; `reason` is what a note must say, if it is worth one."""
    return _adding(HARMLESS, "", reason)


def _adding(table: dict[str, Damage], seen: str, cause: str) -> Callable[[Inflict], Inflict]:
    def add(inflict: Inflict) -> Inflict:
        name = inflict.__name__  # type: ignore[attr-defined]
        assert name not in DAMAGES, name
        assert name not in HARMLESS, name
        says = (inflict.__doc__ or "").strip().splitlines()[0]
        words = tuple(filter(None, cause.split("|")))
        table[name] = Damage(name=name, says=says, seen=seen, cause=words, inflict=inflict)
        return inflict

    return add


# --- places ---


def weights(
    files: Files, *, layer: int | None = LAYER, role: str = "weight", kinds: str = "expert linear"
) -> list[Coded]:
    """Return the weights of a layer (None: of all) that have a part of a role, experts first. Raises NoPlace."""
    found = [
        w for kind in kinds.split() for w in files.weights.values()
        if w.kind == kind and role in w.parts and (layer is None or layer_of(w.name) == layer)
    ]  # fmt: skip
    if not found:
        raise NoPlace(f"no {role} of {kinds.replace(' ', ' or ')} here")
    return found


def layer_of(name: str) -> int | None:
    """Return the number of the layer in a name."""
    return next((int(p) for p in name.split(".") if p.isdecimal()), None)


def a_matrix(files: Files) -> Coded:
    """Return a matrix of the damaged layer: the largest kind of projection, or one plainly stored."""
    try:
        return weights(files, kinds="linear expert")[0]
    except NoPlace:
        return weights(files, kinds="router")[0]


def quantised(files: Files, role: str = "scale") -> Coded:
    """Return a weight of the damaged layer that has a part of this role. Raises NoPlace."""
    return weights(files, role=role)[0]


def pair(files: Files, role: str = "weight") -> tuple[Coded, Coded]:
    """Return two weights of the damaged layer whose stored parts have the same shapes. Raises NoPlace."""
    found = weights(files, role=role)
    for i, a in enumerate(found):
        for b in found[i + 1 :]:
            if all(files.get(a.parts[r]).shape == files.get(b.parts[r]).shape for r in a.parts):
                return a, b
    raise NoPlace("no two weights of one shape in this layer")


def named(files: Files, end: str, layer: int | None = LAYER) -> str:
    """Return the stored tensor of the damaged layer whose name ends so. Raises NoPlace."""
    for tensors in files.shards.values():
        for name in tensors:
            if name.endswith(end) and (layer is None or layer_of(name) == layer):
                return name
    raise NoPlace(f"no {end} here")


def answers(weight: Coded) -> list[str]:
    """Return the names under which a good report may lead to a weight."""
    return [weight.name, *weight.parts.values(), f"{weight.name}[[]*"]
