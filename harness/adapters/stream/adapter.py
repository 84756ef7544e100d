"""A streamed module as an adapter. Knows the adapter of modules and its window; must not know transformers.

Adapters of one window are made by `beside`: their forwards can go along in one pass over the checkpoint (`together`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from harness.adapter import Rounding
from harness.adapters.module import Loaded, ModuleAdapter
from harness.adapters.stream.shards import Shards
from harness.adapters.stream.weights import Shape, Weights, by_name
from harness.adapters.stream.window import Streamed, Window
from harness.adapters.structure import Structure
from harness.checkpoint import open_checkpoint, window_plan
from harness.errors import CheckpointError
from harness.precision.declare import Rounds
from harness.types import Facts, Setup

T = TypeVar("T")


class StreamedAdapter(ModuleAdapter):
    """A port whose weights pass by: capability `streamed` beside those of a module."""

    streamed: Streamed

    def __init__(
        self,
        load: Callable[[Path, Setup], Loaded],
        window: Window,
        checkpoint: Path,
        setup: Setup,
        *,
        name: str,
        options: Sequence[str] | None = None,
        wide: bool = False,
    ) -> None:
        super().__init__(self._load, checkpoint, setup, name=name, options=options, wide=wide)
        self.window, self._build = window, load
        self._given = {"name": name, "options": options, "wide": wide}

    def beside(self, setup: Setup) -> StreamedAdapter:
        """Return another adapter over the same window, not loaded."""
        return StreamedAdapter(self._build, self.window, self.checkpoint, setup, **self._given)  # type: ignore[arg-type]

    def together(self, tasks: Sequence[Callable[[], T]]) -> list[T | BaseException]:
        """Do what runs adapters of this window, in one pass over the checkpoint where their forwards allow it."""
        return self.window.together(tasks)

    def stream_facts(self) -> Facts:
        """Return `read_bytes` so far, and `checkpoint_bytes`."""
        shards = self.window.weights.shards
        return {"read_bytes": shards.read_bytes, "checkpoint_bytes": shards.checkpoint.nbytes}

    def load(self, checkpoint: Path, setup: Setup) -> Facts:
        """Build the module and bring its widest unit in once. Facts: `window_bytes` planned, beside a module's own."""
        facts = super().load(checkpoint, setup)
        self.streamed.try_window()
        weights = self.window.weights
        units = [weights.sources(names, setup.dtype) for names in self.window.units.values()]
        return {**facts, "window_bytes": window_plan(weights.shards.checkpoint, setup.dtype, units).peak_bytes}

    def close(self) -> None:
        """Let the module go, and what of the window nobody else uses."""
        super().close()
        self.window.clear()

    def round_with(self, rounding: Rounding) -> None:
        """Make the module compute as declared; its weights are rounded as they come in (capability `precision`)."""
        super().round_with(rounding)
        assert isinstance(rounding, Rounds)
        self.streamed.rounds = rounding

    def _held(self, state: Mapping[str, Tensor], stored: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter and persistent buffer, a few in memory at a time."""
        return self.streamed.values()

    def _load(self, checkpoint: Path, setup: Setup) -> Loaded:
        loaded = self._build(checkpoint, setup)

        def attach(structure: Structure) -> None:
            module = loaded.module
            for part in module.modules():
                for name, buffer in part._buffers.items():
                    if buffer is not None and not buffer.is_meta:
                        part._buffers[name] = buffer.to(setup.device)
            self.streamed = Streamed(self.window, module, structure, key=setup.dtype, device=setup.device)

        return Loaded(module=loaded.module, facts=loaded.facts, attach=attach)


def open_window(checkpoint: Path) -> Window:
    """Return a window over a checkpoint; nothing but headers is read. Raises CheckpointError."""
    return Window(Weights(Shards(open_checkpoint(checkpoint))))


def streamed_module(module: nn.Module, checkpoint: Path, setup: Setup, *, name: str) -> StreamedAdapter:
    """Return the adapter of a module on the meta device whose parameters have the names of the checkpoint.

    Raises:
        CheckpointError: a parameter without values has no tensor of its name.
    """
    window = open_window(checkpoint)
    state = module.state_dict(keep_vars=True)
    recipes = by_name(module, window.weights.logicals)
    missing = sorted(name for name, value in state.items() if value.is_meta and name not in recipes)
    if missing:
        raise CheckpointError(
            f"expected a tensor of the checkpoint for each of the {len(state)} parameters of a streamed module, found "
            f"none named {missing[0]!r} (and {len(missing) - 1} more); name them alike, or load without stream=1"
        )
    window.weights.shapes[setup.dtype] = Shape(
        shapes={name: value.shape for name, value in state.items()},
        dtypes={name: value.dtype for name, value in state.items()},
        recipes=recipes,
        same={},
    )
    return StreamedAdapter(lambda *_: Loaded(module=module), window, checkpoint, setup, name=name)
