"""What may stand in the port's SPEC. Knows words and their defaults; must not know what they do."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from harness.errors import SpecError, nearest
from harness.types import Setup

OPTIONS = {
    "ops": "custom", "compile": "off", "fallback": "", "slots": "8", "pages": "1024", "visit": "forward", "poison": "0",
    "chunk": "64", "together": "1", "drafts": "0", "snapshots": "32", "stride": "16",
}  # fmt: skip
"""Options of the SPEC and their defaults."""
HARNESS_OPTIONS = ("dtype", "device", "backend")
"""Keys that may stand beside them and are meant for the harness."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def read_options(given: Mapping[str, str]) -> dict[str, str]:
    """Return every option, given or by default. Raises SpecError for a word that is none."""
    for key in given:
        if key not in OPTIONS and key not in HARNESS_OPTIONS:
            raise SpecError(f"option {key!r} is not known to builtin:accel{nearest(key, list(OPTIONS))}")
    return {**OPTIONS, **{k: v for k, v in given.items() if k in OPTIONS}}


def dtype_of(setup: Setup) -> torch.dtype:
    """Return the precision that the port computes in. Raises SpecError for one that it does not have."""
    if setup.dtype not in DTYPES:
        raise SpecError(f"dtype: builtin:accel runs in {', '.join(DTYPES)}, found {setup.dtype!r}")
    return DTYPES[setup.dtype]
