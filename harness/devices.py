"""The device that a SPEC names -> one that torch can use in this process. Knows entry points; must not know ports.

    hf:PATH?device=cuda:1                          a device that torch has by itself, or that loads itself with torch
    hf:PATH?device=npu:0&plugin=torch_npu          one that a package brings, imported first
    hf:PATH?device=pocket:1&device_gib=2           one that an entry point of the group `day0.devices` enables

Most out-of-tree backends name themselves in torch's own entry points (`torch.backends`) and are there once torch is
imported. What costs something to enable (a build) has an entry point here instead, which is called where a SPEC asks
for it, with the options whose names begin with `device_`, as text.

How a device rounds may be said in the SPEC, too (`arithmetic_accumulate=bfloat16`): `declared` gives it as words.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from harness.errors import Day0Error, SpecError, nearest
from harness.types import Setup

GROUP = "day0.devices"
PREFIX = "device_"
PLUGIN = "plugin"
ARITHMETIC = "arithmetic_"


def enabled(setup: Setup) -> Setup:
    """Make the setup's device usable in this process; return the setup without the options that were the device's.

    Raises:
        SpecError: nothing brings this device, it cannot be enabled, or it has no such card.
    """
    kind = setup.device.partition(":")[0]
    own = {key.removeprefix(PREFIX): value for key, value in setup.options.items() if key.startswith(PREFIX)}
    rest = {k: v for k, v in setup.options.items() if not k.startswith((PREFIX, ARITHMETIC)) and k != PLUGIN}
    if PLUGIN in setup.options:
        _imported(setup.options[PLUGIN], setup.device)
    known = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    if kind in known:
        try:
            known[kind].load()(own)
        except Day0Error:
            raise
        except Exception as error:  # the plug-in may raise anything
            raise SpecError(f"the device {setup.device} cannot be enabled by {known[kind].value}: {error!r}") from error
    elif own:
        raise SpecError(f"expected no device_ options for the device {kind}, found {sorted(own)}")
    if setup.device != "cpu":
        _taken(setup.device, [*known, "cpu", "cuda"])
    return dataclasses.replace(setup, options=rest)


def declared(adapter: Any, setup: Setup) -> Mapping[str, str]:
    """Return how a port's device computes, in the words of `harness.ops.arithmetic`: as the port says, or the SPEC."""
    said = {k.removeprefix(ARITHMETIC): v for k, v in setup.options.items() if k.startswith(ARITHMETIC)}
    return {**getattr(adapter, "arithmetic", {}), **said}


def _imported(package: str, device: str) -> None:
    try:
        importlib.import_module(package)
    except Exception as error:  # the plug-in may raise anything
        raise SpecError(f"the plug-in {package!r} of the device {device} cannot be imported: {error!r}") from error


def _taken(device: str, known: list[str]) -> None:
    """Make the device the current one. Raises SpecError where torch does not know it or has no such card."""
    import torch

    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        kind = device.partition(":")[0]
        hint = nearest(kind, known) or "; name the package that brings it with plugin=PACKAGE"
        raise SpecError(f"expected a device that torch knows, found {device!r}{hint}") from error
    accelerator: Any = getattr(torch, "accelerator", None)
    if wanted.type in ("cpu", "meta") or accelerator is None:
        return
    current = accelerator.current_accelerator()
    if current is None or current.type != wanted.type or not accelerator.is_available():
        found = "none" if current is None else current.type
        raise SpecError(f"expected an accelerator {wanted.type!r} on this machine, found {found}")
    count = accelerator.device_count()
    if wanted.index is not None and wanted.index >= count:
        raise SpecError(f"expected one of {count} cards of {wanted.type}, found {device!r}")
    if wanted.index is not None:
        accelerator.set_device_index(wanted.index)  # what names no card, and what counts memory, is on this one
