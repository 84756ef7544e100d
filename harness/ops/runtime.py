"""What a device's runtime promises: memory counts, order of streams, copies beside, after out of memory. No limits.

Everything goes through torch.accelerator, so it is the same for any device. On a plain CPU nothing of it applies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Beat = Callable[[str], None]
MOST_BYTES, LEAST_BYTES = 8 << 20, 1 << 14
SHARE = 64
"""Blocks that fit the free memory: a card that is nearly full is not filled by looking at it."""
ROUNDS = 8
HUGE_BYTES = 1 << 50
PLAIN = "a plain CPU has no memory statistics, streams, events or pinned copies of a device"


def runtime_facts(device: str, beat: Beat = lambda _: None) -> dict[str, Any]:
    """Return what each check of the runtime found: `checks` {name: problem or ""}, or why they do not apply."""
    accelerator: Any = getattr(torch, "accelerator", None)
    kind = torch.device(device).type
    current = accelerator.current_accelerator() if accelerator is not None else None
    if current is None or kind != current.type:
        return {"not_applicable": PLAIN if kind == "cpu" else f"torch.accelerator does not know {kind}", "checks": {}}
    checks: dict[str, Callable[[Any, str], str]] = {
        "allocated": _allocated, "peak": _peak, "streams": _streams, "events": _events, "pinned": _pinned,
        "back": _back, "out_of_memory": _out_of_memory,
    }  # fmt: skip
    found = {}
    for name, check in checks.items():
        beat(f"runtime: {name}")
        try:
            found[name] = check(accelerator, device)
        except (RuntimeError, NotImplementedError, AttributeError, AssertionError) as error:
            first = (str(error).splitlines() or [""])[0][:200]
            found[name] = f"not possible: {type(error).__name__}: {first}"
    return {"not_applicable": "", "checks": found}


def _block_bytes(device: str) -> int:
    """Return the size of the blocks that are tried: of what is free, a small share."""
    accelerator: Any = torch.accelerator
    free = accelerator.get_memory_info()[0] if hasattr(accelerator, "get_memory_info") else SHARE * MOST_BYTES
    return max(LEAST_BYTES, min(MOST_BYTES, free // SHARE // 512 * 512))


def _block(device: str, value: float = 0.0) -> torch.Tensor:
    return torch.full((_block_bytes(device) // 4,), value, dtype=torch.float32).to(device)


def _allocated(accelerator: Any, device: str) -> str:
    """The count grows by at least what a tensor takes, and comes back when it is freed."""
    accelerator.synchronize()
    before = accelerator.memory_allocated()
    block = _block(device)
    during, size = accelerator.memory_allocated(), block.nbytes
    del block
    accelerator.synchronize()
    after = accelerator.memory_allocated()
    if during - before < size:
        return f"a tensor of {size} bytes made memory_allocated grow by {during - before}"
    return f"memory_allocated stays {after - before} bytes higher after a tensor is freed" if after > before else ""


def _peak(accelerator: Any, device: str) -> str:
    """The peak holds what was freed meanwhile, and starts anew when it is reset."""
    accelerator.reset_peak_memory_stats()
    base, held = accelerator.max_memory_allocated(), accelerator.memory_allocated()
    if base > held:
        return f"after a reset the peak is {base} bytes, allocated are {held}"
    block = _block(device)
    size = block.nbytes
    del block
    high = accelerator.max_memory_allocated()
    accelerator.reset_peak_memory_stats()
    again = accelerator.max_memory_allocated()
    if high - base < size:
        return f"the peak grew by {high - base} for a tensor of {size} bytes"
    return f"after a reset the peak is {again} bytes, allocated are {accelerator.memory_allocated()}" if (
        again > max(base, accelerator.memory_allocated())
    ) else ""  # fmt: skip


def _streams(accelerator: Any, device: str) -> str:
    """What one stream writes is seen by another one that waits for it."""
    first, second = torch.Stream(device=device), torch.Stream(device=device)
    for number in range(1, ROUNDS + 1):
        with first:
            x = _block(device)
            for _ in range(number):
                x = x + 1.0
        second.wait_stream(first)
        with second:
            y = x * 2.0
        second.synchronize()
        if not bool((y.cpu() == 2.0 * number).all()):
            return f"a stream that waits for another one sees values from before (round {number})"
    return ""


def _events(accelerator: Any, device: str) -> str:
    """An event that was recorded after work is done only when the work is."""
    stream, event = torch.Stream(device=device), torch.Event(device=device)
    with stream:
        x = _block(device)
        for _ in range(ROUNDS):
            x = x + 1.0
        event.record(stream)
    event.synchronize()
    if not event.query():
        return "an event that was waited for says that it has not happened"
    return "" if bool((x.cpu() == ROUNDS).all()) else "an event happened before the work that it was recorded after"


def _pinned(accelerator: Any, device: str) -> str:
    """A copy from pinned memory holds what was there, whether the buffer is dropped or filled again after waiting."""
    count = _block_bytes(device) // 4
    dropped, filled, buffer = [], [], torch.empty(count).pin_memory()
    for number in range(ROUNDS):
        pinned = torch.full((count,), float(number)).pin_memory()
        dropped.append(pinned.to(device, non_blocking=True))
        del pinned  # its memory may be used for the next one only when the copy has ended
    for number in range(ROUNDS):
        buffer.fill_(float(number))
        filled.append(buffer.to(device, non_blocking=True))
        accelerator.synchronize()
    for how, copies in (("dropped", dropped), ("filled again after a synchronize", filled)):
        wrong = [n for n, x in enumerate(copies) if not bool((x.cpu() == float(n)).all())]
        if wrong:
            return f"copies {wrong} from a pinned buffer hold what came later: the buffer was {how}"
    return ""


def _back(accelerator: Any, device: str) -> str:
    """A copy back to pinned memory that is waited for holds what was on the device when it was asked for."""
    x = _block(device)
    kept = [torch.empty(x.shape).pin_memory() for _ in range(ROUNDS)]
    for number, place in enumerate(kept):
        x.fill_(float(number))
        place.copy_(x, non_blocking=True)
    accelerator.synchronize()
    wrong = [n for n, place in enumerate(kept) if not bool((place == float(n)).all())]
    return f"copies {wrong} back to pinned memory hold what came later, or before" if wrong else ""


def _out_of_memory(accelerator: Any, device: str) -> str:
    """Asking for too much raises OutOfMemoryError, takes nothing, and leaves the device usable."""
    before = accelerator.memory_allocated()
    try:
        torch.empty(HUGE_BYTES, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        pass
    except RuntimeError as error:
        return f"too much memory raises {type(error).__name__}, not torch.OutOfMemoryError: {str(error)[:120]}"
    else:
        return f"{HUGE_BYTES} bytes were given"
    block = _block(device, 3.0)
    if not bool((block.cpu() == 3.0).all()):
        return "after out of memory, new tensors hold other values"
    del block
    after = accelerator.memory_allocated()
    return f"{after - before} bytes stay allocated after out of memory" if after > before else ""
