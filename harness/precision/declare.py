"""A reference that computes as a port does that holds narrower numbers. Knows modules; must not know taps or limits.

`Rounds` says how each kind of number is rounded; `declare` makes an nn.Module do so: linear and fused expert weights
replaced by their round trip, inputs of their products rounded as they are used, and what any cache is given rounded as
it is written. A reference that is no nn.Module calls the three itself (see `harness.adapter.Rounding`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from harness.precision.rounding import peaks, quantised
from harness.precision.scheme import Precision, Scheme

NUDGE_FLOAT, NUDGE_INTEGER = 0.045, 0.015
"""By how much each further floor widens the scale of what is rounded while it runs. A port takes its scale before or
after a rounding, from a file or a longer request: which neighbour a value goes to is then drawn anew, and the error
keeps its size (of a float exactly, of an integer within 18 % at twelve floors). A narrower scale would saturate."""
_PRODUCTS = re.compile(r"^_*(linear|r?matmul|einsum|mm|bmm|addmm|baddbmm|(scaled_)?grouped_mm\w*)_*$")
_SUMMED_FIRST = re.compile(r"^b?add")
_CACHES = ("cache", "past_key_values", "past_key_value", "cache_params")
_LEAST_FUSED = 3


class Rounds:
    """What a declaration means for each number. `run` is the seed of a jitter (0: none), set before each run."""

    def __init__(self, precision: Precision) -> None:
        self.precision, self.jitter = precision, 0
        self.inside = 0
        self._storages: set[int] = set()
        self._held: list[Tensor] = []
        self.written = 0

    def nudge(self, scheme: Scheme) -> float:
        """Return the factor on scales in this run."""
        return 1.0 + self.jitter * (NUDGE_INTEGER if scheme.format.mantissa is None else NUDGE_FLOAT)

    def weight(self, name: str, tensor: Tensor) -> Tensor:
        """Return a weight as the port holds it, and remember that inputs of products with it are rounded too."""
        if self.precision.keeps(name):
            return tensor
        scheme = self.precision.weights
        held = quantised(tensor, scheme) if scheme is not None else tensor
        self._storages.add(held.untyped_storage().data_ptr())
        self._held.append(held)  # as long as it lives, no other memory has its address
        return held

    def mark(self) -> int:
        """Return how many weights are remembered so far."""
        return len(self._held)

    def forget(self, mark: int) -> None:
        """Forget the weights after a mark: they are no longer in memory."""
        self._storages -= {held.untyped_storage().data_ptr() for held in self._held[mark:]}
        del self._held[mark:]

    def keeps(self, name: str) -> bool:
        """Say whether a weight stays as it is."""
        return self.precision.keeps(name)

    def inputs(self) -> AbstractContextManager[Any]:
        """Return what rounds the inputs of products with weights, while it is entered."""
        return nullcontext() if self.precision.activations is None else _Inputs(self)

    def writer(self) -> Callable[[str, Tensor], Tensor]:
        """Return what rounds what one request writes to its cache, by name; a scale is that of all written so far."""
        largest: dict[str, Tensor] = {}

        def write(name: str, value: Tensor, *, state: bool = False) -> Tensor:
            scheme = self.precision.state if state else self.precision.cache
            if scheme is None or self.precision.keeps(name):
                return value
            self.written += 1
            return self._written(name, value, scheme, largest)

        return write

    def _written(self, name: str, value: Tensor, scheme: Scheme, largest: dict[str, Tensor]) -> Tensor:
        if scheme.granularity not in ("tensor", "head") or scheme.rows or not value.numel():
            return quantised(value, scheme, nudge=self.nudge(scheme))
        peak = peaks(value, scheme)
        if name in largest:
            peak = torch.maximum(peak, largest[name])
        largest[name] = peak
        return quantised(value, scheme, peak=peak, nudge=self.nudge(scheme))

    def is_weight(self, tensor: Tensor) -> bool:
        """Say whether a tensor is a weight whose inputs are rounded, or a part of one."""
        return tensor.untyped_storage().data_ptr() in self._storages

    def input(self, value: Tensor) -> Tensor:
        """Return the input of a product as the port rounds it."""
        scheme = self.precision.activations
        assert scheme is not None
        return quantised(value, scheme, nudge=self.nudge(scheme))


class _Inputs(TorchFunctionMode):
    """Sees every torch call, and rounds what is multiplied with a weight."""

    def __init__(self, rounds: Rounds) -> None:
        super().__init__()
        self.rounds = rounds

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if _PRODUCTS.match(name):
            with torch._C.DisableTorchFunction():
                args = self._rounded(args, 1 if _SUMMED_FIRST.match(name) else 0)
        return func(*args, **kwargs)

    def _rounded(self, args: tuple[Any, ...], first: int) -> tuple[Any, ...]:
        """Round the first factor, where a further one is a weight, or any where experts have gathered theirs."""
        if isinstance(args[0], str):  # einsum
            first = 1
        factor, others = args[first], args[first + 1 :]
        if not isinstance(factor, Tensor) or not factor.is_floating_point() or self.rounds.is_weight(factor):
            return args
        if self.rounds.inside or any(isinstance(o, Tensor) and self.rounds.is_weight(o) for o in others):
            return (*args[:first], self.rounds.input(factor), *args[first + 1 :])
        return args


def declare(module: nn.Module, rounds: Rounds) -> list[torch.utils.hooks.RemovableHandle]:
    """Make a module compute with rounded weights, inputs and caches; return the hooks that it hangs.

    Weights without values (on the meta device) are left to whoever brings their values: see `round_part`.
    """
    handles = []
    for path, part in module.named_modules():
        rounded = [*_rounded_weights(path, part, rounds)]
        if not any(part._parameters[name].is_meta for name in rounded):  # type: ignore[union-attr]
            round_part(path, part, rounds)
        if rounds.precision.activations is not None and any(_is_stacked(part, name) for name in rounded):
            handles += _watch_inside(part, rounds)
        names = tuple(inspect.signature(part.forward).parameters) if path else ()
        if (rounds.precision.cache or rounds.precision.state) and set(names) & set(_CACHES):
            handles.append(part.register_forward_pre_hook(_cache_hook(names, rounds), with_kwargs=True))
    return handles


def round_part(path: str, part: nn.Module, rounds: Rounds) -> None:
    """Replace the weights of a linear, or of fused experts, by what the port holds of them."""
    for name in _rounded_weights(path, part, rounds):
        value, whole = part._parameters[name], f"{path}.{name}".lstrip(".")
        assert value is not None
        turned = _is_stacked(part, name) and getattr(part, "is_transposed", False)
        held = value.detach().transpose(-1, -2).contiguous() if turned else value.detach()
        held = rounds.weight(whole, held)
        if turned:
            held = rounds.weight(whole, held).transpose(-1, -2)
        part._parameters[name] = nn.Parameter(held, requires_grad=False)


def _rounded_weights(path: str, part: nn.Module, rounds: Rounds) -> list[str]:
    """Return the weights of a part that are rounded: a linear's, and those of fused experts."""
    return [
        name for name, value in part._parameters.items()
        if value is not None and value.is_floating_point() and not rounds.keeps(f"{path}.{name}".lstrip("."))
        and (_is_stacked(part, name) or (name == "weight" and isinstance(part, nn.Linear)))
    ]  # fmt: skip


