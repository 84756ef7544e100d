"""A transformers model with one known fault, or one harmless change, as a port: `module_ports.py:port?fault=NAME`.

Every fault sits in one middle layer (or one place of the whole), found by how modules are built. Weights stay as they
are in the checkpoint, so a check of weights cannot see it. A fault that a model has no place for raises ValueError.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import expert_faults
import harmless_changes
import mixing_faults
import picture_faults
import torch
from model_parts import BENIGN, FAULTS, Parts
from torch import nn

__all__ = ["expert_faults", "harmless_changes", "mixing_faults", "picture_faults", "port"]


def port(checkpoint: Path, setup: Any) -> nn.Module:
    """Load a transformers model in the setup's precision, with the fault (or benign change) that an option names."""
    import transformers

    from harness.adapters.hf import _auto

    config = transformers.AutoConfig.from_pretrained(checkpoint)
    given = {"attn_implementation": setup.options.get("attn", "eager")}
    if "experts" in setup.options:
        given["experts_implementation"] = setup.options["experts"]
    module = _auto(transformers, config).from_pretrained(checkpoint, dtype=getattr(torch, setup.dtype), **given).eval()
    for key, table in (("fault", FAULTS), ("benign", BENIGN)):
        if key in setup.options:
            table[setup.options[key]](Parts(module))
    return module
