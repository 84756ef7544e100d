"""A transformers model with one known fault, or one harmless change, as a port: `module_ports.py:port?fault=NAME`.

The faults are those of `harness.faults`. Weights stay as they are in the checkpoint unless the fault is about them. A
fault that a model has no place for raises ValueError.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from harness.faults import TABLE, Parts


def port(checkpoint: Path, setup: Any) -> nn.Module:
    """Load a transformers model in the setup's precision, with the fault (or benign change) that an option names."""
    import torch
    import transformers

    from harness.adapters.hf import _auto

    config = transformers.AutoConfig.from_pretrained(checkpoint)
    given = {"attn_implementation": setup.options.get("attn", "eager")}
    if "experts" in setup.options:
        given["experts_implementation"] = setup.options["experts"]
    module = _auto(transformers, config).from_pretrained(checkpoint, dtype=getattr(torch, setup.dtype), **given).eval()
    for kind in ("fault", "benign"):
        if kind in setup.options:
            TABLE.of(kind, "module")[setup.options[kind]].inject(Parts(module))
    return module
