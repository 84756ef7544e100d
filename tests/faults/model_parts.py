"""Places in a model by build, and the ways in which a fault gets into them. Knows modules; must not know the faults."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Fault = Callable[["Parts"], None]
FAULTS: dict[str, Fault] = {}
BENIGN: dict[str, Fault] = {}


def fault(run: Fault) -> Fault:
    """Add a fault to the table under its function's name."""
    FAULTS[run.__name__] = run
    return run


def benign(run: Fault) -> Fault:
    """Add a harmless change to the table under its function's name."""
    BENIGN[run.__name__] = run
    return run


class Parts:
    """Places in a model, by build. Each raises ValueError where the model has no such place."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        lists = {p: m for p, m in module.named_modules() if isinstance(m, nn.ModuleList)}
        decoders = [m for p, m in lists.items() if not re.search("vis", p) and child_with(m[0], "attn") is not None]
        towers = [m for p, m in lists.items() if re.search("vis", p) and child_with(m[0], "attn") is not None]
        self.layers = list(max(decoders, key=len))
        self.blocks = list(towers[0]) if towers else []
        self.tower = next((m for p, m in module.named_modules() if re.search(r"vis[^.]*$", p)), None)

    def layer(self, has: Callable[[nn.Module], Any] = bool) -> nn.Module:
        """Return a middle layer that has something: the second one if it does, else the next."""
        found = [m for m in (*self.layers[1:], self.layers[0]) if _has(has, m)]
        if not found:
            raise ValueError("this model has no place for the fault")
        return found[0]

    def attention(self, has: Callable[[nn.Module], Any] = bool) -> nn.Module:
        """Return the attention of a middle layer that has something."""
        return attention_of(self.layer(lambda m: has(attention_of(m))))

    def router(self) -> nn.Module:
        """Return the router of a middle layer."""
        return router_of(self.layer(router_of))

    def experts(self) -> nn.Module:
        """Return the routed experts of a middle layer."""
        return find(self.layer(lambda m: find(m, r"experts$", shared=False)), r"experts$", shared=False)

    def indexer(self) -> nn.Module:
        """Return the indexer of a middle layer."""
        return find(self.layer(lambda m: find(m, r"indexer$")), r"indexer$")

    def rotary(self) -> nn.Module:
        """Return the module that makes the decoder's rotary tables."""
        for path, part in self.module.named_modules():
            if re.search(r"rotary", path) and "vis" not in path:
                return part
        raise ValueError("this model has no rotary table")


def _has(has: Callable[[nn.Module], Any], module: nn.Module) -> bool:
    try:
        found = has(module)
    except ValueError:
        return False
    return found is not None and found is not False


def child_with(module: nn.Module, word: str) -> nn.Module | None:
    """Return the first child whose name holds a word and which holds matrices, or None."""
    for name, child in module.named_children():
        if word in name and sum(1 for m in child.modules() if isinstance(m, nn.Linear)) >= 2:
            return child
    return None


def attention_of(layer: nn.Module) -> nn.Module:
    """Return what mixes tokens in a layer."""
    found = child_with(layer, "attn")
    if found is None:
        raise ValueError("this layer has no attention")
    return found


def find(module: nn.Module, pattern: str, *, shared: bool = True) -> nn.Module:
    """Return the first part whose path matches, outside of shared experts if asked. Raises ValueError without one."""
    for path, part in module.named_modules():
        if re.search(pattern, path) and (shared or "shared" not in path):
            return part
    raise ValueError(f"nothing here is called {pattern}")


def router_of(layer: nn.Module) -> nn.Module:
    """Return what chooses experts in a layer. Raises ValueError without one."""
    for path, part in layer.named_modules():
        if re.search(r"(gate|router)$", path) and hasattr(part, "top_k"):
            return part
    raise ValueError("this layer has no router")


def out_projection(attention: nn.Module) -> nn.Module:
    """Return the last matrix of an attention."""
    return find(attention, r"^(o_proj|out_proj|proj)$")


def find_or_none(module: nn.Module, pattern: str) -> nn.Module | None:
    """Return the first part whose path matches, or None."""
    return next((m for p, m in module.named_modules() if re.search(pattern, p)), None)


# --- how a fault gets in: hooks are hung before the harness hangs its own, so they lie inside the unit


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
    on_arguments(module, lambda kwargs: box.update(ids=kwargs["position_ids"]))
    return box


def allowed(mask: Tensor) -> Tensor:
    """Return a mask as booleans: where a query may look."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def on_mask(attention: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change which keys a query sees, [..., T, S]."""

    def rewrite(kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.dim() < 3:
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
