"""Recorded traces in place of a port. Knows only to say what is possible with them today."""

from __future__ import annotations

from pathlib import Path

from harness.adapter import Adapter
from harness.errors import SpecError
from harness.types import Setup


def open_traces(folder: Path, setup: Setup) -> Adapter:
    """Refuse, saying what to do: a side of `verify` cannot be recorded traces yet. Raises SpecError."""
    raise SpecError(
        f"traces:{folder} cannot stand for the {setup.side} side yet; compare recorded folders with "
        "`day0 compare ACTUAL_DIR EXPECTED_DIR`, or reuse goldens with `--goldens DIR`"
    )
