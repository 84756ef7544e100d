"""Names of slices of columns: `X[..., 64:128]`. Knows the notation alone."""

from __future__ import annotations

import re

_CUT = re.compile(r"(.*)\[\.\.\., (\d+):(\d+)\]", re.DOTALL)


def cut_name(name: str, first: int, last: int) -> str:
    """Return what columns `first` .. `last` of a tensor are called."""
    return f"{name}[..., {first}:{last}]"


def cut_of(name: str) -> tuple[str, tuple[int, int] | None]:
    """Return the tensor that a name means, and its columns if it is a slice."""
    found = _CUT.fullmatch(name)
    return (found[1], (int(found[2]), int(found[3]))) if found else (name, None)
