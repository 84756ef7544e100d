"""Taps of a foreign module by hooks, its decisions by intercepting top-k. Knows torch; must not know model classes.

A unit's first floating argument is `UNIT.in`, further ones `UNIT.in.NAME`; its first floating result is `UNIT`, further
ones `UNIT.out.N`. Arguments are bound by name, so keyword and positional calls give the same taps. Masks, positions and
caches are neither recorded nor overwritten: every implementation writes them differently.

An argument that is a value handed out before, at most cast or reshaped since, says nothing new and is not a tap:
whether a cast makes a new tensor depends on the precision, and the set of taps must not.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from harness import taps as tapnames
from harness.adapter import Recorder
from harness.adapters.handed import Handed, like
from harness.adapters.structure import Structure

_NOT_VALUES = re.compile(r"mask|cache|past|position_ids|cu_seqlens|seq_?len|seq_idx|grid|labels", re.IGNORECASE)
_CASTS = frozenset({"to", "float", "double", "half", "bfloat16", "type", "type_as", "detach", "clone", "contiguous"})
_VIEWS = frozenset({"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"})
_TOPK = frozenset({torch.topk, Tensor.topk})
_CALLED = [getattr(owner, name, None) for owner in (Tensor, torch) for name in _CASTS | _VIEWS]
_WATCHED = _TOPK | {function for function in _CALLED if callable(function)}


class Taps:
    """Hooks on the units of a module, asleep unless a recorder is listening."""

    def __init__(self, module: nn.Module, structure: Structure, *, observable: Callable[[str], bool]) -> None:
        self.structure = structure
        self.tokens = 0
        self._named = frozenset(structure.names.values())
        self.record: Recorder | None = None
        self._stack: list[str] = []
        self._calls: dict[str, int] = {}
        self.handed = Handed()
        self._head: Tensor | None = None
        self._signatures: dict[str, tuple[str, ...]] = {}
        self._bare: set[str] = set()
        self._handles: list[RemovableHandle] = []
        modules = dict(module.named_modules())
        for path, name in structure.names.items():
            if observable(name):
                self._attach(path, name, modules[path])
        if structure.backbone:
            hook = modules[structure.backbone].register_forward_pre_hook(self._before_backbone, with_kwargs=True)
            self._handles.append(hook)

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def listening(self, record: Recorder, *, tokens: int, decisions: bool) -> Iterator[None]:
        """Give every unit's values to a recorder while the module runs over `tokens` tokens."""
        self.record, self.tokens = record, tokens
        try:
            with _Watch(self) if decisions else _nothing():
                yield
        finally:
            self.record, self._head = None, None
            self._stack.clear()
            self._calls.clear()
            self.handed.clear()

    def logits(self, logits: Tensor) -> Tensor:
        """Record the final logits; those of the output matrix too, where something came after it."""
        assert self.record is not None
        head = self._head
        if head is not None and head is not logits and not _same(head, logits):
            self.record("lm_head", head, kind="logits")
        return self.record("logits", logits, dims="batch token vocab")

    def learn(self, tensor: Tensor) -> None:
        """Remember a value that is recorded already."""
        self.handed.learn(tensor)

    def unit(self) -> str:
        """Return the innermost unit that is running."""
        return self._stack[-1] if self._stack else ""

    def _attach(self, path: str, name: str, module: nn.Module) -> None:
        self._signatures[name] = _argument_names(module)
        if next(module.parameters(), None) is None:
            self._bare.add(name)

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            if self.record is None:
                return None
            with torch._C.DisableTorchFunction():  # what is looked at here is no call of the port
                return self._before(name, path, args, kwargs)

        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if self.record is None:
                return None
            if name.endswith(".experts") and getattr(self.record, "wants_parts", False):
                self._parts(name, module, args, kwargs, output)
            with torch._C.DisableTorchFunction():
                return self._after(name, output)

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def _before_backbone(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        embedded = kwargs.get("inputs_embeds")
        if self.record is None or not isinstance(embedded, Tensor) or self.handed.known(embedded):
            return None
        return args, {**kwargs, "inputs_embeds": self.handed.learn(embedded, self.record("merged", embedded))}

    def _before(self, name: str, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        unit = _told(name, args, kwargs) if name in self._bare else name
        count = self._calls[unit] = self._calls.get(unit, 0) + 1
        self._stack.append(unit if count == 1 else f"{unit}.call{count - 1}")
        given: tuple[list[Any], dict[str, Any]] = ([*args], dict(kwargs))
        first = True
        for place, argument in _in_order(self._signatures[name], len(args), tuple(kwargs)):
            core = first and path in self.structure.cores
            label = "" if first else f".{argument}"
            holder: Any = given[0] if isinstance(place, int) else given[1]
            holder[place], found = self._arguments(holder[place], argument, label, core=core)
            first = first and not found
        return tuple(given[0]), given[1]

    def _arguments(self, value: Any, argument: str, label: str, *, core: bool) -> tuple[Any, bool]:
        """Record one argument (a tensor, or a tuple of them); return what goes on, and whether it held values."""
        if not _holds_values(argument):
            return value, False
        unit = self._stack[-1]
        if isinstance(value, tuple) and value and all(isinstance(v, Tensor) for v in value):
            parts = [self._value(f"{unit}.in.{argument}.{i}", v) for i, v in enumerate(value)]
            return tuple(parts), False
        if not isinstance(value, Tensor):
            return value, False
        if not value.is_floating_point():
            chosen = value.dtype in (torch.int32, torch.int64) and tapnames.is_choice(argument)
            return (self._choice(f"{unit}.in.{argument}", value) if chosen else value), False
        if core and unit in self._named:
            return self._value(f"{unit.rpartition('.')[0]}.core", value), True
        return self._value(f"{unit}.in{label}", value), True

    def _value(self, tap: str, value: Tensor) -> Tensor:
        if self.handed.known(value):
            return self.handed.standing_for(value)
        if value.numel() == 0 or value.dim() == 0:
            return value
        assert self.record is not None
        return self.handed.learn(value, self.record(tap, value))

    def _choice(self, tap: str, value: Tensor) -> Tensor:
        """Record what a unit was told to choose, known or not: between choosing and using, a choice may be changed."""
        assert self.record is not None
        if value.numel() == 0 or value.dim() == 0:
            return value
        value = self.handed.standing_for(value) if self.handed.known(value) else value
        return self.handed.learn(value, self.record(tap, value))

    def _after(self, name: str, output: Any) -> Any:
        unit = self._stack.pop()
        if name == "lm_head" and isinstance(output, Tensor):
            self._head = self.handed.learn(output)
        if self._head is not None:
            return output  # what comes after the output matrix ends in the logits
        position = 0

        def replaced(value: Any) -> Any:
            nonlocal position
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() == 0:
                return value
            tap = unit if position == 0 else f"{unit}.out.{position}"
            position += 1
            if position > 1 and self._is_attention_map(value):
                return value  # an implementation may not have it at all
            assert self.record is not None
            return self.handed.learn(value, self.record(tap, value))

        return _mapped(output, replaced)

    def _parts(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record what each choice contributes to the experts' sum: the same call with all other weights zero."""
        record, self.record = self.record, None  # what runs in here is no place of the forward
        assert record is not None
        try:
            for part, owner in _parts_of(module, self._signatures[name], args, kwargs, output):
                record(f"{name}.parts", part, dims="token choice feature", kind="parts")
                record(f"{name}.parts.owner", owner, dims="token choice", kind="parts")
        finally:
            self.record = record

    def _is_attention_map(self, value: Tensor) -> bool:
        """Say whether a further result looks like attention weights: [batch, head, query, key]."""
        return value.dim() == 4 and value.shape[2] == self.tokens <= value.shape[3] and value.shape[1] != self.tokens

    def decision(self, scores: Tensor, result: Any, dim: int, size: int) -> Any:
        """Record a top-k inside the running unit; return the recorder's choice with the scores at hand."""
        unit = self.unit()
        routing = re.search(r"\.(moe|mlp|router)(\.|$)", unit) is not None
        if not unit or ".experts" in unit or (routing and size >= scores.shape[dim]):
            return result
        assert self.record is not None
        count = self._calls[f"{unit}.topk"] = self._calls.get(f"{unit}.topk", 0) + 1
        tap = f"{unit}.topk" if count == 1 else f"{unit}.topk.{count - 1}"
        indices = result[1]
        lead = _lead(scores, routing)
        seen = scores.masked_fill(scores <= torch.finfo(scores.dtype).min / 2, float("-inf"))
        void = seen.gather(-1, indices) == float("-inf")
        self.record(f"{tap}.scores", seen, dims=f"{lead} {'expert' if routing else 'key'}", kind="scores")
        own = indices.masked_fill(void, -1)
        kind = "routing" if routing else "selection"
        chosen = self.record(tap, own, dims=f"{lead} choice", kind=kind)
        if chosen is own:
            self.handed.learn(indices)
            return result
        chosen = torch.where(chosen < 0, seen.argmin(-1, keepdim=True), chosen).to(indices.dtype)
        return type(result)((scores.gather(-1, chosen), self.handed.learn(chosen)))


class _Watch(TorchFunctionMode):
    """Sees every torch call: follows values through casts and reshapes, and intercepts top-k."""

    def __init__(self, taps: Taps) -> None:
        super().__init__()
        self.taps = taps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _WATCHED:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if func in _TOPK:
                return self._topk(result, args, kwargs)
            if isinstance(result, Tensor) and args:
                self._follow(result, args[0])
        return result

    def _topk(self, result: Any, args: Any, kwargs: Any) -> Any:
        scores = args[0] if args else kwargs["input"]
        size = args[1] if len(args) > 1 else kwargs["k"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        largest = args[3] if len(args) > 3 else kwargs.get("largest", True)
        last = dim in (-1, scores.dim() - 1)
        if last and largest and scores.is_floating_point() and "out" not in kwargs:
            return self.taps.decision(scores, result, -1, size)
        return result

    def _follow(self, result: Tensor, source: Any) -> None:
        handed = self.taps.handed
        if result is source or not isinstance(source, Tensor) or source.numel() != result.numel():
            return
        if handed.known(source):
            instead = handed.standing_for(source)
            handed.learn(result, None if instead is source else like(instead, result))


class Float64Islands(TorchFunctionMode):
    """Raises what a model computes in float32 on purpose (norms, softmax, routers) to float64, for a float64 oracle."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch call with float64 wherever it says float32."""
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _same(actual: Tensor, expected: Tensor) -> bool:
    """Say whether two tensors hold the same values, in whatever precision."""
    if actual.shape != expected.shape or actual.dtype == expected.dtype:
        return torch.equal(actual, expected)
    return torch.equal(actual.double(), expected.double())


def _parts_of(
    module: nn.Module, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parts [N, K, E'] of a sum over choices and their owners [N, K], where a module is given choices.

    Such a module takes choices and weights of one shape [N, K]. Any other yields nothing.
    """
    places = {name: p for p, name in _in_order(names, len(args), tuple(kwargs))}
    given = {name: args[p] if isinstance(p, int) else kwargs[p] for name, p in places.items()}
    choices = {n: v for n, v in given.items() if isinstance(v, Tensor) and v.dim() == 2 and tapnames.is_choice(n)}
    if len(choices) != 1 or not isinstance(output, Tensor):
        return
    ((chosen, owner),) = choices.items()
    weights = [
        n for n, v in given.items()
        if isinstance(v, Tensor) and v.is_floating_point() and v.shape == owner.shape and n != chosen
    ]  # fmt: skip
    if len(weights) != 1 or output.numel() % owner.shape[0]:
        return
    step = tapnames.part_step(output.shape[-1])
    parts = []
    for k in range(owner.shape[1]):
        alone = torch.zeros_like(given[weights[0]])
        alone[:, k] = given[weights[0]][:, k]
        result = module.forward(
            *_instead(args, places[weights[0]], alone), **_instead(kwargs, places[weights[0]], alone)
        )
        parts.append(result.reshape(owner.shape[0], -1)[:, ::step].float())
    yield torch.stack(parts, dim=1), owner


def _instead(given: Any, place: int | str, value: Tensor) -> Any:
    """Return arguments (by position, or by name) with another value at one place, if they have it."""
    if isinstance(given, dict):
        return {name: value if name == place else old for name, old in given.items()}
    return tuple(value if i == place else old for i, old in enumerate(given))


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _argument_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's arguments in order; further positional ones are called `arg1`, ..."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind in kinds)


def _told(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the name of a call of a module without weights that is told by a word what to make.

    Such as rotary tables of several kinds of layers, made one after the other in any order.
    """
    word = next((v for v in (*args, *kwargs.values()) if isinstance(v, str)), "")
    return f"{name}.{re.sub(r'[^0-9A-Za-z]', '_', word)}" if word else name


@lru_cache(maxsize=1 << 12)
def _in_order(names: tuple[str, ...], count: int, keywords: tuple[str, ...]) -> list[tuple[int | str, str]]:
    """Return (place, name) of given arguments, in the order of the signature: `count` by position, then keywords."""
    positional: list[tuple[int | str, str]] = [(i, names[i] if i < len(names) else f"arg{i}") for i in range(count)]
    ordered = sorted(keywords, key=lambda k: names.index(k) if k in names else len(names))
    return [*positional, *((k, k) for k in ordered)]


@lru_cache(maxsize=1 << 12)
def _holds_values(argument: str) -> bool:
    return _NOT_VALUES.search(argument) is None


def _lead(scores: Tensor, routing: bool) -> str:
    """Name the axes before the last one of scores: [T, E], [B, T, K], [T, group, E]."""
    if scores.dim() == 1:
        return ""
    if scores.dim() == 2:
        return "token"
    if scores.dim() == 3:
        return "token group" if routing and scores.shape[0] != 1 else "batch token"
    return " ".join(["batch", "token", *(f"axis{i}" for i in range(2, scores.dim() - 1))])


def _mapped(value: Any, replaced: Callable[[Any], Any]) -> Any:
    """Apply a function to the tensors of a result: a tensor, a (named) tuple, a list, a mapping or a record of them."""
    if isinstance(value, Tensor):
        return replaced(value)
    if isinstance(value, tuple):
        parts = [replaced(v) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [replaced(v) for v in value]
    if isinstance(value, dict):
        for key in list(value):
            new = replaced(value[key])
            if new is not value[key]:
                value[key] = new
    return value
