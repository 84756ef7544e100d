"""What a module claims: read from the checkpoint's configuration and the module's signature. Knows no model classes.

Also what compiling its layers hides. Must not know recorders.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from harness.adapters.structure import Structure
from harness.cases import ModelInfo
from harness.types import Scope, Setup

CACHES = ("cache", "past_key_values")
"""What the cache is called: since transformers 5, and before."""

_COMPILED = "inside a compiled region"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Which arguments a module names, and whether it is open to more."""

    named: frozenset[str]
    open: bool

    def takes(self, name: str) -> bool:
        """Say whether a call may give an argument; unnamed ones only where they are model inputs by convention."""
        return name in self.named or (self.open and name in ("mm_token_type_ids",))


def arguments_of(module: nn.Module) -> Arguments:
    """Read a module's signature."""
    parameters = inspect.signature(module.forward).parameters.values()
    named = frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return Arguments(named=named, open=any(p.kind is p.VAR_KEYWORD for p in parameters))


def scope_of(info: ModelInfo, arguments: Arguments | None, setup: Setup, *, wide: bool = False) -> Scope:
    """Read what a module claims from the configuration and, where it is known, its signature.

    `wide` says that it loads in any precision; float32 is then claimed too, where the reference's float64 weights fit.
    """
    off = {"multi_card": "a module runs on one device", "serves": "a module has no server"}
    if not info.tokenizer:
        off["chat"] = "the checkpoint has no tokenizer.json"
    image = info.vision and (arguments is None or "pixel_values" in arguments.named)
    if not image:
        off["image"] = "the module takes no pixel_values" if info.vision else "the checkpoint has no vision tower"
    phased = arguments is None or bool(arguments.named & set(CACHES))
    if not phased:
        off["phases"] = f"the module takes neither {' nor '.join(CACHES)}"
    if setup.options.get("compile"):
        off["decisions"] = "choices are made inside compiled layers"
    else:
        off["compiled"] = "nothing is compiled here (the option compile= was not given)"
    narrow = setup.dtype in ("bfloat16", "float16")
    too_large = _too_large(Path(info.path)) if wide and narrow else ""
    if not wide and narrow:
        off["float32"] = 'not claimed; where the port follows setup.dtype, say [scope] precisions = ["float32"]'
    elif setup.options.get("compile"):
        off["float32"] = "compiled in the declared precision only"
    elif too_large:
        off["float32"] = too_large
    return Scope(
        image=image,
        phases=("prefill", "chunk", "decode") if phased else ("prefill",),
        max_length_tokens=info.max_length_tokens,
        chat=info.chat_template and info.tokenizer,
        precisions=("float32",) if wide and narrow and "float32" not in off else (),
        unobservable=_inside_layers() if setup.options.get("compile") else {},
        off=off,
    )


def _too_large(checkpoint: Path) -> str:
    """Say why a checkpoint cannot be held in float64 beside a float32 copy, or return an empty string."""
    stored = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    free = free_bytes()
    needed = 6 * stored  # of two bytes an element: float64 and float32
    if free is None or needed <= free:
        return ""
    return f"float64 and float32 weights need about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"


def free_bytes() -> int | None:
    """Return the memory that the system can give, in bytes; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _inside_layers() -> dict[str, str]:
    """Return globs of everything inside a layer or block, but not the layer's own inputs and further outputs."""
    globs = {}
    for container in ("layers", "vision.blocks"):
        for digits in ("[0-9]", "[0-9][0-9]", "[0-9][0-9][0-9]"):
            for rest in ("[!io]*", "i[!n]*", "in[!.]*", "o[!u]*", "ou[!t]*", "out[!.]*"):
                globs[f"{container}.{digits}.{rest}"] = _COMPILED
    return globs


def layers_only(name: str) -> bool:
    """Say whether a unit is a layer or block, or lies outside of them all."""
    parts = name.split(".")
    place = next((i for i, part in enumerate(parts) if part in ("layers", "blocks")), None)
    return place is None or len(parts) == place + 2


def compile_layers(module: nn.Module, structure: Structure, backend: str) -> dict[nn.Module, Any]:
    """Compile each layer and block alone, for any length, and return what each ran before.

    Beyond its limit on variants of a layer torch would silently run it uncompiled: that is an error here.
    """
    import torch._dynamo.config as limits

    modules = dict(module.named_modules())
    if hasattr(limits, "fail_on_recompile_limit_hit"):
        limits.fail_on_recompile_limit_hit = True
    for name in ("cache_size_limit", "recompile_limit"):
        if hasattr(limits, name):
            setattr(limits, name, max(getattr(limits, name), 64))
    before: dict[nn.Module, Any] = {}
    for path in (*structure.layers, *structure.blocks):
        layer = modules[path]
        before[layer] = layer.forward
        layer.forward = torch.compile(_own_code(layer.forward), backend=backend, dynamic=True)
    return before


@contextmanager
def forwards(by_module: Mapping[nn.Module, Any]) -> Iterator[None]:
    """Let modules run what is given for each, within the context."""
    held = {module: module.forward for module in by_module}
    try:
        for module, forward in by_module.items():
            module.forward = forward
        yield
    finally:
        for module, forward in held.items():
            module.forward = forward


def _own_code(method: Any) -> Any:
    """Return a method with its own code object: torch keeps compiled variants by code object, so layers of one class
    would search through each other's at every call and use up one limit together.
    """
    function = getattr(method, "__func__", None)
    if not isinstance(function, FunctionType):
        return method
    code = function.__code__.replace()
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return MethodType(copy, method.__self__)
