"""What a model uses: torch operators, custom ones, modules, counted while it runs. Must not know limits.

A dispatch mode sees every operator that reaches a backend, with its tensors; a hook sees every module that is called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from harness.composed import is_custom, is_made_of_others, opened, taken_apart
from harness.ops.hosted import counting, marked

SAMPLES = 3
SAMPLE_BYTES = 1 << 26
"""Inputs of a custom operator that are kept to check its contract, and how large they may be."""

FAMILIES: dict[str, tuple[str, ...]] = {
    "matrix": ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "dot", "mv", "_grouped_mm", "_scaled_mm", "addmv"),
    "elementwise": (
        "add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_", "pow", "neg", "exp", "sqrt", "square",
        "abs", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "addcmul", "reciprocal",
    ),
    "norms": ("native_layer_norm", "rms_norm", "_fused_rms_norm", "rsqrt", "layer_norm"),
    "activations": ("silu", "silu_", "gelu", "sigmoid", "sigmoid_", "softplus", "relu", "tanh", "erf", "mish"),
    "softmax": ("_softmax", "_log_softmax", "softmax", "log_softmax", "logsumexp", "_safe_softmax"),
    "rotary": ("cos", "sin", "polar", "view_as_complex"),
    "choices": ("topk", "sort", "argmax", "argmin", "argsort", "max", "multinomial", "kthvalue"),
    "sums": ("cumsum", "cumprod", "sum", "mean", "amax", "amin", "prod", "std", "var"),
    "places": (
        "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "index", "index_put", "index_put_",
        "_index_put_impl_", "index_select", "index_add", "index_add_", "index_copy_", "embedding", "where",
        "masked_fill", "masked_fill_", "masked_scatter", "masked_scatter_", "masked_select", "nonzero",
    ),
    "copies": (
        "copy_", "clone", "cat", "stack", "_to_copy", "constant_pad_nd", "repeat", "roll", "flip", "slice_scatter",
        "select_scatter", "fill_", "tril", "triu",
    ),
    "convolution": ("convolution", "mkldnn_convolution", "conv1d", "conv2d", "_slow_conv2d_forward", "thnn_conv2d",
                    "_conv_depthwise2d", "cudnn_convolution", "miopen_convolution"),
    "formats": ("bitwise_and", "__and__", "bitwise_right_shift", "__rshift__", "ldexp"),
}  # fmt: skip
"""Families of the suite by the torch operators that call for them. Attention is any name with it inside."""


def family_of(operator: str) -> str:
    """Return the family that tests a torch operator such as `aten::mm`, or "" where none does."""
    name = operator.partition("::")[2].partition(".")[0]
    if "attention" in name:
        return "attention"
    return next((family for family, names in FAMILIES.items() if name in names), "")


@dataclass(slots=True, kw_only=True)
class Seen:
    """What ran: operators by name with counts, the same by device of their tensors, samples of custom ones, modules.

    `inside` counts what custom operators are made of, by their name and that of torch's own. `hosted` counts what a
    device left to the host, by operator and by the one inside of it that fell back.
    """

    operators: Counter[str] = field(default_factory=Counter)
    devices: Counter[tuple[str, str]] = field(default_factory=Counter)
    inside: Counter[tuple[str, str]] = field(default_factory=Counter)
    hosted: Counter[tuple[str, str]] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[tuple[Any, tuple[Any, ...], dict[str, Any]]]] = field(default_factory=dict)
    modules: dict[type[nn.Module], int] = field(default_factory=dict)
    patched: dict[str, str] = field(default_factory=dict)

    @property
    def families(self) -> set[str]:
        """Return the families of the suite that what ran calls for, inside of custom operators too."""
        ran = {*self.operators, *(name for _, name in self.inside)}
        return {family for name in ran if (family := family_of(name))}


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, seen: Seen, keep: bool, mark: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen, self.keep, self.mark, self.around = seen, keep, mark, ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler, 800 modules, for a port that runs uncompiled anyway."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.around:
            return self._inside(func, args, kwargs)
        self._note(func, args, kwargs)
        with marked(func.name()) if self.mark else nullcontext():
            if not is_custom(func):
                return func(*args, **kwargs)
            self.around = func.name()
            try:
                return opened(self, func, args, kwargs)
            finally:
                self.around = ""

    def _inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Count a part of a custom operator; what falls back in it is the custom operator's."""
        if is_made_of_others(func, args, kwargs):
            return taken_apart(self, func, args, kwargs)
        self.seen.inside[self.around, func.name()] += 1
        self._note_dtype(list(_tensors((args, kwargs))))
        return opened(self, func, args, kwargs) if is_custom(func) else func(*args, **kwargs)

    def _note_dtype(self, found: list[Tensor]) -> None:
        for tensor in found[:1]:
            self.seen.dtypes[str(tensor.dtype).removeprefix("torch.")] += 1

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = func.name()
        self.seen.operators[name] += 1
        found = list(_tensors((args, kwargs)))
        for device in {t.device.type for t in found}:
            self.seen.devices[name, device] += 1
        self._note_dtype(found)
        if self.keep and is_custom(func):
            kept = self.seen.samples.setdefault(name, [])
            small = sum(t.numel() * t.element_size() for t in found) <= SAMPLE_BYTES
            if small and len(kept) < SAMPLES and _shape(args, kwargs) not in {_shape(a, k) for _, a, k in kept}:
                kept.append((func, _copied(args), _copied(kwargs)))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _shape(args: Any, kwargs: Any) -> str:
    return str([(tuple(t.shape), t.dtype, t.stride()) for t in _tensors((args, kwargs))])


def _copied(value: Any) -> Any:
    """Return arguments whose tensors are copies with the same strides."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(v) for v in value)
    return {k: _copied(v) for k, v in value.items()} if isinstance(value, dict) else value


@contextmanager
def watched(*, keep: bool = True, device: str = "cpu") -> Iterator[Seen]:
    """Count what runs while it is entered; `keep` samples of what custom operators are given.

    On a `device` that is not the CPU, what falls back to the host is counted too.
    """
    seen = Seen()

    def called(module: nn.Module, inputs: Any) -> None:
        seen.modules[type(module)] = seen.modules.get(type(module), 0) + 1
        if "forward" in vars(module):
            own = vars(module)["forward"]
            by = f"{getattr(own, '__module__', '?')}.{getattr(own, '__qualname__', own)}"
            seen.patched[type(module).__name__] = by

    handle = register_module_forward_pre_hook(called)
    try:
        away = torch.device(device).type != "cpu"
        with counting(seen.hosted) if away else nullcontext(), _Watch(seen, keep, away):
            yield seen
    finally:
        handle.remove()


def dtypes_of(seen: Seen, declared: str) -> tuple[torch.dtype, ...]:
    """Return the floating-point dtypes that operators ran in, the declared one first."""
    ran = [d for d in ("bfloat16", "float16", "float32") if seen.dtypes[d] and d != declared]
    return tuple(getattr(torch, name) for name in (declared, *ran))
