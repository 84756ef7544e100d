"""Where in a port an operator is called: the module by its path, the taps around it, the line of code. No operators.

A port that is no module tells where it is by what it records: a call lies behind the last tap and before the next one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_NOT_THE_PORT = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


class Places:
    """The modules that are running now, and what the port told: `taps` in order, "" where a forward ends.

    `met` says that a module ran at all.
    """

    def __init__(self) -> None:
        self._running: list[nn.Module] = []
        self._paths: dict[int, str] = {}
        self.taps: list[str] = [""]
        self.met = False

    def record(self, tap: str, tensor: Tensor, *, dims: str = "", kind: str = "") -> Tensor:
        """Note a tap, as a recorder that keeps and changes nothing."""
        self.taps.append(tap)
        return tensor

    def around(self, told: int) -> tuple[str, str]:
        """Return the taps before and behind a call that was made when `told` taps were; "" where there is none."""
        return self.taps[told - 1], self.taps[told] if told < len(self.taps) else ""

    def module(self) -> str:
        """Return the path of the innermost module that is running; "" outside of all."""
        if not self._running:
            return ""
        innermost = self._running[-1]
        return self._paths.get(id(innermost), "") or type(innermost).__name__

    def site(self) -> str:
        """Return file and line of the port's code that called the operator, and the function that it is in."""
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_PORT):
            frame = frame.f_back
        if frame is None:
            return ""
        parts = Path(frame.f_code.co_filename).parts[-3:]
        return f"{'/'.join(parts)}:{frame.f_lineno} in {frame.f_code.co_name}"

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self.met = True
        if not self._running:
            self._paths = {id(part): path for path, part in module.named_modules() if path}
        self._running.append(module)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        while self._running and self._running.pop() is not module:  # a module that raised was never left
            pass

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow every module while it is entered."""
        hooks = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._running.clear()
            self.taps.append("")
