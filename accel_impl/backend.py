"""Which level serves each operator: triton, custom, compiled, library, else reference. Knows no model, no weights."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

from accel_impl import custom, fallback, library, ops
from harness.errors import SpecError, nearest

LEVELS = ("triton", "custom", "compiled", "library", "reference")
"""From the most to the least of a device's own; an operator runs on the first that it has, from the wanted one on."""
COMPILABLE = (
    "norm.rms", "norm.layer", "norm.gated", "norm.unit", "act.swiglu", "act.swiglu_clamped", "act.gelu",
    "recurrent.gate",
)  # fmt: skip
"""Operators without data-dependent shapes or weights of their own format; only these are ever compiled."""
COMPILERS = ("off", "aot_eager", "inductor")
ATTENTION: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "latent_sparse_prefill": ("index.scores", "index.select", "attn.sparse_prefill"),
        "latent_sparse_decode": ("index.scores", "index.select", "attn.sparse_decode"),
        "recurrent_prefill": ("conv.causal", "recurrent.gate", "recurrent.prefill"),
        "recurrent_decode": ("conv.causal", "recurrent.gate", "recurrent.decode"),
        "vision_full": ("attn.patches",),
    }
)


class BackendAdapter:
    """The operator table of one device.

    `prefer` is the highest level wanted, `compiler` what compiles, `fallback` names operators for the reference.
    """

    def __init__(self, *, prefer: str = "custom", compiler: str = "off", fallback: Sequence[str] = ()) -> None:
        _known("ops", prefer, LEVELS)
        _known("compile", compiler, COMPILERS)
        for name in fallback:
            _known("fallback", name, tuple(ops.NAMES))
        if prefer == "compiled" and compiler == "off":
            raise SpecError("ops=compiled needs a compiler, found compile=off; say compile=aot_eager")
        if prefer == "triton" and triton_kernels() is None:
            raise SpecError("ops=triton needs triton, which is not installed here; say ops=custom")
        self.prefer, self.compiler, self.switched = prefer, compiler, tuple(fallback)
        self.table = {name: self._choose(name) for name in ops.NAMES}

    def _choose(self, name: str) -> str:
        if name in self.switched:
            return "reference"
        return next(level for level in LEVELS[LEVELS.index(self.prefer) :] if self.has(name, level))

    def has(self, name: str, level: str) -> bool:
        """Say whether an operator has an implementation at a level."""
        if level == "compiled":
            return self.compiler != "off" and name in COMPILABLE
        return hasattr(_module(level), ops.NAMES[name])

    def implementation(self, name: str) -> Callable[..., Tensor]:
        """Return what the table names, looked up now."""
        level, function = self.table[name], ops.NAMES[name]
        if level == "compiled":
            return _compiled(function, self.compiler)
        found: Callable[..., Tensor] = getattr(_module(level), function)
        return found

    def map_attention(self, kind: str) -> tuple[str, ...]:
        """Return the operators that a kind of attention runs on. Raises NotImplementedError if none are mapped."""
        if kind not in ATTENTION:
            raise NotImplementedError(
                f"attention kind {kind!r} is not mapped on this device{nearest(kind, list(ATTENTION))}; "
                f"add its operators to accel_impl.backend.ATTENTION, or run it on the host"
            )
        return ATTENTION[kind]

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Operators that run on the reference."""
        return tuple(name for name, level in self.table.items() if level == "reference")


def triton_kernels() -> ModuleType | None:
    """Return the port's Triton kernels, where triton is installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("accel_impl.triton")


def _module(level: str) -> ModuleType | None:
    if level == "triton":
        return triton_kernels()
    return {"custom": custom, "library": library, "reference": fallback}[level]


def _known(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SpecError(
            f"option {option}: expected {', '.join(choices)}, found {value!r}{nearest(value, list(choices))}"
        )


@functools.cache
def _compiled(function: str, compiler: str) -> Any:
    return torch.compile(getattr(fallback, function), backend=compiler, dynamic=True)
