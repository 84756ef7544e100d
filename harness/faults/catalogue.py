"""What an injection is, and the table of all of them. Knows records; must not know how one gets in or is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Inject = Callable[[Any], Iterable[str] | None]
"""Breaks (or harmlessly changes) what it is given: `harness.faults.parts.Parts` or `harness.faults.tapped.Tapped`.

Returns globs of the taps (or names of the weights) that a good report may lead with; the first is the best answer.
Raises NoPlace where the model has nothing that could be broken so.
"""

KINDS = ("fault", "benign")
NOTHING: Mapping[str, str] = {}


class NoPlace(ValueError):
    """The model has no place for an injection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One known mistake, or one harmless difference.

    `id` is that of the public catalogue of real faults, or the name where the kind is not listed there. `stages` are
    those that may say so first. `cause`: words of which one belongs into the finding. `needs`: what it sits in.
    `via`: module (hooks and wrapped parts of an nn.Module) or taps (what any adapter hands to its recorder).
    `declares`: formats that the port says it holds its numbers in, beside its dtype.
    """

    name: str
    id: str
    kind: str
    via: str
    inject: Inject
    says: str
    stages: tuple[str, ...] = ()
    cause: tuple[str, ...] = ()
    needs: str = ""
    declares: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A known mistake that cannot be injected yet, and why."""

    id: str
    says: str
    why: str


@dataclass(slots=True)
class Table:
    """Injections by name, in the order of their definition."""

    rows: dict[str, Injection] = field(default_factory=dict)

    def add(self, row: Injection) -> None:
        """Add an injection. Names are unique."""
        assert row.name not in self.rows, row.name
        self.rows[row.name] = row

    def of(self, kind: str, via: str) -> Mapping[str, Injection]:
        """Return the injections of one kind and one way."""
        return {name: row for name, row in self.rows.items() if (row.kind, row.via) == (kind, via)}


TABLE = Table()


def fault(
    id: str = "",
    *,
    stage: str = "text",
    cause: str = "",
    needs: str = "",
    via: str = "module",
    declares: Mapping[str, str] = NOTHING,
) -> Callable[[Inject], Inject]:
    """Add a function as a fault. `stage` and `cause` hold alternatives separated by `|`."""
    return _adding("fault", id, stage, cause, needs, via, declares)


def benign(
    id: str = "", *, needs: str = "", via: str = "module", declares: Mapping[str, str] = NOTHING
) -> Callable[[Inject], Inject]:
    """Add a function as a harmless difference."""
    return _adding("benign", id, "", "", needs, via, declares)


def _adding(
    kind: str, id: str, stage: str, cause: str, needs: str, via: str, declares: Mapping[str, str]
) -> Callable[[Inject], Inject]:
    def add(inject: Inject) -> Inject:
        name = getattr(inject, "__name__", "")
        says = (inject.__doc__ or "").strip().splitlines()[0]
        row = Injection(
            name=name, id=id or name, kind=kind, via=via, inject=inject, says=says, declares=declares,
            stages=tuple(filter(None, stage.split("|"))), cause=tuple(filter(None, cause.split("|"))), needs=needs,
        )  # fmt: skip
        TABLE.add(row)
        return inject

    return add
