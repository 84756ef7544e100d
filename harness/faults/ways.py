"""The ways in which a fault gets into a module. Knows hooks and torch calls; must not know which fault it is.

Hooks are hung before the harness hangs its own, so they lie inside the unit.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.faults.catalogue import NoPlace
from harness.faults.parts import Parts


def given(call: Any) -> Any:
    """Return the first argument of a call, as `on_output` hands it to a change."""
    args, kwargs = call
    return (args or tuple(kwargs.values()))[0]


def on_output(module: nn.Module, change: Callable[..., Any]) -> None:
    """Change a module's first tensor output: `change(output, inputs)`."""

    def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0], (args, kwargs)), *output[1:])
        return change(output, (args, kwargs))

    module.register_forward_hook(hook, with_kwargs=True)


def widen_logits(parts: Parts, fill: float) -> None:
    """Add three columns to the logits of the whole model."""

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        output.logits = nn.functional.pad(output.logits, (0, 3), value=fill)
        return output

    parts.module.register_forward_hook(hook)


def on_arguments(module: nn.Module, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a module's keyword arguments in a copy."""

    def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        change(kwargs)
        return args, kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)


def within(module: nn.Module, context: Callable[[], Any]) -> None:
    """Run a module's forward inside a context."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with context():
            return inner(*args, **kwargs)

    module.forward = forward  # type: ignore[method-assign]


class _Gated(nn.Module):
    """An activation of two halves."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the gated values."""
        return self.inner(gate) * up  # type: ignore[no-any-return]


def other_activation(activation: Any) -> nn.Module:
    """Return an activation that gives other values, called like the one that is there. Raises NoPlace without one."""
    if not callable(activation):
        raise NoPlace("no activation to exchange")
    taken = inspect.signature(getattr(activation, "forward", activation)).parameters.values()
    count = sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in taken)
    other = nn.SiLU() if "gelu" in type(activation).__name__.lower() else nn.GELU()
    if count > 2:
        raise NoPlace(f"an activation of {count} arguments")
    return other if count < 2 else _Gated(other)


class Calls(TorchFunctionMode):
    """Pass torch calls through `change(function, arguments, keywords)`, which returns NotImplemented to keep one."""

    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__()
        self.change = change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.change(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if result is NotImplemented else result


@contextmanager
def held(tensor: Tensor, value: Any) -> Iterator[None]:
    """Give a parameter another value for the time being, so that whoever looks at weights sees the right one."""
    kept = tensor.data
    tensor.data = torch.full_like(kept, value) if isinstance(value, (int, float)) else value.to(kept.dtype)
    try:
        yield
    finally:
        tensor.data = kept


def follow_positions(module: nn.Module) -> dict[str, Tensor]:
    """Return a box that holds the position ids of the running call."""
    box: dict[str, Tensor] = {}

    def look(kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("position_ids")
        box["ids"] = ids if isinstance(ids, Tensor) else torch.arange(kwargs["input_ids"].shape[-1])

    on_arguments(module, look)
    return box


def allowed(mask: Tensor) -> Tensor:
    """Return a mask as booleans: where a query may look."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def on_mask(attention: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change which keys a query sees, [..., T, S]. An attention that is given no such mask has no place for it."""

    def rewrite(kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.dim() < 3:
            if kwargs["hidden_states"].shape[1] > 1:
                raise NoPlace("this attention is given no mask of queries and keys")
            return
        seen = change(allowed(mask))
        kwargs["attention_mask"] = (
            seen if mask.dtype == torch.bool else torch.zeros_like(mask).masked_fill(~seen, torch.finfo(mask.dtype).min)
        )

    on_arguments(attention, rewrite)


def on_cache(module: nn.Module, after: Callable[[Any], None], before: Callable[[Any], Any] = lambda c: c) -> None:
    """Look at the cache of every call of the whole model, before and after it."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        name = next((n for n in ("cache", "past_key_values") if n in kwargs), "")
        if name:
            kwargs[name] = before(kwargs[name])
        output = inner(*args, **kwargs)
        cache = getattr(output, "cache", None) or getattr(output, "past_key_values", None)
        if cache is not None:
            after(cache)
        return output

    module.forward = forward  # type: ignore[method-assign]


def bind_names(module: nn.Module) -> None:
    """Bind positional arguments by name, so that a change finds them."""
    names = list(inspect.signature(module.forward).parameters)

    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return (), {**dict(zip(names, args, strict=False)), **kwargs}

    module.register_forward_pre_hook(hook, with_kwargs=True)


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Pass kernels through `change(kernel, arguments)`, which returns NotImplemented to keep one.

    Below what sees torch calls: who watches them sees the changed result, as of a faulty device.
    """

    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.change = change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.change(func, args)
        return func(*args, **(kwargs or {})) if result is NotImplemented else result


def on_topk(module: nn.Module, change: Callable[..., Any], width: Callable[[Tensor], bool]) -> None:
    """Change the top-k kernel inside a module, for inputs of some width: `change(x, k)` gives values and indices."""

    def watch(func: Any, args: Any) -> Any:
        if func is not torch.ops.aten.topk.default or not width(args[0]):
            return NotImplemented
        return change(args[0], args[1])

    within(module, lambda: Kernels(watch))
