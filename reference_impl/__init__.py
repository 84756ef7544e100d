"""The built-in reference: a small, slow, obviously right model. Knows nothing of the port that it judges.

The two functions here are the entry points `day0.adapters: reference` and `day0.checkpoints: builtin`; they import what
they need when they are called, so that importing the package costs nothing. No module of the package may be named like
one of them: importing it would put the module in the function's place.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.adapter import Adapter
    from harness.types import Setup

__all__ = ["adapter", "checkpoint"]


def adapter(checkpoint: Path, setup: Setup) -> Adapter:
    """Return the reference as an Adapter; its weights are read by `load`."""
    from reference_impl.port import ReferenceAdapter

    return ReferenceAdapter(checkpoint, setup)


def checkpoint() -> Path:
    """Return the folder of the built-in checkpoint; it is made on the first call."""
    from reference_impl.maker import ensure

    return ensure()
