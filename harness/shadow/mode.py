"""Sees every operator that a port runs on a device, and repeats some of them on the CPU. Changes no result. No limits.

Of calls of one operator with the same dtypes and sizes of the same order (by powers of two), the first, second, fourth,
eighth ... are repeated, while there is time; an operator that was never repeated has twice the time. Arguments are read
before the call, results after it, both as runs of memory; the call itself is the port's own, with its own tensors.

What runs inside of a custom operator is seen one by one (`harness.composed`), so that of a wrong one the operator of
torch is named where that is to blame; the custom operator as a whole is told where its parts are right.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.composed import is_custom, is_made_of_others, opened, taken_apart
from harness.shadow.calls import Held, flat_bits, held, is_written, mapped, span, tensors_in, whole
from harness.shadow.places import Places
from harness.shadow.sampled import Part, part_of
from harness.shadow.truth import FLOAT32, PRODUCTS, Judged, NotRepeatable, judge, name_of

MOST_BYTES = 1 << 28
"""Bytes of arguments above which a call is not repeated."""
MOST_WORK = 1 << 34
"""Multiplications above which a product is not repeated: four times in float64 it takes a core some ten seconds."""
MOST_PARTS = 16
"""Calls of an operator of which a part is repeated because the whole is too large."""
MOST_NEIGHBOURS_BYTES = 1 << 26
"""Bytes of a storage that is read as a whole, to see whether a write went beside its view."""
SUSPECT = 1.0
"""Share of its budget above which a call is kept as a suspect. What is accepted is decided elsewhere."""
SILENT = frozenset({
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "_local_scalar_dense",
    "resize_", "set_", "detach", "detach_", "_pin_memory", "is_pinned", "record_stream", "lift_fresh", "is_same_size",
})  # fmt: skip
"""Operators that compute nothing, or whose memory is not written yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that came out wrong, as it was given: `Held` in place of tensors. `told`: taps that the port told before.

    `within` names the custom operator that it is a part of, if it is one.
    """

    operator: str
    overload: str
    args: Any
    kwargs: Any
    outputs: tuple[Held, ...]
    judged: Judged
    number: int
    module: str
    told: int
    within: str
    site: str
    phase: str
    part: str = ""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What was seen of one operator. `large`: calls that are more than the CPU repeats in a few seconds."""

    calls: int = 0
    compared: int = 0
    worst: float = 0.0
    unrepeated: str = ""
    large: int = 0


