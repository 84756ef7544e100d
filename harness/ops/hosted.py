"""What a device leaves to the host inside of its operators, counted by torch's own profiler. Knows no port, no limits.

Torch's fallback to the CPU, which backends register for what they lack, begins with `_to_cpu` of all arguments. Many an
operator gets there through another one (`embedding` through `index_select`), so its own name says nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd.profiler import profile, record_function

_MARK = "day0 operator "
_MOVES = "aten::_to_cpu"


def marked(operator: str) -> Any:
    """Return a context that marks what runs inside as parts of an operator."""
    return record_function(_MARK + operator)


@contextmanager
def counting(counts: Counter[tuple[str, str]]) -> Iterator[None]:
    """Count, while it is entered, fallbacks by the marked operator around them and by the one that fell back."""
    with profile(use_cpu=True) as seen:
        yield
    fell: dict[int, Any] = {}
    for event in seen.function_events or ():
        if event.name == _MOVES and event.cpu_parent is not None:
            fell[id(event.cpu_parent)] = event.cpu_parent  # lists of tensors are moved one after the other
    for event in fell.values():
        around = event
        while around is not None and not around.name.startswith(_MARK):
            around = around.cpu_parent
        if around is not None:
            counts[around.name.removeprefix(_MARK), event.name] += 1
