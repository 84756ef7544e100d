"""Shows a dispatch mode what runs inside of a custom operator. Knows torch's dispatcher; must not know who looks.

A custom operator reaches a mode as one call, and a mode is left while its own call runs. Here the operator's kernel for
the device of its tensors is called with the mode entered again, so that torch operators inside are seen one by one. A
kernel that calls none (a binary, Triton) runs as ever and shows nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

BUILT_IN = frozenset({"aten", "prim", "prims", "profiler", "inductor", "rngprims", "_c10d_functional", "c10d"})
"""Namespaces that are torch's own; any other is somebody's custom operator."""
_MADE_OF_OTHERS = "CompositeImplicitAutograd"


def is_custom(func: Any) -> bool:
    """Say whether an operator is somebody's own."""
    return str(func.namespace) not in BUILT_IN


def opened(mode: TorchDispatchMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a custom operator from within `mode`, which sees what runs inside of it. The result is its own."""
    key = _key(args, kwargs)
    if key is None:
        return func(*args, **kwargs)
    with mode:
        return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


def is_made_of_others(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Say whether torch has a call only as a sequence of other operators: inside of an opened one it comes whole."""
    key = _key(args, kwargs)
    if key is None or not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _MADE_OF_OTHERS):
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key.name)


def taken_apart(mode: TorchDispatchMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator that is made of others from within `mode`, which sees those."""
    with mode:
        return func.decompose(*args, **kwargs)


def _key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the dispatch key of the tensors' device, of one that is not the CPU first; None where there are none."""
    kinds = {leaf.device.type for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)}
    if not kinds:
        return None
    kind = next((k for k in sorted(kinds) if k != "cpu"), "cpu")
    return torch._C._dispatch_key_parse(torch._C._dispatch_key_for_device(kind))
