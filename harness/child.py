"""What a further process of day0 finds in its environment. Must not know what the process is for."""

from __future__ import annotations

import os
from pathlib import Path


def child_environment() -> dict[str, str]:
    """Return this process's environment, with this copy of day0 importable; tiny kernels spin less than they would."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {"TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "passive"}
    return {**quiet, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
