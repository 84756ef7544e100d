"""A wrong operator call -> a folder that anybody can replay: its exact input and a script. Must not know ports.

The folder holds `call.json` (operator, arguments, layout of each tensor), `tensors.safetensors` (the runs of memory
that the arguments were, and what the device gave) and `replay.py`, which needs torch and safetensors only (and, for a
custom operator, what brings it).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from harness.shadow.calls import Held, mapped
from harness.shadow.mode import Call

SCRIPT = Path(__file__).parent / "replay_script.py"


def save(call: Call, folder: Path, options: Mapping[str, str]) -> Path:
    """Write a call into a folder of its own below `folder` and return that; `options` are what the device was given."""
    name = re.sub(r"\W+", "_", call.operator.partition("::")[2]).strip("_")
    place = folder / f"{name}-{call.judged.kind}"
    place.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}

    def named(leaf: Any) -> Any:
        return _words(leaf, tensors)

    args, kwargs = mapped((list(call.args), dict(call.kwargs)), named)
    outputs = [_words(o, tensors) for o in call.outputs]
    device = next((h.device for h in call.outputs), "")
    told = {
        "operator": call.operator, "overload": call.overload, "args": args, "kwargs": kwargs, "outputs": outputs,
        "device": device, "device_options": dict(options), "module": call.module, "site": call.site,
        "torch": torch.__version__, "part": call.part, "brought_by": _brought_by(call.operator),
    }  # fmt: skip
    (place / "call.json").write_text(json.dumps(told, indent=1) + "\n")
    save_file(tensors, place / "tensors.safetensors")
    (place / "replay.py").write_text(SCRIPT.read_text())
    return place


def _brought_by(operator: str) -> str:
    """Return the module that defines a custom operator in Python; "" where torch does not know it."""
    definition = getattr(torch._library.custom_ops, "OPDEFS", {}).get(operator)
    return str(getattr(getattr(definition, "_init_fn", None), "__module__", ""))


def _words(leaf: Any, tensors: dict[str, Tensor]) -> Any:
    """Return an argument as plain JSON; a tensor is named, and its memory put aside under that name."""
    if isinstance(leaf, Held):
        name = f"t{len(tensors)}"
        flat = leaf.flat.resolve_conj() if leaf.flat.is_complex() else leaf.flat
        tensors[name] = torch.view_as_real(flat).contiguous() if flat.is_complex() else flat.contiguous()
        kind = str(leaf.flat.dtype).removeprefix("torch.")
        return {"tensor": name, "dtype": kind, "sizes": list(leaf.sizes), "strides": list(leaf.strides),
                "offset": leaf.offset, "behind": leaf.behind, "device": leaf.device}  # fmt: skip
    if isinstance(leaf, (torch.dtype, torch.layout, torch.memory_format)):
        return {type(leaf).__name__: str(leaf).removeprefix("torch.")}
    if isinstance(leaf, torch.device):
        return {"device": str(leaf)}
    if isinstance(leaf, float) and not math.isfinite(leaf):
        return {"float": repr(leaf)}
    if isinstance(leaf, complex):
        return {"complex": repr(leaf)}
    return leaf
