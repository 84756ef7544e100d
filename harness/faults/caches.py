"""Caches in a declared 8-bit format: what is noise there, and what is not. Knows how modules take caches, no classes.

The port declares the format, so its floor rounds what it caches as well; what differs from that is judged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.faults.catalogue import NoPlace, benign, fault
from harness.faults.parts import Parts, attention_of
from harness.faults.ways import on_arguments

Places = list[str]
FP8 = {"cache": "float8_e4m3fn:tensor"}
LARGEST = 448.0
"""The largest number of E4M3. Source: OCP 8-bit floating point 1.0."""
Write = Callable[[Tensor, str], Tensor]


class Written:
    """A cache that changes keys and values as they are written; everything else is the cache's own."""

    def __init__(self, cache: Any, write: Write) -> None:
        self._cache, self._write = cache, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write keys and values."""
        return self._cache.update(self._write(key, "keys"), self._write(value, "values"), *args, **kwargs)


def _writes(attention: Any, write: Write) -> None:
    """Give an attention a cache that changes what is written."""

    def change(kwargs: dict[str, Any]) -> None:
        for name in ("cache", "past_key_values"):
            if kwargs.get(name) is not None:
                kwargs[name] = Written(kwargs[name], write)

    on_arguments(attention, change)


def _rounded(value: Tensor, scale: float) -> Tensor:
    """Round to E4M3 under a scale; what is too large is cut."""
    held = (value.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return (held.float() * scale).to(value.dtype)


def _all(parts: Parts, first: Callable[[], Write], others: Write) -> Places:
    """Let every layer write its cache in one way, and a middle layer in another; return where that shows."""
    middle = parts.softmax_attention()
    for layer in parts.layers:
        attention = attention_of(layer)
        if hasattr(attention, "scaling"):
            _writes(attention, first() if attention is middle else others)
    name = parts.tap(middle)
    return [f"{name}.core", name, f"{name}.*", name.rpartition(".")[0]]


def _plain(value: Tensor, _: str) -> Tensor:
    return _rounded(value, 1.0)


@benign("BN14", needs="keys and values in a cache", declares=FP8)
def cache_in_fp8(parts: Parts) -> None:
    """Keys and values are cached in E4M3 under a scale of 1, as the port declares."""
    _all(parts, lambda: _plain, _plain)


@benign("BN14", needs="keys and values in a cache", declares=FP8)
def cache_in_fp8_scaled(parts: Parts) -> None:
    """Keys and values are cached in E4M3 under a scale of a quarter, as the port declares."""
    _all(parts, lambda: lambda value, _: _rounded(value, 0.25), lambda value, _: _rounded(value, 0.25))


@fault("LC07", cause="times|scale|scaled|values", needs="keys and values in a cache", declares=FP8)
def cache_scale_not_delivered(parts: Parts) -> Places:
    """One layer's cache is written in fp8 under one scale and read under another, a quarter larger."""

    def wrong(value: Tensor, _: str) -> Tensor:
        return _rounded(value, 1.0) * 1.25

    return _all(parts, lambda: wrong, _plain)


@fault("LC08", cause="cut|weights|wrong|off|values|clamp", needs="keys and values in a cache", declares=FP8)
def cache_scale_frozen(parts: Parts) -> Places:
    """The scale of one layer's fp8 cache is that of a warm-up: what is larger than half of its first token is cut."""
    box: dict[str, float] = {}

    def wrong(value: Tensor, name: str) -> Tensor:
        if not value.numel():
            return value
        top = box.setdefault(name, float(value[..., :1, :].float().abs().amax()) / 2)
        if top <= 0:
            raise NoPlace("this cache holds nothing for the first token")
        return _rounded(value, top / LARGEST)

    return _all(parts, lambda: wrong, _plain)