@dataclass(slots=True, kw_only=True)
class Found:
    """What a shadow saw: tallies by operator, wrong calls (the first of each operator and kind), how many of each."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    wrong: dict[tuple[str, str], Call] = field(default_factory=dict)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: float = 0.0


class Shadow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Repeats operators while it is entered. `budget_s` bounds its own time; `inside` is what a device computes in."""

    def __init__(
        self, places: Places, *, budget_s: float, inside: float = FLOAT32, beat: Callable[[str], None] = lambda _: None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places, self.budget_s, self.inside, self.beat = places, budget_s, inside, beat
        self.found, self.phase = Found(), ""
        self._seen: Counter[Any] = Counter()
        self._parts: list[set[str]] = []
        self._within = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._parts:
            if is_made_of_others(func, args, kwargs):
                return taken_apart(self, func, args, kwargs)
            self._parts[-1].add(str(func._schema.name))
        begin = time.perf_counter()
        before = self._read(func, args, kwargs)
        self.found.seconds += time.perf_counter() - begin
        parts: set[str] = set()
        result = self._opened(func, args, kwargs, parts) if is_custom(func) else func(*args, **kwargs)
        begin = time.perf_counter()
        if before is not None or not tensors_in((args, kwargs)):
            self._compare(func, args, kwargs, before, result, parts)
        self.found.seconds += time.perf_counter() - begin
        return result

    def _opened(self, func: Any, args: Any, kwargs: Any, parts: set[str]) -> Any:
        """Call a custom operator; `parts` then holds the operators that ran inside of it."""
        outer, self._within = self._within, str(func._schema.name)
        self._parts.append(parts)
        try:
            return opened(self, func, args, kwargs)
        finally:
            self._within = outer
            self._parts.pop()
            if self._parts:
                self._parts[-1].update(parts)

    def _read(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, list[Tensor | None], Part | None] | None:
        """Return copies of the arguments and of the storages that are written; None where a call is not repeated.

        Of a product that is too large, a part.
        """
        given = tensors_in((args, kwargs))
        name = name_of(func)
        if not given or all(t.device.type == "cpu" for t in given) or name in SILENT or _is_view(func):
            return None
        tally = self.found.tallies.setdefault(str(func._schema.name), Tally())
        tally.calls += 1
        key = (str(func), *((t.dtype, tuple(s.bit_length() for s in t.shape), t.is_contiguous()) for t in given))
        self._seen[key] += 1
        number = self._seen[key]
        spent = self.found.seconds > self.budget_s * (1 if tally.compared else 2)
        if number & (number - 1) or spent or tally.unrepeated:
            return None
        if torch.Tag.nondeterministic_seeded in func.tags or _draws(args, kwargs):
            tally.unrepeated = "draws random numbers"
        elif any(t.layout is not torch.strided or t.is_conj() or t.is_neg() or t.is_meta for t in given):
            tally.unrepeated = "a layout that is not read"
        elif sum(span(t) * t.element_size() for t in given) > MOST_BYTES or _work(name, given) > MOST_WORK:
            tally.large += 1
            part = part_of(name, args) if not kwargs and tally.large <= MOST_PARTS else None
            return (part.args, {}, [], part) if part is not None else None
        if tally.unrepeated:
            return None
        written = [_around(t) for t in _written(func, args, kwargs)]
        copies = mapped((list(args), dict(kwargs)), lambda leaf: held(leaf) if isinstance(leaf, Tensor) else leaf)
        return copies[0], copies[1], written, None

    def _compare(self, func: Any, args: Any, kwargs: Any, before: Any, result: Any, parts: set[str]) -> None:
        """Repeat the call and note what came out otherwise, unless one of its `parts` is known to be wrong."""
        outputs = [t for t in tensors_in(result) if t.device.type not in ("cpu", "meta")]
        if before is None:  # made from no tensor: a table, a mask
            if not outputs or name_of(func) in SILENT or torch.Tag.nondeterministic_seeded in func.tags:
                return
            before = (list(args), dict(kwargs), [], None)
            tally = self.found.tallies.setdefault(str(func._schema.name), Tally())
            tally.calls += 1
            if tally.compared >= 8 or tally.unrepeated:
                return
        operator = str(func._schema.name)
        tally = self.found.tallies[operator]
        part: Part | None = before[3]
        after = (part.of(result),) if part is not None else tuple(held(t) for t in tensors_in(result))
        try:
            judged = judge(func, before[0], before[1], after, self.inside)
        except NotRepeatable as error:
            tally.unrepeated = f"only what it is made of: {error}" if parts else str(error)
            return
        judged += self._neighbours(_written(func, args, kwargs), before[2]) if part is None else []
        tally.compared += 1
        for each in judged:
            if parts & {operator for operator, _ in self.found.wrong}:
                continue
            if each.ratio is not None:
                tally.worst = max(tally.worst, each.ratio)
            if each.wrong or (each.ratio is not None and not each.ratio <= SUSPECT):
                self._note(func, before, after, each)

    def _note(self, func: Any, before: Any, after: tuple[Held, ...], judged: Judged) -> None:
        operator = str(func._schema.name)
        key = (operator, judged.kind)
        self.found.counts[key] += 1
        known = self.found.wrong.get(key)
        if known is None:
            self.beat(f"shadow: {operator} in {self.places.module() or self.places.taps[-1]}")
            self.found.wrong[key] = Call(
                operator=operator, overload=func._overloadname, args=before[0], kwargs=before[1], outputs=after,
                judged=judged, number=self.found.tallies[operator].calls, module=self.places.module(),
                told=len(self.places.taps), within=self._within, site=self.places.site(), phase=self.phase,
                part=before[3].words() if before[3] is not None else "",
            )  # fmt: skip

    def _neighbours(self, written: list[Tensor], before: list[Tensor | None]) -> list[Judged]:
        """Say whether anything changed beside what an operator writes to."""
        found = []
        for tensor, old in zip(written, before, strict=True):
            if old is None:
                continue
            new = whole(tensor)
            inside = torch.zeros(new.numel(), dtype=torch.bool)
            inside.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
            changed = (flat_bits(new) != flat_bits(old)).any(1) & ~inside
            if bool(changed.any()):
                at = int(changed.int().argmax())
                actual, expected = repr(new[at].item()), repr(old[at].item())
                count, wrong = int((~inside).sum()), int(changed.sum())
                told = Judged(
                    kind="neighbours", ratio=None, wrong=wrong, count=count, at=at, actual=actual, expected=expected
                )
                found.append(told)
        return found


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _work(name: str, given: list[Tensor]) -> int:
    """Return about how many multiplications a product is; of anything else 0."""
    if name not in PRODUCTS or len(given) < 2:
        return 0
    a, b = given[-2:] if name != "_grouped_mm" and name != "convolution" else given[:2]
    return a.numel() * (b.shape[-1] if name != "convolution" else b.numel() // max(1, b.shape[0]))


def _draws(args: Any, kwargs: Any) -> bool:
    return any(isinstance(v, torch.Generator) for v in (*args, *kwargs.values()))


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operator writes to."""
    names = is_written(func)
    places = [a.name for a in func._schema.arguments if not a.kwarg_only]
    found = [v for name, v in zip(places, args, strict=False) if name in names]  # fewer where defaults are left out
    return tensors_in([*found, *(v for name, v in kwargs.items() if name in names)])


def _around(tensor: Tensor) -> Tensor | None:
    """Read the storage of a view that is smaller than it."""
    size = tensor.untyped_storage().nbytes()
    if tensor.numel() * tensor.element_size() >= size or size > MOST_NEIGHBOURS_BYTES:
        return None
    return whole(tensor)
