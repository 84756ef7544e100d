"""Which implementation an operator runs on: custom, then compiled, then the fallback. Knows no model and no weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from accel_impl import custom, fallback, ops
from harness.errors import SpecError, nearest

CHOICES = ("custom", "compiled", "fallback")
COMPILABLE = ("rms_norm", "layer_norm", "swiglu", "swiglu_clamped", "gelu")
"""Operators without data-dependent shapes or weights of their own format; only these are ever compiled."""
COMPILERS = ("off", "aot_eager")
ATTENTION: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "latent_sparse_prefill": ("indexer_scores", "choose_keys", "attend_dense"),
        "latent_sparse_decode": ("indexer_scores", "choose_keys", "attend_sparse"),
        "vision_full": ("attend_patches",),
    }
)


class BackendAdapter:
    """The operator table of one device. `prefer` is the best implementation wanted, `compiler` what compiles."""

    def __init__(self, *, prefer: str = "custom", compiler: str = "off") -> None:
        _known("ops", prefer, CHOICES)
        _known("compile", compiler, COMPILERS)
        if prefer == "compiled" and compiler == "off":
            raise SpecError("ops=compiled needs a compiler, found compile=off; say compile=aot_eager")
        self.prefer, self.compiler = prefer, compiler
        self.table = {name: self._choose(name) for name in ops.NAMES}

    def _choose(self, name: str) -> str:
        if self.prefer == "custom" and hasattr(custom, name):
            return "custom"
        if self.prefer != "fallback" and self.compiler != "off" and name in COMPILABLE:
            return "compiled"
        return "fallback"

    def implementation(self, name: str) -> Callable[..., Tensor]:
        """Return what the table names, looked up now."""
        choice = self.table[name]
        if choice == "compiled":
            return _compiled(name, self.compiler)
        function: Callable[..., Tensor] = getattr(custom if choice == "custom" else fallback, name)
        return function

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
        """Operators that run on their fallback."""
        return tuple(name for name, choice in self.table.items() if choice == "fallback")


def _known(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SpecError(
            f"option {option}: expected {', '.join(choices)}, found {value!r}{nearest(value, list(choices))}"
        )


@functools.cache
def _compiled(name: str, compiler: str) -> Any:
    return torch.compile(getattr(fallback, name), backend=compiler, dynamic=True)
