"""One implementation of an operator that is to be tested. Knows nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """One implementation to test. `name` is the suite's, `level` who serves it, `variant` a configuration of a kernel.

    `own` says that a port or a test brought it; otherwise it is torch's on that device. `thorough`: every size is tried
    in the quick profile too, as of a device; of torch's own on a plain CPU few are.
    """

    name: str
    call: Callable[..., Any]
    level: str
    variant: str = ""
    own: bool = False
    thorough: bool = False
