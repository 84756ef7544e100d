"""The records of the suite: an operator, a case of it, what is wanted. Must not know devices or limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harness.ops.arithmetic import Units

POISON = 99.0
"""What lies between the elements of a view and around it; a read or a write in the wrong place shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What one output must be. `value` in float64, or exact integers; `slack` bounds errors before the last rounding.

    `spread` is the error to be expected of a sum whose roundings are independent (root mean square); None: not judged.
    `exact` wants the same bits, so no slack counts. `also` is what is as right, where there is a choice.
    """

    value: Tensor
    slack: Tensor | None = None
    spread: Tensor | None = None
    exact: bool = False
    also: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Outputs (values, indices), or indices alone, that choose `count` of `scores` along the last axis.

    Values are compared in order; indices by what they point at, since the order of ties is free. `ordered` also wants
    the earliest of equal ones first (a stable sort). `least` chooses the smallest.
    """

    scores: Tensor
    count: int
    least: bool = False
    alone: bool = False
    ordered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Within:
    """Indices, each of which must lie in a set. `allowed` [rows, vocabulary] bool; output [rows, n]."""

    allowed: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Indices that are drawn from a distribution each row. `probabilities` [rows, vocabulary]; output [rows, n]."""

    probabilities: Tensor


Wanted = Want | Chosen | Within | Drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The arguments of one call, on the CPU, views as they shall be on the device."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One input. `size` is the width that bands are told by; `form` how it lies in memory; `content` what is special.

    `resized` makes the same in another size, to find where a band begins and ends.
    """

    make: Callable[[torch.Generator, torch.dtype], Given]
    size: int = 0
    form: str = "contiguous"
    content: str = "normal"
    resized: Callable[[int], Case] | None = None

    @property
    def label(self) -> str:
        """Return the case in a few words."""
        return f"{self.content}, {self.form}, width {self.size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One operator: how torch is asked for it, and what must come out.

    `truth(units, *args, **kwargs)` is given float64 copies and returns what each output must be. `into(out, *args)`
    writes to a given place, which may have strides where `strided_into` says so (the inner `.out` forms of some
    libraries take dense ones only). `writes` are the positions of arguments that are written in place; the value is
    then the first of them. `source` says where formula and budget are from. `plain` says that torch has it as one
    call; otherwise it is composed of several. `sampled` ones need not repeat themselves. The output of a `fresh` one
    may not lie in the memory of an input.
    """

    name: str
    family: str
    call: Callable[..., Any]
    truth: Callable[..., Sequence[Wanted]]
    cases: Callable[[bool], Iterator[Case]]
    source: str
    into: Callable[..., Any] | None = None
    writes: tuple[int, ...] = ()
    strided_into: bool = False
    plain: bool = True
    dtypes: tuple[torch.dtype, ...] = ()
    sampled: bool = False
    fresh: bool = True

    def wanted(self, units: Units, given: Given) -> Sequence[Wanted]:
        """Return what the outputs of a call must be."""
        return self.truth(units, *(widened(a) for a in given.args), **{k: widened(v) for k, v in given.kwargs.items()})


def widened(value: Any) -> Any:
    """Return a contiguous float64 copy of a floating-point tensor, a copy of another; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return type(value)(widened(v) for v in value)
    if not isinstance(value, Tensor):
        return value
    wide = torch.float64 if value.is_floating_point() and value.element_size() > 1 else value.dtype
    return torch.empty(value.shape, dtype=wide).copy_(value)
