"""The coverage table: who serves each operator that a model uses, what falls back, what a port replaces. No limits.

Whether a backend has a kernel is asked of torch's dispatcher; a port's own operators are on its own word.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from harness.composed import BUILT_IN
from harness.ops.needs import Seen, family_of

COMPOSITE = ("CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")


def served(operator: str, device: str) -> str:
    """Return who computes a torch operator on a device: library, composite (of others), host (the CPU), custom."""
    key = torch._C._dispatch_key_for_device(device)
    if operator.partition("::")[0] not in BUILT_IN:
        return "custom"
    if torch._C._dispatch_has_kernel_for_dispatch_key(operator, key):
        return "library"
    if any(torch._C._dispatch_has_kernel_for_dispatch_key(operator, c) for c in COMPOSITE):
        return "library" if device == "cpu" else "composite"
    if device != "cpu" and torch._C._dispatch_has_backend_fallback(torch._C._dispatch_key_parse(key)):
        return "host"
    return "none"


def coverage(prefill: Seen, decode: Seen | None, device: str, levels: Mapping[str, str]) -> dict[str, Any]:
    """Return the table as facts: a row for each operator that ran, what fell back how often, what is replaced.

    `levels` are the port's own words for its operators. A row's `on_host` counts fallbacks in one decode step (in the
    prefill, where there is none); `inside` names the operators that fell back, `made_of` counts those of torch that a
    custom operator is made of.
    """
    kind = torch.device(device).type
    steps = decode if decode is not None else Seen()
    rows = []
    for name in sorted({*prefill.operators, *steps.operators}):
        found = {seen: _fallbacks(name, kind, seen_in) for seen, seen_in in (("prefill", prefill), ("decode", steps))}
        fell = found["decode" if decode is not None else "prefill"]
        inside = {n for f in found.values() for n in f}
        level = _level(name, kind, prefill, steps, fell=bool(inside))
        rows.append(
            {
                "operator": name, "family": family_of(name), "prefill": prefill.operators[name],
                "decode": steps.operators[name], "level": level, "on_host": sum(fell.values()),
                "inside": sorted(inside - {name, name.partition(".")[0]}), "view": is_view(name),
                "made_of": len({part for seen in (prefill, steps) for whole, part in seen.inside if whole == name}),
            }
        )  # fmt: skip
    return {
        "device": device,
        "rows": rows,
        "fallbacks": {row["operator"]: row["on_host"] for row in rows if row["on_host"]},
        "decode_counted": decode is not None,
        "own": dict(levels),
        "replaced": [*replaced(prefill), *registered_over(prefill, kind)],
    }


def is_view(operator: str) -> bool:
    """Say whether an operator returns a view of what it is given, so that nothing is computed."""
    name, _, overload = operator.partition(".")
    try:
        returns = torch._C._get_schema(name, overload).returns
    except RuntimeError:
        return False
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _level(name: str, kind: str, prefill: Seen, steps: Seen, *, fell: bool) -> str:
    """Return who served an operator; "host" where it is made of others and some `fell`, too."""
    level = served(name, kind)
    if level == "composite" and fell:
        return "host"
    ran = {device for seen in (prefill, steps) for operator, device in seen.devices if operator == name}
    return "host tensors" if ran == {"cpu"} and kind != "cpu" and level != "custom" else level


def _fallbacks(name: str, device: str, seen: Seen) -> dict[str, int]:
    """Return what an operator of the model left to the host, by the name of what fell back.

    A backend may have a fallback of its own kind, which the profiler does not show as one: then all calls count.
    """
    if device == "cpu":
        return {}
    inside = {inner: count for (outer, inner), count in seen.hosted.items() if outer == name}
    whole = seen.devices[name, device] if served(name, device) == "host" else 0
    return inside or ({name: whole} if whole else {})


def registered_over(seen: Seen, device: str) -> list[dict[str, str]]:
    """Return each operator that ran and whose kernel was registered over another one, with where that was done."""
    key, found = torch._C._dispatch_key_for_device(device), []
    for name in sorted(seen.operators):
        lines = torch._C._dispatch_dump(name).splitlines()
        for at in (key, *COMPOSITE):
            by = next((line for line in lines if line.startswith(f"{at}: registered at ")), "")
            if by and any(line.startswith(f"{at} (inactive)") for line in lines):
                place = by.removeprefix(f"{at}: registered at ").partition(" :: ")[0]
                found.append(
                    {"what": name, "instead_of": f"the kernel of {name} for {at}", "by": place, "how": "registered"}
                )
    return found


def replaced(seen: Seen) -> list[dict[str, str]]:
    """Return each module and function in place of upstream's: subclasses, forwards set on an object, patched names."""
    found = [
        {"what": name, "instead_of": f"the forward of {name}", "by": by, "how": "set on the object"}
        for name, by in seen.patched.items()
    ]
    for kind in seen.modules:
        own = next((c for c in kind.__mro__ if "forward" in vars(c)), None)
        if own is None:
            continue
        base = next((c for c in kind.__mro__ if _upstream(c, own)), None)
        if base is not None:
            found.append({"what": kind.__qualname__, "instead_of": _full(base), "by": _full(own), "how": "subclass"})
        by = getattr(vars(own)["forward"], "__module__", own.__module__)
        if by and by.partition(".")[0] != own.__module__.partition(".")[0]:
            found.append({"what": kind.__qualname__, "instead_of": f"{_full(own)}.forward", "by": by, "how": "patched"})
    for module in {sys.modules[k.__module__] for k in seen.modules if k.__module__ in sys.modules}:
        found += _patched_functions(module)
    return sorted(found, key=lambda row: (row["instead_of"], row["by"]))


def _upstream(base: type, own: type) -> bool:
    """Say whether a class further up has a forward of its own, from another package."""
    other = base.__module__.partition(".")[0] != own.__module__.partition(".")[0]
    return other and base is not nn.Module and issubclass(base, nn.Module) and "forward" in vars(base)


def _full(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _patched_functions(module: ModuleType) -> list[dict[str, str]]:
    """Return the functions and classes that a module's own source defines, but that now are somebody else's."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return []
    found = []
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        live = getattr(module, node.name, None)
        if not (inspect.isfunction(live) or inspect.isclass(live)):
            continue  # a decorator made an object of it
        by = live.__module__ or ""
        if by and by.partition(".")[0] != module.__name__.partition(".")[0]:
            name = f"{module.__name__}.{node.name}"
            found.append({"what": node.name, "instead_of": name, "by": f"{by}.{node.name}", "how": "patched"})
    return found
