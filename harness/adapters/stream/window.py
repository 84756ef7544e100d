"""What of a streamed model is in memory now: the unit that computes, and the next one. Knows modules and turns.

A unit is a layer or block, or any other module with parameters of its own. Its parameters are put in before it runs and
taken out after it; the next unit is made meanwhile. Must not know transformers or where values come from.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from harness.adapters.stream.walk import Walk
from harness.adapters.stream.weights import Weights
from harness.adapters.structure import Structure
from harness.precision.declare import Rounds, round_part

T = TypeVar("T")
Values = Mapping[str, Mapping[str, Tensor]]
_LISTS = (nn.ParameterList, nn.ParameterDict)
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_OF_ITS_OWN_BYTES = 1 << 16


class Window:
    """The units of one checkpoint that are in memory, for all modules that run over it. `brought` counts units."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.units: dict[str, tuple[str, ...]] = {}
        self.brought = 0
        self._here: dict[str, dict[str, Future[Values]]] = {}
        self._users: Counter[str] = Counter()
        self._ahead: tuple[str, dict[str, Future[Values]]] | None = None
        self._following: dict[str, str] = {}
        self._last = ""
        self._walk: Walk | None = None
        self._lock = threading.RLock()
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stream")
        _give_memory_back()

    def measure_out(self, units: Mapping[str, tuple[str, ...]]) -> None:
        """Say which units there are, in the order in which they are likely to run."""
        if not self.units:
            self.units = dict(units)
            order = [*units]
            self._following = dict(zip(order, [*order[1:], *order[:1]], strict=True))

    def enter(self, unit: str, key: str) -> Mapping[str, Tensor]:
        """Return the values of a unit in a precision, and hold them until `leave`.

        Raises:
            CheckpointError: the shards are not what they were.
        """
        if self._walk is not None and self._walk.inside:
            self._walk.wait(unit, key)
        with self._lock:
            if unit not in self._here:
                self._bring(unit, [key])
            held = self._here[unit]
            if key not in held:
                held |= self._begin(unit, [key])
            values = held[key].result()[key]
            self._users[unit] += 1
            return values

    def leave(self, unit: str) -> None:
        """Say that a unit is no longer used by one of those who entered it."""
        with self._lock:
            self._users[unit] -= 1
            if self._walk is None:
                self._drop_unused()

    def together(self, tasks: Sequence[Callable[[], T]]) -> list[T | BaseException]:
        """Do tasks whose forwards go through the units in lock-step; return what each gave, or raised."""
        self._walk = Walk([*self.units], lambda unit: unit in self._here, self._bring)
        try:
            return self._walk.together(tasks)
        finally:
            self._walk = None
            self.clear()

    def clear(self) -> None:
        """Let everything go that nobody uses, and what was made ahead."""
        with self._lock:
            self._forget_ahead()
            self._drop_unused()
            self._last = ""

    def _bring(self, unit: str, keys: Sequence[str]) -> None:
        """Bring a unit in, and begin with the next one. What cannot be read is told to those who enter."""
        self._drop_unused()
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] != unit:
            wait(ahead[1].values())  # another one than expected: let it go before there is a second
            ahead = None
        self._here[unit] = held = ahead[1] if ahead is not None else {}
        held |= self._begin(unit, [key for key in keys if key not in held])
        wait(held.values())
        if any(future.exception() is not None for future in held.values()):
            return
        self.brought += 1
        if self._last:
            self._following[self._last] = unit
        self._last = unit
        following = self._following.get(unit, unit)
        if following not in self._here:
            self._ahead = (following, self._begin(following, keys))

    def _begin(self, unit: str, keys: Sequence[str]) -> dict[str, Future[Values]]:
        """Let the reader make a unit for some precisions."""
        return dict.fromkeys(keys, self._reader.submit(self._load, unit, tuple(keys))) if keys else {}

    def _load(self, unit: str, keys: Sequence[str]) -> Values:
        """Make the values of a unit; in a thread of its own, where no mode of a forward is active."""
        names = self.units[unit]
        self.weights.announce(names, keys[0])
        return self.weights.read(names, keys)

    def _drop_unused(self) -> None:
        for unit in [u for u in self._here if self._users[u] <= 0]:
            key = next(iter(self._here.pop(unit)))
            self.weights.drop(self.units[unit], key)

    def _forget_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            wait(ahead[1].values())
            self.weights.drop(self.units[ahead[0]], next(iter(ahead[1])))


