"""The built-in port: the seed model written as a vendor would. Knows nothing of the reference implementation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_impl.port import AccelAdapter
    from harness.types import Setup


def adapter(checkpoint: Path, setup: Setup) -> AccelAdapter:
    """Return the port for a checkpoint (entry point `day0.adapters: accel`)."""
    from accel_impl.port import AccelAdapter

    return AccelAdapter(checkpoint, setup)
