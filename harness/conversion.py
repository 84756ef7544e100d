"""What loading takes and leaves behind, of a port that converts weights as it loads them. Knows adapters and headers.

Must not know limits. Nothing is taken from the port's word that can be seen: torch's own storages are counted as they
are made and as they die, and what stays is read back byte by byte. Only what no tensor of torch holds (an engine's own
allocator, other threads) is seen as memory of the process or of the device.
"""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.checkpoint import Checkpoint, logical_tensors, open_checkpoint
from harness.checkpoint.names import split
from harness.golden.digest import algorithm, tensor_digest
from harness.types import Facts

HEAD_BYTES = 64
"""So many first bytes tell one stored tensor from another."""
LOADS = ((True, "visited in reverse, the workspace poisoned"), (False, "visited in order, the workspace poisoned"))
_SAMPLE_S = 0.01
_PROBE_BYTES = 1 << 14
_MAX_NAMED = 50


def conversion_facts(port: Any, checkpoint: Path, beat: Callable[[str], None]) -> Facts:
    """Load twice more, in both orders with the workspace poisoned, and say what each took, left and changed.

    Returns: `loads` (for each `how`, `peak_bytes`, `reported_peak_bytes`, `process_peak_bytes`, `held_bytes`,
    `workspace_bytes`, `left_bytes`, and `kept`: stored tensors still in memory as they are on disk), `changed` (what
    stays and is not what the first load left), `weights`, `layer_bytes` and `layer_decoded_bytes` of the largest layer,
    `stays_counted_bytes` (of a freed tensor, where the device's own count is wrong).
    """
    beat("weights as they were loaded")
    first, _ = _digests(port)
    opened = open_checkpoint(checkpoint)
    loads, changed = [], []
    for reverse, how in LOADS:
        beat(f"loading again, {how}")
        loads.append({"how": how, **_load(port, opened, reverse=reverse)})
        now, broken = _digests(port)
        for name in [n for n in first if now.get(n) != first[n]] + [n for n in now if n not in first]:
            state = "gone" if name not in now else "new" if name not in first else "other bytes"
            changed.append({"name": name, "how": how, "state": state, "nan": broken.get(name, 0)})
    stored, decoded = _largest_layer(opened)
    return {
        "loads": loads, "changed": changed[:_MAX_NAMED], "changes": len(changed), "weights": len(first),
        "layer_bytes": stored, "layer_decoded_bytes": decoded, "stays_counted_bytes": _stays_counted(),
    }  # fmt: skip


def _digests(port: Any) -> tuple[dict[str, str], dict[str, int]]:
    """Return a digest of each tensor that stays, and how many of its values are NaN where any is."""
    found, broken, name_of = {}, {}, algorithm()
    for name, tensor in port.held():
        value = tensor.detach().cpu()
        found[name] = tensor_digest(value, name_of)
        if value.is_floating_point() and (count := int(value.float().isnan().sum())):
            broken[name] = count
    return found, broken


def _load(port: Any, checkpoint: Checkpoint, *, reverse: bool) -> dict[str, Any]:
    gc.collect()
    here, there = _held_bytes(port)  # what is dropped first is not what loading takes
    before = _device_bytes(reset=True) - there
    with _Process(here) as process, Watermark() as mark:
        begin = time.perf_counter()
        said: Mapping[str, Any] = port.reload(reverse=reverse, poison=True)
        seconds = time.perf_counter() - begin
    gc.collect()
    storages = {s._cdata: s.nbytes() for _, t in port.held() if (s := _storage(t)) is not None}
    left = {key: ref for key, ref in mark.alive.items() if key not in storages}
    return {
        "seconds": seconds,
        "peak_bytes": max(mark.peak, _device_bytes() - before),
        "reported_peak_bytes": int(said.get("peak_bytes", 0)),
        "process_peak_bytes": process.peak,
        "held_bytes": sum(storages.values()),
        "workspace_bytes": int(said.get("workspace_bytes", 0)),
        "left_bytes": sum(mark.sizes[key] for key in left),
        "kept": _kept(checkpoint, [s for ref in left.values() if (s := ref()) is not None]),
    }


