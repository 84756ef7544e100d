"""What port files with faults share: a table of faults by name, a factory that injects the one that a SPEC names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_impl.port import AccelAdapter

Inject = Callable[[], "type[AccelAdapter] | None"]
"""Patches what it must; may return another class of port."""


class Faults(dict[str, Inject]):
    """The faults of one port file, by the names of their functions."""

    def add(self, inject: Inject) -> Inject:
        """Name a fault after its function."""
        self[inject.__name__] = inject
        return inject

    def port(self, checkpoint: Path, setup: Any) -> AccelAdapter:
        """Return the built-in port with the fault that the SPEC names."""
        options = dict(setup.options)
        made = self[options.pop("fault")]() or AccelAdapter
        return made(checkpoint, dataclasses.replace(setup, options=options))


def around(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace `owner.name` by `change(original, *args)`."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))
