"""Replay one operator call that came out wrong: on its device, and on the CPU in float64. Knows this folder only.

    python replay.py [--device cuda:0] [--plugin PACKAGE]

Needs torch and safetensors, and the package of a custom operator. Exits with 1 where the device's result still differs
from the one repeated in float64 by more than rounding to its dtype explains (a first look: the report has the
operator's own budget), or where memory beside an argument changed; 0 where nothing does.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
ULPS = 64


def main() -> int:
    """Run the call on both and print what differs."""
    call = json.loads((HERE / "call.json").read_text())
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default=call["device"])
    parser.add_argument("--plugin", default="", help="a package to import that brings the device")
    asked = parser.parse_args()
    _enable(asked.device, asked.plugin, call["device_options"])
    memory = load_file(HERE / "tensors.safetensors")
    operator = _operator(call)
    actual, beside = _ran(operator, call, memory, asked.device, wide=False)
    native, _ = _ran(operator, call, memory, "cpu", wide=False)
    try:
        expected, _ = _ran(operator, call, memory, "cpu", wide=True)
    except (RuntimeError, TypeError, ValueError) as error:
        expected = native
        print(f"not in float64 ({(str(error).splitlines() or [''])[0][:100]}), but in the precision of the inputs:")
    print(f"{call['operator']} of {call['module'] or 'no module'}, {call['site']}")
    print(f"  on {asked.device}, against the same call on the CPU")
    if call["part"]:
        print(f"  this is {call['part']}, which alone need not come out the same")
    for words in beside:
        print(f"  {words}")
    return int(any([*map(_differs, actual, expected, native), *beside]))


def _operator(call: dict[str, Any]) -> Any:
    """Return the operator, of a custom one after what brings it is imported."""
    namespace, _, name = call["operator"].partition("::")
    if call["brought_by"]:
        try:
            importlib.import_module(call["brought_by"])
        except ImportError as error:
            raise SystemExit(
                f"expected to import {call['brought_by']}, which defines {call['operator']}, found: {error}; "
                "run this where it can be imported (PYTHONPATH)"
            ) from error
    return getattr(getattr(getattr(torch.ops, namespace), name), call["overload"] or "default")


def _enable(device: str, plugin: str, options: dict[str, str]) -> None:
    if plugin:
        importlib.import_module(plugin)
    for entry in importlib.metadata.entry_points(group="day0.devices"):
        if entry.name == device.partition(":")[0]:
            entry.load()(options)


def _ran(
    operator: Any, call: dict[str, Any], memory: dict[str, Any], device: str, *, wide: bool
) -> tuple[list[Any], list[str]]:
    """Call the operator on a device with arguments that lie in memory as they did.

    Returns: its tensors on the CPU; in words, what changed in the memory between the elements of an argument.
    """
    given: list[tuple[Any, Any, dict[str, Any]]] = []

    def made(value: Any) -> Any:
        if isinstance(value, list):
            return [made(v) for v in value]
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            line, view = _tensor(value, memory[value["tensor"]], device, wide=wide)
            given.append((line, line.cpu().clone(), value))
            return view
        ((kind, words),) = value.items()
        if kind == "device":
            return torch.device(device)
        if kind in ("float", "complex"):
            return {"float": float, "complex": complex}[kind](words)
        found = getattr(torch, words)
        return torch.float64 if wide and kind == "dtype" and found.is_floating_point else found

    args, kwargs = made(call["args"]), {k: made(v) for k, v in call["kwargs"].items()}
    if device == "cpu":
        kwargs.pop("pin_memory", None)
        if call["operator"] in ("aten::_softmax", "aten::_log_softmax"):
            args[2] = False  # half to float: an accelerator's own form
    result = operator(*args, **kwargs)
    tensors = [result] if isinstance(result, torch.Tensor) else list(result)
    beside = [words for one in given if (words := _beside(*one))]
    return [t.detach().cpu() for t in tensors if isinstance(t, torch.Tensor)], beside


def _beside(line: Any, before: Any, words: dict[str, Any]) -> str:
    """Return what changed in a line of memory beside the elements of the view that an argument is."""
    bits = [t.contiguous().view(torch.uint8).reshape(t.numel(), -1) for t in (line.cpu(), before)]
    changed = (bits[0] != bits[1]).any(1)
    changed.as_strided(words["sizes"], words["strides"], words["offset"]).fill_(False)
    if not bool(changed.any()):
        return ""
    at = int(changed.int().argmax())
    return (
        f"{int(changed.sum())} elements beside {words['tensor']} {words['sizes']} strides {words['strides']} changed: "
        f"element {at} of its memory was {before[at].item()}, is {line.cpu()[at].item()}"
    )


def _tensor(words: dict[str, Any], flat: Any, device: str, *, wide: bool) -> tuple[Any, Any]:
    """Return the line of memory that a tensor lies in, and the tensor."""
    if words["dtype"].startswith("complex"):
        flat = torch.view_as_complex(flat)
    if wide and flat.is_floating_point():
        flat = flat.to(torch.float64)
    place = "cpu" if words["device"] == "cpu" else device
    line = torch.zeros(words["offset"] + flat.numel() + words["behind"], dtype=flat.dtype)
    line[words["offset"] : words["offset"] + flat.numel()] = flat
    line = line.to(place)
    return line, line.as_strided(words["sizes"], words["strides"], words["offset"])


def _differs(actual: Any, expected: Any, native: Any) -> bool:
    if actual.shape != expected.shape:
        print(f"  shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
        return True
    if not actual.is_floating_point():
        wrong = int((actual != native).sum())
        print(f"  {actual.dtype}: {wrong} of {actual.numel()} elements differ")
        return wrong > 0
    got, want = actual.double(), expected.double()
    error = (got - want).abs()
    spread = float(want[torch.isfinite(want)].square().mean().sqrt()) if want.numel() else 0.0
    limit = ULPS * torch.finfo(actual.dtype).eps * torch.clamp(want.abs(), min=spread)
    wrong = (~(error <= limit) & ~((got == want) | ((got != got) & (want != want)))).flatten()
    if not bool(wrong.any()):
        print(
            f"  {actual.dtype}: all {actual.numel()} elements are right, the largest difference is {float(error.max())}"
        )
        return False
    at = int(torch.where(wrong, error.nan_to_num(torch.inf).flatten(), torch.zeros(())).argmax())
    print(f"  {actual.dtype}: {int(wrong.sum())} of {actual.numel()} elements differ; element {at} is "
          f"{float(got.flatten()[at])}, in float64 {float(want.flatten()[at])}")  # fmt: skip
    return True


if __name__ == "__main__":
    raise SystemExit(main())
