"""Ports of one subject, unbroken or with one injection, in each precision. Knows adapters; must not judge anything."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from harness.adapters.hf import OPTIONS, load_module
from harness.adapters.module import Loaded, ModuleAdapter
from harness.faults.catalogue import Injection
from harness.faults.lab import Lab, loaded, tried
from harness.faults.parts import Parts
from harness.faults.tapped import Tapped
from harness.plugins import open_adapter, parse_spec
from harness.runs import Bench
from harness.types import Setup


class Ports:
    """The port of a subject with an injection (or none), in each precision that is asked for.

    `places` and `broke` are known once the first of them was made.
    """

    def __init__(self, lab: Lab, modules: dict[str, Any], injection: Injection | None) -> None:
        self.lab, self.injection = lab, injection
        self.places: tuple[str, ...] = ()
        self.broke = ""
        self._modules, self._made = modules, dict[str, Bench]()

    def __call__(self, setup: Setup) -> Bench:
        """Return the loaded port of a setup. Raises NoPlace."""
        if setup.dtype not in self._made:
            self._made[setup.dtype] = self._port(setup)
        return self._made[setup.dtype]

    def _port(self, setup: Setup) -> Bench:
        subject = self.lab.subject
        if parse_spec(subject.accel).kind != "hf":
            other = open_adapter(parse_spec(subject.accel), subject.checkpoint, setup)
            bench = loaded(other, subject.checkpoint, setup)
            self._inject(lambda: Tapped(other, self.lab.taps()))
            return bench
        if setup.dtype not in self._modules:
            self._modules[setup.dtype] = load_module(subject.checkpoint, setup).module.eval()
        module = copy.deepcopy(self._modules[setup.dtype])
        self._inject(lambda: Parts(module))
        adapter = ModuleAdapter(
            lambda *_: Loaded(module=module), subject.checkpoint, setup, name=subject.accel, options=OPTIONS
        )
        return loaded(adapter, subject.checkpoint, setup)

    def _inject(self, place: Callable[[], Any]) -> None:
        if self.injection is not None:
            self.places, self.broke = tried(self.injection.inject, place())

    def weights(self) -> dict[str, torch.Tensor]:
        """Return what memory is said to hold, by name."""
        ports: Any = self(self.lab.setup).adapter
        return {w.name: w.tensor for w in ports.weights()}

    def close(self) -> None:
        """Let them go."""
        for bench in self._made.values():
            bench.adapter.close()
