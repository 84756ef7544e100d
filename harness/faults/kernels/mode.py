"""A kernel exchanged for another one behind torch's back, as a device would have it. Knows dispatch; not which fault.

What is changed is named by the plain name of torch's operator (`_softmax`), all its overloads without an `out`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

Change = Callable[..., Any]
"""`change(kernel, *args, **kwargs)`: what the exchanged kernel gives; `kernel` is the right one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One exchanged kernel. `of`: operators of the suite that run it; `dtype`: in which they are tried.

    Without `kernels` it stands in for the suite's operator as a whole, as a port's own kernel would. `criterion`: the
    one that a wrong kernel must fail.
    """

    change: Change
    of: tuple[str, ...]
    kernels: frozenset[str]
    dtype: str
    criterion: str = ""


class Exchanged(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Run torch with some kernels exchanged; `hits` counts their calls."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.exchange, self.hits = exchange, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func._schema.name).partition("::")[2]
        if name not in self.exchange.kernels or "out" in kwargs:
            return func(*args, **kwargs)
        self.hits += 1
        return self.exchange.change(func, *args, **kwargs)
