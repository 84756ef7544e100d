"""What a request keeps beside its pages, one place per slot: recurrent states, the last inputs of convolutions, `norm`.

Knows shapes; must not know the model. A slot is reset when it is given to a request, whatever the last one left there.

Legend: Z slots, H heads, K key width, V value width, C channels, W inputs that a convolution looks back at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.errors import PortError


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A slot's states at one moment. Tensors as in `StateCache.tensors`, without the slot's axis."""

    tensors: tuple[Tensor, ...]


class StateCache:
    """States of all slots: `memory` [Z, H, K, V] float32 and `inputs` [Z, W, C] per recurrent layer, `norm` [Z, F]."""

    def __init__(
        self,
        *,
        layers: Sequence[int],
        memory: tuple[int, int, int],
        inputs: tuple[int, int],
        features: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.slots = slots
        self.memory = {n: torch.zeros(slots, *memory, dtype=torch.float32, device=device) for n in layers}
        self.inputs = {n: torch.zeros(slots, *inputs, dtype=dtype, device=device) for n in layers}
        self.norm = torch.zeros(slots, features, dtype=dtype, device=device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that is kept, in one order."""
        return (*self.memory.values(), *self.inputs.values(), self.norm)

    def reset(self, slot: int) -> None:
        """Forget what a slot holds."""
        for tensor in self.tensors:
            tensor[slot].zero_()

    def snapshot(self, slot: int) -> Snapshot:
        """Copy what a slot holds."""
        return Snapshot(tensors=tuple(tensor[slot].clone() for tensor in self.tensors))

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Put a copy back, into this or another slot."""
        for tensor, kept in zip(self.tensors, snapshot.tensors, strict=True):
            tensor[slot].copy_(kept)

    def permute(self, target: Sequence[int]) -> None:
        """Move what slot z holds to slot target[z], in place. Raises PortError if it is not 1:1."""
        if sorted(target) != list(range(self.slots)):
            raise PortError(f"expected each of {self.slots} slots once as a target, found {list(target)}")
        source = torch.empty(self.slots, dtype=torch.int64)
        source[torch.tensor(target)] = torch.arange(self.slots)
        for tensor in self.tensors:
            tensor.copy_(tensor.index_select(0, source.to(tensor.device)))

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)
