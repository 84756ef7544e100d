"""Exchanged kernels as rows of the catalogue. Knows how they are added; must not know what is wrong with one."""

from __future__ import annotations

from collections.abc import Callable

from harness.faults.catalogue import TABLE, Injection
from harness.faults.kernels.mode import Change, Exchange

VIA = "kernels"
EXCHANGES: dict[str, Exchange] = {}
"""What each row exchanges, by its name."""


def wrong(
    id: str = "", *, of: str, kernel: str = "", criterion: str = "", cause: str, dtype: str = "float32"
) -> Callable[[Change], Change]:
    """Add a kernel that is wrong. `of`, `kernel`, `cause` hold alternatives between `|`.

    `criterion` is the one that must fail, after "startup.operators"; `cause`: words of which one must be in what is
    told. Without a `kernel` the function stands in for the suite's operator as a whole.
    """
    return _adding("fault", id, of, kernel, f"startup.operators{criterion and '.'}{criterion}", cause, dtype)


def harmless(of: str, kernel: str = "", *, dtype: str = "float32") -> Callable[[Change], Change]:
    """Add a kernel that computes otherwise, and right."""
    return _adding("benign", "", of, kernel, "", "", dtype)


def _adding(
    kind: str, id: str, of: str, kernel: str, criterion: str, cause: str, dtype: str
) -> Callable[[Change], Change]:
    def add(change: Change) -> Change:
        name = f"kernel_{getattr(change, '__name__', '')}"
        EXCHANGES[name] = Exchange(
            change=change, of=tuple(of.split("|")), kernels=frozenset(filter(None, kernel.split("|"))),
            dtype=dtype, criterion=criterion,
        )  # fmt: skip
        says = (change.__doc__ or "").strip().splitlines()[0]
        TABLE.add(
            Injection(
                name=name, id=id or name, kind=kind, via=VIA, inject=change, says=says, needs=of.replace("|", " or "),
                stages=("startup",) if kind == "fault" else (), cause=tuple(filter(None, cause.split("|"))),
            )
        )  # fmt: skip
        return change

    return add
