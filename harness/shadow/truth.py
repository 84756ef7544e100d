"""One operator call repeated on the CPU: what it must give, how far off a result may be. Knows operators, no ports.

Copies, choices and whole numbers are equal or wrong. Anything else is repeated in float64. Its budget is one ulp of the
result, the roundings of a formula in the precision computed in, and what roundings inside may make of it: how far the
result moves where each input moves by an epsilon, times what a reduction of that length adds up. So an unknown operator
has a budget too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.shadow.calls import Held, bound, mapped, same_bits, tensors_in
from harness.shadow.fused import OTHERWISE

EXACT = frozenset({
    "clone", "cat", "stack", "index", "index_select", "gather", "scatter", "scatter_", "index_copy_", "index_copy",
    "embedding", "where", "masked_fill", "masked_fill_", "masked_select", "slice_scatter", "select_scatter",
    "constant_pad_nd", "repeat", "roll", "flip", "tril", "triu", "tril_", "triu_", "fill_", "fill", "zero_", "neg",
    "abs", "relu", "relu_", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "clamp_", "max", "min", "amax",
    "amin", "sign", "nonzero", "repeat_interleave", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like",
    "new_zeros", "new_ones", "new_full", "masked_scatter", "masked_scatter_", "scalar_tensor", "unbind_copy", "aminmax",
    "_unsafe_view", "ceil", "floor", "trunc", "round", "isin", "expand_copy", "bitwise_not", "alias_copy",
})  # fmt: skip
"""Operators whose floating results are values that they were given: nothing is rounded."""
CHOOSING = frozenset({"topk", "sort", "argmax", "argmin", "argsort"})
"""Operators whose indices are judged by what they point at: the order of ties is free."""
PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "mv", "dot", "addmv", "_grouped_mm", "convolution"})
ROWS = frozenset({
    "_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "native_layer_norm", "_fused_rms_norm",
    "rms_norm", "logcumsumexp",
})  # fmt: skip
"""Operators that reduce rows and give rows."""
NORMS = frozenset({
    "native_layer_norm", "_fused_rms_norm", "rms_norm", "native_group_norm", "native_batch_norm", "linalg_vector_norm",
})  # fmt: skip
"""Formulas of several steps whose values between may be rounded to the dtype of the result."""
FLOAT32 = 2.0**-23
"""What is computed in where a device declares nothing: an epsilon of float32."""
DRAWS = (1, 2)
ULPS = 1.0
ROUNDINGS = 4.0
"""Roundings of one element's own formula, in epsilons of the precision computed in."""
NORM_ULPS = 4.0
"""Ulps of a row's root mean square that roundings between the steps of a norm may make."""
HONEST = 4.0
"""What the CPU itself is off by beyond one ulp in the port's precision, in the same row, counts this often."""


