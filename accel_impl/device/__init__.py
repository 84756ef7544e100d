"""A small accelerator of its own for torch, built on demand. Knows its shared library; must not know models or ports.

`enable()` builds the library where it is not in the cache yet, registers the device as `pocket` and says how many
cards there are; after that `torch.device("pocket:1")`, `torch.accelerator` and `torch.pocket` work. One per process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from types import ModuleType

import torch

from accel_impl.device.build import library
from harness.errors import SpecError, nearest

NAME = "pocket"
BREAKS = (
    "strided_read", "topk_last", "softmax_band", "blit_neighbours", "matmul_tail", "cumsum_narrow", "stale_pinned",
    "leaky_free", "sticky_peak", "oom_counts",
)  # fmt: skip
"""Defects that it can be told to have, in the order of their bits in `pocket.h`."""
OPTIONS = {"cards": "2", "gib": "4", "breaks": ""}
"""Options of `enable` and their defaults: how many cards, memory of each, defects (comma between)."""
_library: ctypes.CDLL | None = None


def enable(options: Mapping[str, str] | None = None) -> ModuleType:
    """Build, register and configure the device; return its module, `torch.pocket`. May be called again.

    Raises:
        SpecError: an option is unknown, there is no compiler, or another device has taken the one place.
    """
    given = {**OPTIONS, **(options or {})}
    for key in given:
        if key not in OPTIONS:
            raise SpecError(f"unknown option {key!r} of the device {NAME}{nearest(key, list(OPTIONS))}")
    cards, gib = _number("cards", given["cards"]), _number("gib", given["gib"])
    if not 1 <= cards <= 64 or cards != int(cards) or gib <= 0:
        raise SpecError(f"expected 1 to 64 cards with memory, found cards={given['cards']} gib={given['gib']}")
    module = _registered()
    held().pocket_cards(int(cards), ctypes.c_uint64(int(gib * 2**30)))
    set_breaks(name for name in given["breaks"].split(",") if name)
    return module


def held() -> ctypes.CDLL:
    """Return the loaded library. Raises SpecError before `enable`."""
    if _library is None:
        raise SpecError(f"expected the device {NAME} to be enabled; call accel_impl.device.enable() first")
    return _library


def set_breaks(names: Iterable[str]) -> None:
    """Make the device wrong in these ways and no other."""
    bits = 0
    for name in names:
        if name not in BREAKS:
            raise SpecError(f"unknown defect {name!r} of the device {NAME}{nearest(name, list(BREAKS))}")
        bits |= 1 << BREAKS.index(name)
    held().pocket_break(ctypes.c_uint64(bits))


def set_cap(card: int, cap_bytes: int) -> None:
    """Give a card another amount of memory; what is allocated stays."""
    held().pocket_cap(card, ctypes.c_uint64(cap_bytes))


def counts() -> dict[str, dict[str, int]]:
    """Return how often each operator ran since `reset_counts`: on the device (`own`), on the CPU (`fallback`)."""
    library = held()
    told = {"own": library.pocket_counts(0), "fallback": library.pocket_counts(1)}
    return {where: {n: int(c) for n, c in map(str.split, text.decode().splitlines())} for where, text in told.items()}


def reset_counts() -> None:
    """Begin to count anew."""
    held().pocket_reset_counts()


def _registered() -> ModuleType:
    """Load the library and give the device its name and its module, once in a process."""
    global _library
    from accel_impl.device import module

    if _library is None:
        taken = torch._C._get_privateuse1_backend_name()
        if taken not in ("privateuseone", NAME):
            raise SpecError(
                f"expected no other out-of-tree device in this process, found {taken!r}; torch has room for one"
            )
        path = library()
        torch.utils.rename_privateuse1_backend(NAME)
        torch.ops.load_library(str(path))
        _library = ctypes.CDLL(str(path))
        _library.pocket_counts.restype = ctypes.c_char_p
        torch._register_device_module(NAME, module)
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return module


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise SpecError(f"expected a number for {key} of the device {NAME}, found {text!r}") from error
