"""What is kept of a forward, and what a replay overwrites. Knows tap names and tensors; must not know files or limits.

Needs torch and the standard library only.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness import taps as tapnames
from harness.statistics import Statistics, as_facts, statistics_of
from harness.types import Tap

VERSION = 3
"""Of what is recorded and how pinned values are made; goldens of another one are recorded anew."""
JITTER_ULPS_WIDE = 4
"""Ulps that jitter moves a float32 or float64 value by: sums are rounded as coarsely as results, so honest engines
hand on values that differ by several ulps. Source: a norm of ONNX Runtime on a real model is 3 ulps from float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """What a replay overwrites: every tap of `tensors` whose level is at most `level`; decisions only if `decisions`.

    `taps` names the axes of the source, `dtype` is the port's precision that floating values are rounded to first,
    `jitter` seeds a perturbation of it by an ulp (probability 1/8 each way; 0 is none).
    """

    tensors: Mapping[str, Tensor]
    taps: Mapping[str, Tap]
    level: int
    dtype: torch.dtype
    decisions: bool = False
    jitter: int = 0

    def value(self, name: str, kind: str, start: int, stop: int) -> Tensor | None:
        """Return the pinned value of a tap for tokens [start, stop), or None where it is not pinned."""
        source = self.tensors.get(name)
        if source is None:
            return None
        if kind in tapnames.DECISION_KINDS:
            if not self.decisions:
                return None
        elif kind not in tapnames.PINNED_KINDS or tapnames.level_of(name) > self.level:
            return None
        dims = self.taps[name].dims
        if "token" in dims:
            axis = dims.index("token")
            if source.shape[axis] < stop:
                return None
            source = source.narrow(axis, start, stop - start)
        if source.is_floating_point():
            source = source.to(self.dtype)
            if self.jitter:
                source = _jittered(source, seed=self.jitter, name=f"{name}@{start}")
        return source


