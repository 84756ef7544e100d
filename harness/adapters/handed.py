"""Which values were handed out before, followed through casts and reshapes. Knows tensors; must not know taps.

Nothing is kept alive for it: a value that the port let go is forgotten, with what stands for it, and its memory is used
again as it would be without day0.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from harness.recorder import version_of

_LEAST_SWEPT = 256


@dataclass(frozen=True, slots=True)
class _Entry:
    """A value, how often it had been written into, its memory, and what stands for it (None: the value itself)."""

    value: weakref.ref[Tensor]
    version: int
    memory: Any
    instead: Tensor | None


class Handed:
    """The values of one forward, by identity and by place in memory: a view shares its place and its version."""

    def __init__(self) -> None:
        self._values: dict[int, _Entry] = {}
        self._places: dict[tuple[Any, ...], _Entry] = {}
        self._sweep_at = _LEAST_SWEPT

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
        self._places.clear()

    def known(self, tensor: Tensor) -> bool:
        """Say whether a tensor is a value handed out before, at most cast or reshaped, and not written into since."""
        found = self._values.get(id(tensor))
        if found is not None and found.value() is tensor:
            return found.version == version_of(tensor)
        found = self._places.get(_place(tensor)) if tensor.is_contiguous() else None
        if found is None or found.version != version_of(tensor) or found.memory != _memory(tensor):
            return False
        self.learn(tensor, like(found.instead, tensor) if found.instead is not None else None)
        return True

    def standing_for(self, tensor: Tensor) -> Tensor:
        """Return what a known tensor was overwritten with: the caller may still hold, and pass on, its own."""
        instead = self._values[id(tensor)].instead
        return tensor if instead is None else instead

    def learn(self, tensor: Tensor, instead: Tensor | None = None) -> Tensor:
        """Remember a value, and what it was overwritten with; return what to go on with."""
        if instead is None or instead is tensor:
            self._remember(tensor, None)
            return tensor
        self._remember(tensor, instead)
        self._remember(instead, None)
        return instead

    def _remember(self, value: Tensor, instead: Tensor | None) -> None:
        entry = _Entry(weakref.ref(value), version_of(value), _memory(value), instead)
        self._values[id(value)] = entry
        if value.is_contiguous():
            place = _place(value)
            there = self._places.get(place)
            if there is None or there.memory != entry.memory:  # the first one at a place stands while its memory lives
                self._places[place] = entry
        if len(self._values) >= self._sweep_at:
            self._sweep()

    def _sweep(self) -> None:
        """Forget what nobody can ask for again: values without memory."""
        self._values = {key: entry for key, entry in self._values.items() if not entry.memory.expired()}
        self._places = {key: entry for key, entry in self._places.items() if not entry.memory.expired()}
        self._sweep_at = max(_LEAST_SWEPT, 2 * len(self._values))


def _memory(tensor: Tensor) -> Any:
    """Return what tells one piece of memory from another that lies at the same address later."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.numel(), tensor.dtype


def like(instead: Tensor, alias: Tensor) -> Tensor:
    """Bring what stands for a value to the shape and precision of an alias of it."""
    return instead.reshape(alias.shape).to(alias.dtype)
