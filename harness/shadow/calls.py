"""The arguments of one operator call, kept as they lay in memory, and given again. Knows tensors; must not know ports.

A tensor is read as the run of memory from its first to its last element, in one contiguous copy: a device that reads
strided views wrongly is not asked to read one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

MOST_OFFSET_BYTES = 1 << 20
"""Offset into a storage that is kept as it was; of a larger one, what is left over a page."""
PAGE_ELEMENTS = 4096
MOST_BEHIND = 4096
"""Elements of a storage behind a tensor that are told to be there; what they hold is not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A tensor as it lay on its device. `flat` is its run of memory on the CPU, with elements before and behind it."""

    flat: Tensor
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    device: str
    behind: int = 0

    def tensor(self, dtype: torch.dtype | None = None, moved: int = 0, eps: float = 2.0**-23) -> Tensor:
        """Return it on the CPU with the same sizes and strides; `moved` seeds a change of each element by `eps`."""
        flat = self.flat.to(dtype or self.flat.dtype, copy=True)
        if moved and flat.is_floating_point():
            eps = torch.finfo(torch.float64).eps if self.flat.dtype is torch.float64 else eps
            draw = torch.rand(flat.shape, generator=torch.Generator().manual_seed(moved), dtype=flat.dtype)
            flat = flat * (1 + eps * (2 * draw - 1))
        return flat.as_strided(self.sizes, self.strides, 0)

    def words(self) -> str:
        """Return dtype, shape and layout in a few words."""
        kind = str(self.flat.dtype).removeprefix("torch.")
        return f"{kind}{list(self.sizes)} strides {list(self.strides)} offset {self.offset}"


def span(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last one in memory."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def held(tensor: Tensor) -> Held:
    """Read a tensor from its device."""
    offset = int(tensor.storage_offset())
    line = tensor.detach().as_strided((span(tensor),), (1,), offset)
    behind = tensor.untyped_storage().nbytes() // max(1, tensor.element_size()) - offset - line.numel()
    if offset * tensor.element_size() > MOST_OFFSET_BYTES:
        offset %= PAGE_ELEMENTS
    return Held(
        flat=line.to("cpu", copy=True), sizes=tuple(tensor.shape), strides=tuple(tensor.stride()), offset=offset,
        device=str(tensor.device), behind=min(behind, MOST_BEHIND),
    )  # fmt: skip


def whole(tensor: Tensor) -> Tensor:
    """Read all of the storage that a tensor is a view of, as elements of its dtype."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0).to("cpu", copy=True)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in arguments or results, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return arguments with every leaf replaced; a `Held` is a leaf."""
    return pytree.tree_map(leaf, value)


def same_bits(one: Tensor, other: Tensor) -> Tensor:
    """Say for each element whether it is the same value; NaN is NaN. Shapes as given."""
    if one.is_floating_point() and one.element_size() == 1:
        one, other = one.to(torch.float32), other.to(torch.float32)
    same = one == other
    return same | ((one != one) & (other != other))


def flat_bits(line: Tensor) -> Tensor:
    """Return the bytes of a contiguous line, a row for each element."""
    return line.contiguous().view(torch.uint8).reshape(line.numel(), -1)


def is_written(func: Any) -> set[str]:
    """Return the names of the arguments that an operator writes to."""
    return {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}


def bound(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, defaults included."""
    found: dict[str, Any] = {}
    for number, argument in enumerate(func._schema.arguments):
        if number < len(args) and not argument.kwarg_only:
            found[argument.name] = args[number]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            found[argument.name] = argument.default_value
    return found