def _jittered(value: Tensor, *, seed: int, name: str) -> Tensor:
    """Move each element up or down with probability 1/8 each way, deterministically in `seed` and `name`."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + sum(ord(c) * (i + 1) for i, c in enumerate(name)))
    draw = torch.rand(value.shape, generator=generator)
    ulps = JITTER_ULPS_WIDE if value.dtype in (torch.float32, torch.float64) else 1
    up = torch.nextafter(value, torch.full_like(value, float("inf"))) - value
    down = value - torch.nextafter(value, torch.full_like(value, float("-inf")))
    return torch.where(draw < 0.125, value + ulps * up, torch.where(draw > 0.875, value - ulps * down, value))


class TraceRecorder:
    """Collect taps in execution order, and replay pinned values (a Recorder).

    Values are recorded as the port computed them, before they are overwritten; what is not recorded is not overwritten,
    or its error would be seen by nobody. Calls over consecutive token spans are
    joined along the token axis, so a phased run compares with a whole prefill. A value that is the very tensor handed
    out before (an input that is the previous unit's output) says nothing new and is not recorded. `copied` makes the
    copy that is kept, where it shall not lie in memory.
    """

    def __init__(
        self,
        *,
        pins: Pins | None = None,
        keep: Sequence[str] = (),
        beat: Callable[[str], None] | None = None,
        oracle: bool = False,
        statistics: bool = False,
        copied: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.pins, self.keep, self.beat = pins, tuple(keep), beat
        self._copied = copied or _copied
        self.wants_parts = oracle and pins is not None and pins.level >= 3
        self.start, self.stop = 0, 0
        self.taps: dict[str, Tap] = {}
        self.notes: dict[str, str] = {}
        self._parts: dict[str, list[tuple[int, Tensor]]] = {}
        self._told: dict[str, list[tuple[int, Statistics]]] | None = {} if statistics else None
        self._pinned: set[str] = set()
        self._handed: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def span(self, start: int, stop: int) -> None:
        """Say which tokens of the request the next calls belong to."""
        self.start, self.stop = start, stop
        self._handed.clear()

    def __call__(self, tap: str, tensor: Tensor, *, dims: str = "", kind: str = "") -> Tensor:
        """Record a tensor as the port computed it; return it, or the pinned value.

        A function mode that is active in the port (a cast of its own, say) does not reach what happens in here.
        """
        with torch._C.DisableTorchFunction():
            return self._recorded(tap, tensor, dims, kind)

    def _recorded(self, tap: str, tensor: Tensor, dims: str, kind: str) -> Tensor:
        if self.beat is not None:
            self.beat(tap)
        kind = kind or tapnames.kind_of(tap)
        if tapnames.is_input(tap) and kind not in tapnames.DECISION_KINDS and self._is_handed(tensor):
            return tensor
        keep = self._says_something(tap, kind)
        if keep:
            self._store(tap, tensor, kind, dims)
        start = self._first_row(tap, tensor)
        pinned = self.pins.value(tap, kind, start, self.stop) if self.pins is not None and keep else None
        result = tensor
        if pinned is not None:
            fitted = _fitted(pinned, tensor, self.pins.taps[tap].dims if self.pins is not None else (), kind, self.stop)
            if self._keeps_its_order(tap, kind, tensor, fitted):
                self._pinned.add(tap)
            elif fitted is None:
                self.notes[tap] = f"not replayed: {tuple(tensor.shape)} here, {tuple(pinned.shape)} in the reference"
            else:
                result = fitted.to(device=tensor.device, dtype=tensor.dtype, copy=True)  # a port may write into it
                self._pinned.add(tap)
        elif self.pins is not None and kind in tapnames.DECISION_KINDS and not tapnames.is_input(tap):
            result = self._in_reference_order(tap, tensor, kind)
        self._handed[id(result)] = (weakref.ref(result), version_of(result))
        return result

    def _in_reference_order(self, tap: str, tensor: Tensor, kind: str) -> Tensor:
        """Where the port chose the same set as the reference, list it in the reference's order.

        The order inside a set decides nothing, but values that follow it (routing weights) are replayed in that order.
        """
        assert self.pins is not None
        source = dataclasses.replace(self.pins, decisions=True).value(tap, kind, self.start, self.stop)
        fitted = None if source is None else _fitted(source, tensor, self.pins.taps[tap].dims, kind, self.stop)
        if fitted is None or fitted.dim() == 0:
            return tensor
        fitted = fitted.to(device=tensor.device, dtype=tensor.dtype)
        same = (fitted.sort(-1).values == tensor.sort(-1).values).all(-1, keepdim=True)
        moved = same & (fitted != tensor)
        return torch.where(moved, fitted, tensor) if bool(moved.any()) else tensor

    def _keeps_its_order(self, tap: str, kind: str, tensor: Tensor, fitted: Tensor | None) -> bool:
        """Say whether a unit is told the right choices in an order of the port's own, which its weights are in too.

        Where weights are overwritten as well (level 3), the choices must come in the reference's order.
        """
        told = kind in tapnames.DECISION_KINDS and tapnames.is_input(tap)
        if not told or fitted is None or self.pins is None or self.pins.level >= 3:
            return False
        return torch.equal(fitted.to(tensor).sort(-1).values, tensor.sort(-1).values)

    def _is_handed(self, tensor: Tensor) -> bool:
        found = self._handed.get(id(tensor))  # what the port let go is not kept alive for this
        return found is not None and found[0]() is tensor and found[1] == version_of(tensor)

    def _first_row(self, tap: str, tensor: Tensor) -> int:
        """Return the token that the first row belongs to: a unit over the cache is given all keys up to the last."""
        known = self.pins.taps.get(tap) if self.pins is not None else self.taps.get(tap)
        if known is None or "token" not in known.dims or len(known.dims) != tensor.dim():
            return self.start
        rows = tensor.shape[known.dims.index("token")]
        return self.stop - rows if self.stop - self.start < rows <= self.stop else self.start

    def _says_something(self, tap: str, kind: str) -> bool:
        """Say whether a tap is worth keeping: a replay isolates hidden taps up to its level, and those alone."""
        if self.pins is not None and kind in tapnames.PINNED_KINDS and tapnames.level_of(tap) > self.pins.level:
            return False
        return self._told is not None or tapnames.matches(tap, self.keep)

    def _store(self, tap: str, tensor: Tensor, kind: str, dims: str) -> None:
        count = self.stop - self.start
        if tensor.dim() == 2 and ".attn" in tap and self._by_head(tap, tensor.shape[0]):
            tensor = tensor.reshape(count, -1, tensor.shape[1])  # [token * head, feature], one row per token again
            dims = dims or "token head feature"
        if tap not in self.taps:
            self.taps[tap] = Tap(name=tap, kind=kind, dims=tuple(dims.split()) or self._axes(tap, tensor))
        elif "token" not in self.taps[tap].dims:
            return  # without a token axis a second call cannot be joined; the first stands for the run
        if self._told is not None:
            self._told.setdefault(tap, []).append((self.stop, statistics_of(tensor)))
            if not self.keep or not tapnames.matches(tap, self.keep):
                return
        self._parts.setdefault(tap, []).append((self.stop, self._copied(tensor)))

    def _by_head(self, tap: str, rows: int) -> bool:
        """Say whether rows of a matrix are tokens times heads: by an earlier call, else by their number."""
        known = self.taps.get(tap)
        if known is not None:
            return known.dims[:2] == ("token", "head")
        count = self.stop - self.start
        return count > 1 and rows > count and rows % count == 0

    def _axes(self, tap: str, tensor: Tensor) -> tuple[str, ...]:
        """Name the axes by the number of tokens in this call; the replay source knows better when there is one."""
        if self.pins is not None and tap in self.pins.taps and len(self.pins.taps[tap].dims) == tensor.dim():
            return self.pins.taps[tap].dims
        names, count = [f"axis{i}" for i in range(tensor.dim())], self.stop - self.start
        if tap.startswith("vision.") and 2 <= tensor.dim() <= 3:
            return ("row" if ".merger" in tap else "patch", *(["head"] if tensor.dim() == 3 else []), "feature")
        order = [1, 2, 3, 0] if tensor.dim() >= 3 and tensor.shape[0] == 1 else [0, 1, 2, 3]
        axis = next((a for a in order if a < tensor.dim() and tensor.shape[a] == count), None)
        if axis is None or count == 0 or tap.startswith(("vision.", "inputs.pixel", "inputs.image")):
            return tuple(names)
        names[axis] = "token"
        if axis >= 1 and tensor.shape[0] == 1:
            names[0] = "batch"
        if names[-1].startswith("axis"):
            square = tensor.shape[-1] == count > 1 and self.start == 0 and axis == tensor.dim() - 2
            names[-1] = "key" if square else "feature"
        if tensor.dim() == 4 and axis in (1, 2) and ".attn" in tap:
            names[3 - axis] = "head"
        return tuple(names)

    @property
    def pinned(self) -> frozenset[str]:
        """Names of the taps that were overwritten at least once."""
        return frozenset(self._pinned)

    def tokens(self, tap: str) -> int:
        """Return how many tokens of a tap are recorded so far (0 without one)."""
        dims = self.taps[tap].dims if tap in self.taps else ()
        calls: Sequence[tuple[int, Any]] = (self._parts if self._told is None else self._told)[tap] if dims else ()
        return len(set(_rows(calls, dims))) if "token" in dims else 0

    def statistics(self) -> dict[str, list[Any]]:
        """Return what `harness.statistics.as_facts` says of every tap and call; no columns unless asked for."""
        return as_facts({tap: [each for _, each in calls] for tap, calls in (self._told or {}).items()})

    def tensors(self) -> dict[str, Tensor]:
        """Return the recorded tensors, spans joined along the token axis. Shapes as in the port."""
        joined = {}
        for name, parts in self._parts.items():
            tap = self.taps[name]
            joined[name] = parts[0][1] if len(parts) == 1 else _joined(parts, tap)
        return joined


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written into, where autograd counts it (not under inference mode)."""
    return 0 if tensor.is_inference() else tensor._version


def _fitted(pinned: Tensor, tensor: Tensor, dims: tuple[str, ...], kind: str, stop: int) -> Tensor | None:
    """Bring a pinned value to the shape at hand, or return None where it cannot stand for it.

    Along a `key` axis the port holds the last keys before the end of the call. A set of choices that is shorter here
    drops padding (-1) only.
    """
    if pinned.numel() == tensor.numel():
        return pinned.reshape(tensor.shape)
    if pinned.dim() != tensor.dim():
        return None
    if kind in tapnames.DECISION_KINDS and pinned.shape[:-1] == tensor.shape[:-1]:
        size = tensor.shape[-1]
        if pinned.shape[-1] < size:
            return torch.nn.functional.pad(pinned, (0, size - pinned.shape[-1]), value=-1)
        kept = pinned.gather(-1, (pinned < 0).int().argsort(dim=-1, stable=True))
        return kept[..., :size] if bool((kept[..., size:] < 0).all()) else None
    keys = pinned.shape[-1] >= stop >= tensor.shape[-1]
    if dims[-1:] == ("key",) and pinned.shape[:-1] == tensor.shape[:-1] and keys:
        return pinned[..., stop - tensor.shape[-1] : stop]
    return None


def _rows(parts: Sequence[tuple[int, Any]], dims: tuple[str, ...]) -> list[int]:
    """Return the tokens that the rows of some parts belong to; part i ends with token `stop - 1`."""
    axis = dims.index("token")
    return [token for stop, part in parts for token in range(stop - part.shape[axis], stop)]


def _joined(parts: Sequence[tuple[int, Tensor]], tap: Tap) -> Tensor:
    """Join the parts of consecutive spans along the token axis; where rows come again, the last ones stand.

    A last axis that grows from call to call is padded: scores with -inf and choices with -1 at the end. Along a `key`
    axis a part holds the keys before its end, and what lies outside is 0.
    """
    axis, last, kind = tap.dims.index("token"), len(tap.dims) - 1, tap.kind
    fill = float("-inf") if kind == "scores" else -1 if kind in tapnames.DECISION_KINDS else 0
    keys = tap.dims[last] == "key" and kind not in ("scores", *tapnames.DECISION_KINDS)
    wide = max(max(p.shape[-1] for _, p in parts), parts[-1][0] if keys and axis != last else 0)
    rows = _rows(parts, tap.dims)
    first = min(rows)
    shape = list(parts[0][1].shape)
    shape[axis] = max(rows) + 1 - first
    if axis != last:
        shape[last] = wide
    joined = torch.full(shape, fill, dtype=parts[0][1].dtype)
    for stop, part in parts:
        place = joined.narrow(axis, stop - part.shape[axis] - first, part.shape[axis])
        if axis != last:
            before = max(0, stop - part.shape[-1]) if keys else 0
            place = place.narrow(last, before, part.shape[-1])
        place.copy_(part)
    return joined
