"""Ports of a model whose experts are packed in four bits: decoded by code of their own, right or with one mistake.

`port?mistake=`: nothing (right), `nibbles` (the high one first), `exponent` (a bias of 128).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = torch.cat([E2M1, -E2M1])
MISTAKEN = "model.layers.3."
"""Where a mistake is made."""


def unpacked(packed: torch.Tensor, scale: torch.Tensor, mistake: str) -> torch.Tensor:
    """Multiply four-bit floats out."""
    low, high = packed & 15, packed >> 4
    pair = (high, low) if mistake == "nibbles" else (low, high)
    codes = torch.stack(pair, dim=-1).flatten(-2)
    bias = 128 if mistake == "exponent" else 127
    factor = torch.exp2(scale.float() - bias).repeat_interleave(32, dim=-1)
    return VALUES[codes.long()] * factor


def port(checkpoint: Path, setup) -> nn.Module:
    """Build the model that the configuration describes, and fill it from the packed file."""
    from transformers import AutoConfig, AutoModelForCausalLM

    words = json.loads((checkpoint / "config.json").read_text())
    words.pop("quantization_config")
    config = AutoConfig.for_model(words.pop("model_type"), **words)
    dtype = getattr(torch, setup.dtype)  # given here, it leaves tables as precise as they are
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    stored = {}
    for shard in sorted(checkpoint.glob("*.safetensors")):
        stored.update(load_file(shard))
    mistake = setup.options.get("mistake", "")
    found = {}
    for name, value in stored.items():
        base = name.removesuffix("_packed")
        if name.endswith("weight_packed"):
            found[base] = unpacked(value, stored[base + "_scale"], mistake if base.startswith(MISTAKEN) else "")
        elif not name.endswith("_scale"):
            found[name] = value
    model.load_state_dict(_merged(found, config.num_experts), strict=True)
    return model


def _merged(found: dict[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
    """Put numbered experts together as the module holds them."""
    result = {n: v for n, v in found.items() if ".experts." not in n}
    for at in {n.split(".experts.")[0] + ".experts" for n in found if ".experts." in n}:
        of = {k: [found[f"{at}.{e}.{k}_proj.weight"] for e in range(experts)] for k in ("gate", "up", "down")}
        pairs = zip(of["gate"], of["up"], strict=True)
        result[f"{at}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        result[f"{at}.down_proj"] = torch.stack(of["down"])
    return result