class NotRepeatable(Exception):
    """The CPU cannot repeat this call; the words say why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """How one output came out. `ratio` is error over budget at its worst, None where it must be equal.

    `wrong` elements of `count` are unequal, or NaN on one side only. `at` is the worst place (flat), with both values.
    """

    kind: str
    ratio: float | None
    wrong: int
    count: int
    at: int = 0
    actual: str = ""
    expected: str = ""


def name_of(func: Any) -> str:
    """Return the plain name of an operator: `mm` of `aten::mm.out`."""
    return str(func._schema.name).partition("::")[2]


def inside_eps(words: Mapping[str, str]) -> float:
    """Return the epsilon of the coarsest of what a device says that it sums, multiplies and computes in."""
    said = [words[key] for key in ("accumulate", "factors", "compute") if words.get(key)]
    return max([FLOAT32, *(2.0**-10 if name == "tf32" else torch.finfo(getattr(torch, name)).eps for name in said)])


def judge(func: Any, args: Any, kwargs: Any, outputs: Sequence[Held], inside: float = FLOAT32) -> list[Judged]:
    """Repeat a call of `Held` arguments on the CPU and hold each output against it; `inside`: see `inside_eps`.

    Raises:
        NotRepeatable: the CPU has no such operator, or refuses what the device took.
    """
    name = name_of(func)
    given = [o.tensor() for o in outputs]
    native = _repeated(func, args, kwargs, None)
    if name in OTHERWISE:
        given = given[: len(native)]  # what else a fused operator returns is its own business
    if name in CHOOSING:
        return _choices(name, bound(func, args, kwargs), given, native)
    if len(native) != len(given) or any(a.shape != b.shape for a, b in zip(given, native, strict=True)):
        shapes = [tuple(t.shape) for t in given], [tuple(t.shape) for t in native]
        return [Judged(kind="shape", ratio=None, wrong=1, count=1, actual=str(shapes[0]), expected=str(shapes[1]))]
    rounded = [o.is_floating_point() and not _is_exact(name, args, kwargs, o) for o in given]
    if not any(rounded):
        return [_equal(a, e) for a, e in zip(given, native, strict=True)]
    wide = _repeated(func, args, kwargs, torch.float64)
    moved = [_repeated(func, args, kwargs, torch.float64, moved=draw, inside=inside) for draw in DRAWS]
    length = _length(name, args, kwargs, outputs)
    found = []
    for number, (actual, close) in enumerate(zip(given, rounded, strict=True)):
        if close:
            swing = [m[number] for m in moved]
            steps = NORM_ULPS if name in NORMS else 0.0
            found.append(_close(actual, wide[number], swing, length, native[number], steps, inside))
        else:
            found.append(_equal(actual, native[number]))
    return found


def _is_exact(name: str, args: Any, kwargs: Any, output: Tensor) -> bool:
    """Say whether a floating output is made of values that were given; a copy to a narrower dtype rounds."""
    if name in EXACT:
        return True
    if name in ("index_put_", "index_put", "_index_put_impl_"):
        return not ((len(args) > 3 and args[3]) or kwargs.get("accumulate"))
    sources = [leaf.flat.dtype for leaf in _held((args, kwargs))]
    if name in ("copy_", "_to_copy", "copy", "_copy_from"):
        source = sources[-1]
        return source == output.dtype or (source.is_floating_point and output.dtype.itemsize > source.itemsize > 1)
    return False


def _held(value: Any) -> list[Held]:
    found: list[Held] = []
    mapped(value, lambda leaf: found.append(leaf) if isinstance(leaf, Held) else None)
    return found


def _repeated(
    func: Any, args: Any, kwargs: Any, dtype: torch.dtype | None, moved: int = 0, inside: float = FLOAT32
) -> list[Tensor]:
    """Call the operator on copies on the CPU; floating ones in `dtype`, if one is given."""
    count = iter(range(1 << 20))

    def leaf(value: Any) -> Any:
        if isinstance(value, Held):
            wide = dtype if value.flat.is_floating_point() else None
            return value.tensor(wide, moved * (1000 + next(count)) if moved else 0, inside)
        if isinstance(value, torch.dtype) and dtype is not None and value.is_floating_point:
            return dtype
        return torch.device("cpu") if isinstance(value, torch.device) else value

    given, named = mapped((list(args), dict(kwargs)), leaf)
    named.pop("pin_memory", None)
    if name_of(func) in ("_softmax", "_log_softmax") and len(given) > 2:
        given[2] = False  # half to float: an accelerator's own form
        if dtype is None and args[2]:
            given[0] = given[0].float()
    try:
        result = OTHERWISE.get(name_of(func), func)(*given, **named)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
        raise NotRepeatable((str(error).splitlines() or [type(error).__name__])[0][:160]) from error
    return [t.detach() for t in tensors_in(result)]


def _length(name: str, args: Any, kwargs: Any, outputs: Sequence[Held]) -> float:
    """Return the roundings that a reduction adds up: of a blocked product about 8 sqrt(n), of a sum n at worst."""
    given = [h for h in _held((args, kwargs)) if h.flat.is_floating_point()]
    if name in PRODUCTS:
        inner = max((h.sizes[-1] for h in given if h.sizes), default=1)
        first = given[-2].sizes[-1] if len(given) > 1 and given[-2].sizes else inner
        if name == "convolution":
            first = math.prod(given[1].sizes[1:]) if len(given) > 1 else inner
        return 8 * math.sqrt(max(1, first))
    if name in ROWS:
        return float(max((h.sizes[-1] for h in given if h.sizes), default=1))
    largest = max((math.prod(h.sizes) for h in given), default=1)
    least = min((math.prod(o.sizes) for o in outputs), default=1)
    return max(1.0, largest / max(1, least))


def _ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance of neighbours in `dtype` at a float64 value."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(value.abs().clamp(min=info.tiny)).exponent - 1
    return torch.ldexp(torch.full_like(value, info.eps), exponent)


def _close(
    actual: Tensor, wanted: Tensor, swing: Sequence[Tensor], length: float, native: Tensor, steps: float, inside: float
) -> Judged:
    """Hold a rounded output against float64 and its budget."""
    got, want = actual.double(), wanted.double()
    want = torch.where(torch.isinf(want.to(actual.dtype).double()), want.to(actual.dtype).double(), want)
    finite = torch.isfinite(want) & torch.isfinite(got)
    odd = ~finite & ~same_bits(got, want) & ~same_bits(got, native.double())
    error = torch.where(finite, (got - want).abs(), torch.zeros_like(want))
    ulp = _ulp(want.nan_to_num(0.0, 0.0, 0.0), actual.dtype)
    moved = torch.stack([(s.double() - wanted.double()).abs().nan_to_num(0.0, 0.0, 0.0) for s in swing]).amax(0)
    if moved.dim():
        moved = torch.maximum(moved, moved.square().mean(-1, keepdim=True).sqrt())
    honest = ((native.double() - want).abs().nan_to_num(0.0, 0.0, 0.0) - ulp).clamp(min=0)
    if honest.dim():
        honest = honest.amax(-1, keepdim=True)  # inside of a formula the CPU rounds as well, now here, now there
    within = torch.finfo(torch.float64).eps if actual.dtype is torch.float64 else inside
    inner = (ROUNDINGS + math.sqrt(length)) * within / torch.finfo(actual.dtype).eps
    budget = (ULPS + inner) * ulp + (ROUNDINGS + length) * moved + HONEST * honest
    if steps and want.dim():
        row = want.nan_to_num(0.0, 0.0, 0.0).square().mean(-1, keepdim=True).sqrt()
        budget = budget + steps * _ulp(row, actual.dtype)
    share = (error / budget).flatten()
    wrong, count = int(odd.sum()), actual.numel()
    if not count:
        return Judged(kind="values", ratio=0.0, wrong=0, count=0)
    at = int(odd.flatten().int().argmax()) if wrong else int(share.argmax())
    kind = "nonfinite" if wrong else "values"
    return Judged(
        kind=kind, ratio=float(share.max()), wrong=wrong, count=count, at=at, actual=_words(got, at),
        expected=_words(want, at),
    )  # fmt: skip


def _equal(actual: Tensor, wanted: Tensor) -> Judged:
    """Hold an output that is not rounded against the same on the CPU."""
    if wanted.dtype != actual.dtype and not wanted.is_floating_point():
        wanted = wanted.to(actual.dtype)
    differs = ~same_bits(actual, wanted.to(actual.dtype)).flatten()
    at = int(differs.int().argmax()) if differs.numel() else 0
    return Judged(
        kind="bits", ratio=None, wrong=int(differs.sum()), count=differs.numel(), at=at, actual=_words(actual, at),
        expected=_words(wanted, at),
    )  # fmt: skip


def _choices(name: str, named: Mapping[str, Any], given: Sequence[Tensor], native: Sequence[Tensor]) -> list[Judged]:
    """Hold indices against what they point at, and what came with them against the same values."""
    source = named["self"].tensor()
    dim = named.get("dim", -1)
    flat = dim is None
    source, dim = (source.flatten(), 0) if flat or source.dim() == 0 else (source, dim)
    indices, expected = given[-1], native[-1]
    if flat:
        indices, expected = indices.reshape(1), expected.reshape(1)
    elif indices.dim() < source.dim():
        indices, expected = indices.unsqueeze(dim), expected.unsqueeze(dim)
    inside = (indices >= 0) & (indices < source.shape[dim])
    points = source.gather(dim, indices.clamp(0, source.shape[dim] - 1))
    wanted = source.gather(dim, expected)
    if name == "topk" and named.get("sorted") is False:
        points, wanted = points.sort(dim).values, wanted.sort(dim).values
    twice = indices.sort(dim).values.diff(dim=dim) == 0
    found = [_equal(points, wanted)]
    wrong = int((~inside).sum()) + int(twice.sum())
    if wrong > found[0].wrong:
        found = [Judged(kind="bits", ratio=None, wrong=wrong, count=indices.numel(), actual=f"{int(twice.sum())} "
                        f"indices twice, {int((~inside).sum())} outside", expected="each index once")]  # fmt: skip
    if len(given) > 1:
        values = (given[0].sort(dim).values, native[0].sort(dim).values) if named.get("sorted") is False else None
        found.append(_equal(*(values or (given[0], native[0]))))
    return found


def _words(value: Tensor, at: int) -> str:
    return repr(value.flatten()[at].item()) if value.numel() else ""