class Streamed:
    """A module without values whose units get theirs from a window while they run. `key` names its precision."""

    def __init__(self, window: Window, module: nn.Module, structure: Structure, *, key: str, device: str) -> None:
        self.window, self.module, self.key, self.device = window, module, key, device
        self.rounds: Rounds | None = None
        self._modules = dict(module.named_modules())
        shape = window.weights.shapes[key]
        streamed = [name for name in shape.shapes if shape.of(name) is not None]
        tables = {
            name for name in streamed
            if isinstance(self._modules[name.rpartition(".")[0]], nn.Embedding)
            and window.weights.plain(name, key) is not None
        }  # fmt: skip
        window.measure_out(units_of(self._modules, structure, [n for n in streamed if n not in tables]))
        self._empty = {name: self._slot(name)[0][self._slot(name)[1]] for name in streamed}
        self._depth: Counter[str] = Counter()
        self._marks: dict[str, int] = {}
        for unit in window.units:
            self._hang(unit)
        for name in tables:
            self._hang_table(name)

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter and persistent buffer, one or a few in memory at a time; tied ones for each name."""
        weights, shape = self.window.weights, self.window.weights.shapes[self.key]
        self.window.clear()
        for name, value in self.module.state_dict().items():
            if not value.is_meta:
                yield name, value
        for names in weights.groups(self.key):
            weights.announce(names, self.key)
            values = weights.read(names, [self.key])[self.key]
            for name in names:
                if name in shape.shapes:
                    yield name, values.pop(name)
            weights.drop(names, self.key)

    def widest(self) -> str:
        """Return the unit that takes most memory."""
        weights, units = self.window.weights, self.window.units
        return max(units, key=lambda unit: weights.bytes_of(units[unit], self.key))

    def try_window(self) -> None:
        """Bring the widest unit in and the one after it, and let them go. Raises CheckpointError."""
        unit = self.widest()
        for value in self.window.enter(unit, self.key).values():
            value.reshape(-1)[:1].clone()
        self.window.leave(unit)
        self.window.clear()

    def _slot(self, name: str) -> tuple[dict[str, Any], str]:
        path, _, leaf = name.rpartition(".")
        owner = self._modules[path]
        return (owner._parameters if leaf in owner._parameters else owner._buffers), leaf

    def _hang(self, unit: str) -> None:
        def before(*_: Any) -> None:
            with torch._C.DisableTorchFunction():
                self._enter(unit)

        def after(*_: Any) -> None:
            self._leave(unit)

        self._modules[unit].register_forward_pre_hook(before, prepend=True)
        self._modules[unit].register_forward_hook(after, always_call=True)

    def _enter(self, unit: str) -> None:
        if not self._depth[unit]:
            for name, value in self.window.enter(unit, self.key).items():
                self._put(name, value.to(self.device))
            if self.rounds is not None:
                self._marks[unit] = self.rounds.mark()
                for path in dict.fromkeys(name.rpartition(".")[0] for name in self.window.units[unit]):
                    round_part(path, self._modules[path], self.rounds)
        self._depth[unit] += 1

    def _leave(self, unit: str) -> None:
        if not self._depth[unit]:
            return  # it could not be entered
        self._depth[unit] -= 1
        if not self._depth[unit]:
            for name in self.window.units[unit]:
                self._put(name, self._empty[name])
            if self.rounds is not None:
                self.rounds.forget(self._marks.pop(unit))
            self.window.leave(unit)

    def _put(self, name: str, value: Tensor) -> None:
        slot, leaf = self._slot(name)
        parameter = isinstance(self._empty[name], nn.Parameter) and not isinstance(value, nn.Parameter)
        slot[leaf] = nn.Parameter(value, requires_grad=False) if parameter else value

    def _hang_table(self, name: str) -> None:
        """Let an embedding have the rows that it is asked for: the rest of the table is memory that nobody touches."""
        part = self._modules[name.rpartition(".")[0]]

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with torch._C.DisableTorchFunction():
                self._put(name, self._rows(name, args[0] if args else kwargs["input"]))

        def after(*_: Any) -> None:
            self._put(name, self._empty[name])

        part.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        part.register_forward_hook(after, always_call=True)

    def _rows(self, name: str, ids: Tensor) -> Tensor:
        weights = self.window.weights
        stored = weights.plain(name, self.key)
        assert stored is not None
        rows = torch.tensor(sorted(set(ids.flatten().tolist())))
        values = weights.cast(stored[rows], name, self.key)
        weights.shards.read_bytes += rows.numel() * stored[0].nbytes
        table = torch.empty(stored.shape, dtype=values.dtype)
        table[rows] = values
        return table.to(self.device)


def _give_memory_back() -> None:
    """Let the C library return what is freed: else its heaps, one a thread, keep the holes that layers leave.

    Measured on layers of 42 MB: 13 MB more with each layer, and none with this. Source: mallopt(3).
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library returns it by itself
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _OF_ITS_OWN_BYTES)
        library.mallopt(_M_ARENA_MAX, 1)


def units_of(
    modules: Mapping[str, nn.Module], structure: Structure, names: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Return parameters by the unit whose run needs them: their layer or block, else the module that holds them."""
    places = {*structure.layers, *structure.blocks}
    units: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")[:-1]
        above = [".".join(parts[:i]) for i in range(len(parts) + 1)]
        unit = next((path for path in above if path in places), above[-1])
        while isinstance(modules[unit], _LISTS):
            unit = unit.rpartition(".")[0]
        units.setdefault(unit, []).append(name)
    order = {path: number for number, path in enumerate(modules)}
    return {unit: tuple(units[unit]) for unit in sorted(units, key=order.__getitem__)}