class Watermark(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the bytes of storages that are made within, while they live: `bytes` now, `peak` at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, Callable[[], Any]] = {}
        self.sizes: dict[int, int] = {}
        self.bytes = self.peak = 0
        self._before: set[int] = set()
        for storage in _living():
            if storage._cdata not in self._before:
                self._before.add(storage._cdata)
                weakref.finalize(storage, self._before.discard, storage._cdata).atexit = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch's compiler out: to import it takes seconds, and memory that would be taken for the port's."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and look at its inputs (made outside of torch, perhaps) and outputs."""
        kwargs = kwargs or {}
        for tensor in _tensors((args, tuple(kwargs.values()))):
            self._see(tensor)
        found = func(*args, **kwargs)
        for tensor in _tensors(found):
            self._see(tensor)
        return found

    def _see(self, tensor: Tensor) -> None:
        storage = _storage(tensor)
        if storage is None or storage._cdata in self._before:
            return
        key, size = storage._cdata, storage.nbytes()
        if key not in self.alive:
            self.alive[key] = weakref.ref(storage)
            self.sizes[key] = 0
            weakref.finalize(storage, self._gone, key).atexit = False
        self.bytes += size - self.sizes[key]
        self.sizes[key] = size
        self.peak = max(self.peak, self.bytes)

    def _gone(self, key: int) -> None:
        self.alive.pop(key, None)
        self.bytes -= self.sizes.pop(key, 0)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _storage(tensor: Tensor) -> Any:
    """Return what a tensor lies in; None where it lies in no memory of its own (meta, sparse)."""
    if tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _living() -> Iterator[Any]:
    """Yield the storage of each tensor that Python knows of now."""
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and (storage := _storage(thing)) is not None:
            yield storage


def _held_bytes(port: Any) -> tuple[int, int]:
    """Return the bytes of what stays, in memory of the process and of devices."""
    found = {s._cdata: (s.device.type, s.nbytes()) for _, t in port.held() if (s := _storage(t)) is not None}
    here = sum(size for kind, size in found.values() if kind == "cpu")
    return here, sum(size for _, size in found.values()) - here


class _Process:
    """The most anonymous memory of the process above what it had beside `dropped` bytes; 0 where it cannot be seen."""

    def __init__(self, dropped: int) -> None:
        self.peak, self._dropped = 0, dropped
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Process:
        self._begin = max(0, _anonymous_bytes() - self._dropped)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            self.peak = max(self.peak, _anonymous_bytes() - self._begin)


def _anonymous_bytes() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def _device_bytes(*, reset: bool = False) -> int:
    """Return the most that the accelerator's allocator held, or hold now with `reset`; 0 without one."""
    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is None or not accelerator.is_available() or not hasattr(accelerator, "max_memory_allocated"):
        return 0
    if reset:
        accelerator.reset_peak_memory_stats()
        return int(accelerator.memory_allocated())
    return int(accelerator.max_memory_allocated())


def _stays_counted() -> int:
    """Return what the accelerator still counts of a tensor that is freed, in bytes; 0 without one."""
    before = _device_bytes(reset=True)
    if not before:
        return 0
    block = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=torch.accelerator.current_accelerator())
    del block
    return max(0, _device_bytes(reset=True) - before)


# --- the checkpoint ---


def _kept(checkpoint: Checkpoint, storages: list[Any]) -> list[dict[str, Any]]:
    """Name the quantised tensors of the checkpoint that something left in memory begins with."""
    heads: dict[bytes, int] = defaultdict(int)
    for storage in storages:
        if storage.nbytes() >= HEAD_BYTES:
            head = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:HEAD_BYTES]
            heads[bytes(head.cpu().numpy())] += storage.nbytes()
    heads = {head: size for head, size in heads.items() if len(set(head)) > 1}
    if not heads:
        return []
    found = []
    for ref in _packed(checkpoint):
        with (checkpoint.path / ref.file).open("rb") as stream:
            stream.seek(ref.begin)
            head = stream.read(HEAD_BYTES)
        if head in heads:
            found.append({"name": ref.name, "file": ref.file, "offset": ref.begin, "bytes": heads.pop(head)})
    return found


def _packed(checkpoint: Checkpoint) -> Iterator[Any]:
    """Yield the stored tensors of each quantised weight."""
    for logical in logical_tensors(checkpoint):
        for name in logical.parts.values() if logical.quantised else ():
            if checkpoint.tensors[name].nbytes >= HEAD_BYTES:
                yield checkpoint.tensors[name]


def _largest_layer(checkpoint: Checkpoint) -> tuple[int, int]:
    """Return the bytes of the largest layer as stored, and decoded to float32; what lies in none is a layer alone."""
    stored: dict[Any, int] = defaultdict(int)
    decoded: dict[Any, int] = defaultdict(int)
    for ref in checkpoint.tensors.values():
        stored[_layer(ref.name)] += ref.nbytes
    for logical in logical_tensors(checkpoint):
        decoded[_layer(logical.name)] += 4 * math.prod(logical.shape)
    return max(stored.values(), default=0), max(decoded.values(), default=0)


def _layer(name: str) -> tuple[str, int]:
    template, numbers = split(name)
    return (template.partition("#")[0], numbers[0]) if numbers else (name, 0)