def _is_stacked(part: nn.Module, name: str) -> bool:
    value = part._parameters[name]
    return value is not None and value.dim() == _LEAST_FUSED and not isinstance(part, _CONVOLUTIONS)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d)


def _watch_inside(part: nn.Module, rounds: Rounds) -> list[torch.utils.hooks.RemovableHandle]:
    """Count a call of fused experts as inside: they may multiply with a copy of some experts' weights."""

    def before(*_: Any) -> None:
        rounds.inside += 1

    def after(*_: Any) -> None:
        rounds.inside -= 1

    return [part.register_forward_pre_hook(before), part.register_forward_hook(after, always_call=True)]


def _cache_hook(names: tuple[str, ...], rounds: Rounds) -> Callable[..., None]:
    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given: Mapping[str, Any] = {**dict(zip(names, args)), **kwargs}  # noqa: B905  (defaults are left out)
        for name in _CACHES:
            if given.get(name) is not None:
                round_cache(given[name], rounds)

    return before


def round_cache(cache: Any, rounds: Rounds) -> None:
    """Make a cache round what its `update...` methods are given, from now on."""
    if getattr(cache, "_day0_rounded", None) is rounds or not callable(getattr(cache, "update", None)):
        return
    write = rounds.writer()
    for name in dir(type(cache)):
        if (name == "update" or name.startswith("update_")) and "conv" not in name:
            method = getattr(cache, name)
            if callable(method):
                setattr(cache, name, _writing(method, name, write))
    cache._day0_rounded = rounds


def _writing(method: Callable[..., Any], name: str, write: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return a method of a cache that rounds the tensors it is given; states are those of recurrent layers."""
    state = "recurrent" in name or "ssm" in name

    def update(*args: Any, **kwargs: Any) -> Any:
        rest = [a for a in (*args, *kwargs.values()) if isinstance(a, int)]
        layer = rest[0] if rest else kwargs.get("layer_idx", 0)
        where = f"layers.{layer}.{'state' if state else 'cache'}"

        def rounded(value: Any, at: object) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 3:
                return value
            return write(f"{where}.{name}.{at}", value, state=state)

        given = [rounded(a, i) for i, a in enumerate(args)]
        return method(*given, **{k: rounded(v, k) for k, v in kwargs.items()})

    return update
