"""One case of one operator on one device, held against its truth. Knows tensors and budgets; must not know limits.

What comes back is an `Outcome` of numbers and words; whether they may pass is decided elsewhere.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.ops.arithmetic import Arithmetic, units
from harness.ops.case import POISON, Case, Given, Spec, Want, Wanted
from harness.ops.hold import Outcome, bits_of, hold

GUARD = 64
"""Elements of poison on each side of a destination."""


def run_case(
    spec: Spec,
    case: Case,
    call: Callable[..., Any],
    *,
    device: str,
    dtype: torch.dtype,
    arithmetic: Arithmetic,
    into: bool = False,
    repeat: bool = True,
) -> Outcome:
    """Call an operator on a device and judge all that it did. `into` has it write to a place inside of poison."""
    gen = torch.Generator().manual_seed(zlib.crc32(f"{spec.name} {case.label}".encode()))
    given = case.make(gen, dtype)
    outcome = Outcome(case=case, given=described(given))
    wanted = spec.wanted(units(arithmetic, dtype), given)
    try:
        first = _called(spec, call, given, device, into=into, outcome=outcome, wanted=wanted)
        again = _called(spec, call, given, device, into=into, outcome=outcome, wanted=wanted) if repeat else first
    except Exception as error:  # the operator under test may raise anything
        outcome.raised = f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
        outcome.words = f"raised {outcome.raised}"
        return outcome
    for outputs in (first, again) if not spec.sampled and _differ(first, again) else (first,):
        hold(outputs, wanted, arithmetic, outcome)
    if not spec.sampled:
        outcome.not_repeated = _differ(first, again)
    return outcome


def _called(
    spec: Spec,
    call: Callable[..., Any],
    given: Given,
    device: str,
    *,
    into: bool,
    outcome: Outcome,
    wanted: Sequence[Wanted],
) -> tuple[Tensor, ...]:
    """Return the outputs of one call on the CPU; count what changed beside them."""
    args = tuple(moved(a, device) for a in given.args)
    kwargs = {k: moved(v, device) for k, v in given.kwargs.items()}
    if into and spec.into is not None:
        out, memory = _place(wanted[0], given, device, strided=spec.strided_into)
        spec.into(out, *args, **kwargs)
        outputs: Any = (out,)
        outcome.neighbours = max(outcome.neighbours, _clobbered(memory, out))
    else:
        outputs = call(*args, **kwargs)
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        outputs = [args[i] for i in spec.writes] or outputs
        if spec.fresh and not spec.writes and (shared := _shared(outputs, [*args, *kwargs.values()])):
            outcome.inputs_changed = max(outcome.inputs_changed, shared)
            outcome.words = outcome.words or "the output lies in the memory of an input: writing to one changes both"
    found = tuple(o.detach().to("cpu") for o in outputs if isinstance(o, Tensor))
    for position, (before, after) in enumerate(zip(given.args, args, strict=True)):
        written = position in spec.writes
        outcome.inputs_changed = max(outcome.inputs_changed, 0 if written else _changed(before, after))
        if written:
            outcome.neighbours = max(outcome.neighbours, _changed(before, after, around=True))
    for key, before in given.kwargs.items():
        outcome.inputs_changed = max(outcome.inputs_changed, _changed(before, kwargs[key]))
    return found


def _shared(outputs: Sequence[Any], given: Sequence[Any]) -> int:
    """Count the elements of outputs that lie in the memory of an input."""
    parts = [p for v in given for p in (v if isinstance(v, (list, tuple)) else (v,)) if isinstance(p, Tensor)]
    places = {p.untyped_storage().data_ptr() for p in parts if p.numel()}
    found = [o for o in outputs if isinstance(o, Tensor) and o.numel()]
    return sum(o.numel() for o in found if o.untyped_storage().data_ptr() in places)


def moved(value: Any, device: str) -> Any:
    """Return a value on a device: of a tensor the whole memory behind it, so that strides and offset stay."""
    if isinstance(value, (list, tuple)):
        return type(value)(moved(v, device) for v in value)
    if not isinstance(value, Tensor):
        return value
    if not value.numel():
        return torch.empty_like(value).to(device)
    return torch.as_strided(_memory(value).clone().to(device), value.size(), value.stride(), value.storage_offset())


def _memory(x: Tensor) -> Tensor:
    """Return all of the memory behind a tensor, flat."""
    return torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def _changed(before: Any, after: Any, *, around: bool = False) -> int:
    """Count the elements of an input's memory that are not what they were; `around`: only those outside of the view."""
    if isinstance(before, (list, tuple)):
        return sum(_changed(b, a, around=around) for b, a in zip(before, after, strict=True))
    if not isinstance(before, Tensor) or not before.numel():
        return 0
    differs = bits_of(_memory(before)) != bits_of(_memory(after).cpu())
    if around:
        torch.as_strided(differs, before.size(), before.stride(), before.storage_offset()).fill_(False)
    return int(differs.sum())


def _place(wanted: Wanted, given: Given, device: str, *, strided: bool) -> tuple[Tensor, Tensor]:
    """Return a place for the output (`strided`: every second column) in memory full of poison, and that memory."""
    assert isinstance(wanted, Want)
    shape = tuple(wanted.value.shape)
    dtype = next((a.dtype for a in given.args if isinstance(a, Tensor)), torch.float32)
    inner = shape[-1] if shape else 1
    rows = math.prod(shape[:-1])
    apart = 2 if strided else 1
    memory = torch.full((2 * GUARD + rows * apart * inner,), POISON, dtype=torch.float64).to(dtype).to(device)
    strides, step = [], apart * inner
    for size in reversed(shape[:-1]):
        strides.append(step)
        step *= max(1, size)
    return torch.as_strided(memory, shape, (*reversed(strides), apart)[: len(shape)], GUARD), memory


def _clobbered(memory: Tensor, out: Tensor) -> int:
    """Count the elements of poison that are gone, outside of the place."""
    after = memory.cpu()
    differs = bits_of(after) != bits_of(torch.full_like(after, POISON))
    torch.as_strided(differs, out.size(), out.stride(), out.storage_offset()).fill_(False)
    return int(differs.sum())


def _differ(first: Sequence[Tensor], again: Sequence[Tensor]) -> int:
    """Count the elements whose bits differ between two equal calls."""
    if any(a.shape != b.shape for a, b in zip(first, again, strict=True)):
        return max(a.numel() for a in first)
    return sum(int((bits_of(a) != bits_of(b)).sum()) for a, b in zip(first, again, strict=True))


def described(given: Given) -> str:
    """Return the arguments in words: shape, strides where they are not the usual ones, offset, dtype."""
    return ", ".join([*map(_one, given.args), *(f"{k}={_one(v)}" for k, v in given.kwargs.items())])


def _one(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value) if not isinstance(value, (list, tuple)) else f"[{', '.join(map(_one, value))}]"
    text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if not value.is_contiguous():
        text += f" strides {list(value.stride())}"
    return text + (f" offset {value.storage_offset()}" if value.storage_offset() else "")
