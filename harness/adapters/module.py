"""Any torch.nn.Module that is called like a transformers model, as an adapter. Knows its arguments, not its class.

Called as `module(input_ids=, position_ids=, cache= or past_key_values=, use_cache=)` with what its signature takes, and
gives `.logits`. A module that takes token ids only works too: whole prefills, no phases.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.adapter import Inputs, Recorder, Rounding, TokenIds, Weight, silent
from harness.adapters.held import multiplied_out
from harness.adapters.hooks import Float64Islands, Taps
from harness.adapters.images import Pictures, PixelFormat, find_layout, pictures, pixel_format, placed
from harness.adapters.scope import CACHES, arguments_of, compile_layers, forwards, layers_only, scope_of
from harness.adapters.structure import Structure, discover
from harness.adapters.text import TextFrontEnd, end_ids
from harness.cases import read_model_info
from harness.errors import PortError, SpecError, nearest
from harness.precision.declare import Rounds, declare
from harness.types import Case, Facts, Setup

MOST_OF_A_TABLE = 4096
"""Elements above which a buffer is no table of frequencies or scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A module with its weights, and what loading observed. `attach` is told the structure before anything runs."""

    module: nn.Module
    facts: Facts = field(default_factory=dict)
    attach: Callable[[Structure], None] = lambda _: None


class ModuleAdapter:
    """A port that is an nn.Module, or a function that loads one. Scope is read from the checkpoint's configuration.

    Options of the setup: `compile` (a torch.compile backend; each layer is compiled alone, so that layers stay
    observable), and for a function whatever it takes (`options` names them). `wide` says that a function loads in
    whatever precision the setup asks for, float32 included.
    """

    def __init__(
        self,
        module: nn.Module | Callable[[Path, Setup], Loaded],
        checkpoint: Path,
        setup: Setup,
        *,
        name: str = "module",
        options: Sequence[str] | None = None,
        wide: bool = False,
    ) -> None:
        for key in setup.options:
            if options is not None and key not in (*options, "compile"):
                raise SpecError(f"unknown option {key!r} for {name}{nearest(key, [*options, 'compile'])}")
        self.name, self.checkpoint, self.setup = name, checkpoint, setup
        self.info = read_model_info(checkpoint)
        self._source = module
        self._loaded: Loaded | None = None
        arguments = arguments_of(module) if isinstance(module, nn.Module) else None
        self.scope = scope_of(self.info, arguments, setup, wide=wide)
        self._text = TextFrontEnd(checkpoint)
        self._slots: dict[int, Any] = {}
        self.module_paths: dict[str, str] = {}
        self.rounding: Rounding | None = None

    # --- Adapter ---

    def load(self, checkpoint: Path, setup: Setup) -> Facts:
        """Load the module, find its parts and hang its taps. Facts: `load_s`, `resident_bytes`, the loader's own."""
        begin = time.perf_counter()
        source = self._source
        self._loaded = Loaded(module=source) if isinstance(source, nn.Module) else source(checkpoint, setup)
        module = self._loaded.module
        module.eval().requires_grad_(False)
        self.structure = discover(module)
        self._loaded.attach(self.structure)
        self._arguments = arguments_of(module)
        self._cache_name = next((n for n in CACHES if n in self._arguments.named), "")
        compiled = setup.options.get("compile", "")
        self._eager = compile_layers(module, self.structure, compiled) if compiled else {}
        observable = layers_only if compiled else (lambda _: True)
        self._taps = Taps(module, self.structure, observable=observable)
        self._decisions = not compiled
        self.module_paths = {name: path for path, name in self.structure.names.items()}
        self._pixels = self._pixel_format() if self.scope.image else None
        real = [p for p in module.parameters() if not p.is_meta]
        held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in real}
        return {"load_s": time.perf_counter() - begin, "resident_bytes": sum(held.values()), **self._loaded.facts}

    def prepare(self, case: Case, record: Recorder) -> Inputs:
        """Turn a case into ids, positions and pixels."""
        extras: dict[str, Tensor] = {}
        if case.images:
            ids, extras = self._with_pictures(case)
        elif case.token_ids is not None:
            ids = list(case.token_ids)
        elif case.messages is not None:
            ids = self._text.encode(self._text.render(case.messages), special=False)
        else:
            ids = self._text.encode(case.prompt or "")
        if not ids:
            raise PortError(f"expected at least one token in case {case.id}, found none")
        token_ids = torch.tensor([ids], dtype=torch.int64, device=self.setup.device)
        positions = self._positions(token_ids, extras)
        record("inputs.token_ids", token_ids, dims="batch token")
        record("inputs.position_ids", positions, dims="batch token" if positions.dim() == 2 else "axis0 batch token")
        if "pixel_values" in extras:
            record("inputs.pixel_values", extras["pixel_values"])
            record("inputs.image_grid", extras["image_grid_thw"])
        return Inputs(token_ids=token_ids, position_ids=positions, extras=extras)

    def forward(self, inputs: Inputs, record: Recorder) -> Tensor:
        """Return the logits [1, T, V] of a whole prefill."""
        keep = "phases" not in self.scope.off  # over a fresh cache, so that what is read from a cache is a tap here too
        logits, _ = self._call(inputs, 0, inputs.token_ids.shape[-1], None, record, keep=keep)
        return logits

    def generate(self, inputs: Inputs, max_new_tokens: int, record: Recorder) -> TokenIds:
        """Return at most `max_new_tokens` greedy ids; over a cache where the module has one."""
        ending, ids = self.eos_ids(), inputs.token_ids
        found: TokenIds = []
        cached = "phases" not in self.scope.off
        cache, start = None, 0
        positions = inputs.position_ids
        while len(found) < max_new_tokens:
            span = Inputs(token_ids=ids, position_ids=positions, extras=inputs.extras)
            logits, cache = self._call(span, start, ids.shape[-1], cache, silent, keep=cached)
            start = ids.shape[-1] if cached else 0
            found.append(int(logits[0, -1].argmax()))
            if found[-1] in ending:
                break
            ids = torch.cat([ids, ids.new_tensor([[found[-1]]])], dim=1)
            if positions is not None:
                positions = torch.cat([positions, positions.amax(dim=(0, -1), keepdim=True).expand_as(
                    positions[..., :1]) + 1], dim=-1)  # fmt: skip
        return found

    def close(self) -> None:
        """Take the hooks off and let the module go."""
        if self._loaded is not None:
            self._taps.close()
        self._loaded = None
        self._slots.clear()

    def round_with(self, rounding: Rounding) -> None:
        """Make the loaded module compute as declared (capability `precision`)."""
        assert isinstance(rounding, Rounds)
        declare(self._ready().module, rounding)
        self.rounding = rounding

    # --- phases ---

    def open(self) -> int:
        """Take the lowest free slot."""
        slot = next(i for i in range(len(self._slots) + 1) if i not in self._slots)
        self._slots[slot] = None
        return slot

    def step(self, slot: int, inputs: Inputs, start: int, stop: int, record: Recorder) -> Tensor:
        """Process tokens [start, stop) after those in the slot; return their logits."""
        if slot not in self._slots:
            raise PortError(f"expected an open slot, found {slot}; open ones are {sorted(self._slots)}")
        logits, self._slots[slot] = self._call(inputs, start, stop, self._slots[slot], record, keep=True)
        return logits

    def free(self, slot: int) -> None:
        """Drop the slot's cache."""
        self._slots.pop(slot, None)

    # --- compiled ---

    def uncompiled(self) -> AbstractContextManager[None]:
        """Run every layer as it was before it was compiled."""
        return forwards(self._eager)

    # --- operators ---

    def __getattr__(self, name: str) -> Any:
        """Give what a module itself says of its operators: `operators()` and `arithmetic` (`harness.adapter`)."""
        if name in ("operators", "arithmetic"):
            loaded = self.__dict__.get("_loaded")
            module = loaded.module if loaded is not None else self.__dict__.get("_source")
            said = getattr(type(module), name, None)  # of its class: a part of a model may have such a name too
            if isinstance(module, nn.Module) and (callable(said) or isinstance(said, Mapping)):
                return getattr(module, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- weights ---

    def weights(self) -> Iterator[Weight]:
        """Yield every parameter and buffer under the module's own names, tied ones once for each name.

        Codes with a scale beside them are multiplied out. Buffers that no state holds are those the module computes.
        """
        loaded = self._ready()
        from harness.checkpoint import open_checkpoint

        stored = open_checkpoint(self.checkpoint).tensors
        state = loaded.module.state_dict()
        for name, value in self._held(state, stored):
            yield Weight(name=name, tensor=value, checkpoint=name if name in stored else "")
        for name, value in loaded.module.named_buffers():
            if name not in state:
                yield Weight(name=name, tensor=value, computed=True)

    def tables(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tables that the module computes for itself: small floating buffers that no checkpoint holds."""
        module = self._ready().module
        stored = module.state_dict()
        for name, value in module.named_buffers():
            small = value.is_floating_point() and 4 <= value.numel() <= MOST_OF_A_TABLE
            if name not in stored and small and bool(torch.isfinite(value).all()):
                yield name, value

    # --- chat ---

    def encode(self, text: str) -> TokenIds:
        """Tokenise plain text, special tokens added as the tokenizer says."""
        return self._text.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn token ids into text, special tokens skipped."""
        return self._text.decode(token_ids)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render a conversation with the chat template and the generation prompt."""
        return self._text.render(messages)

    def eos_ids(self) -> frozenset[int]:
        """Return the ids that end a generation."""
        return end_ids(self.checkpoint)

    # --- inside ---

    def _held(self, state: Mapping[str, Tensor], stored: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
        """Yield what memory holds under the names of the module's state."""
        return multiplied_out(state, stored)

    def _ready(self) -> Loaded:
        if self._loaded is None:
            raise PortError(f"{self.name}: expected load() before this call")
        return self._loaded

    def _call(
        self, inputs: Inputs, start: int, stop: int, cache: Any, record: Recorder, *, keep: bool
    ) -> tuple[Tensor, Any]:
        """Run the module over tokens [start, stop); return their logits and the cache."""
        module = self._ready().module
        given: dict[str, Any] = {"input_ids": inputs.token_ids[:, start:stop]}
        if inputs.position_ids is not None:
            given["position_ids"] = inputs.position_ids[..., start:stop]
        given |= _pictures_within(inputs.extras, start, stop)
        if keep and self._cache_name:
            given[self._cache_name] = cache
        given["use_cache"] = keep
        given = {k: v for k, v in given.items() if self._arguments.takes(k)}
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self.setup.dtype == "float64":
                stack.enter_context(Float64Islands())
            if self.rounding is not None:
                stack.enter_context(self.rounding.inputs())
            if record is not silent:
                listening = self._taps.listening(record, tokens=stop - start, decisions=self._decisions)
                stack.enter_context(listening)
                for value in given.values():
                    if isinstance(value, Tensor):
                        self._taps.learn(value)  # recorded as inputs.* already
            output = module(**given)
            logits = _logits(output)
            if logits.dim() == 2:
                logits = logits[None]
            if record is not silent:
                logits = self._taps.logits(logits)
        if logits.shape[1] != stop - start:
            raise PortError(
                f"{self.name}: expected logits of {stop - start} tokens, found shape {tuple(logits.shape)}; "
                "the module must return those of every position"
            )
        return logits, _cache_of(output) if keep else None

    def _positions(self, token_ids: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
        """Return positions 0..T-1, or the module's own for pictures [3, 1, T] where it has a function for them."""
        owner = getattr(self._loaded.module, "model", None) if self._loaded is not None else None
        function = getattr(owner, "get_rope_index", None)
        if extras and callable(function):
            known = set(inspect.signature(function).parameters)
            given = {k: v for k, v in {"input_ids": token_ids, **extras}.items() if k in known}
            return function(**given)[0].to(self.setup.device)  # type: ignore[no-any-return]
        return torch.arange(token_ids.shape[-1], device=token_ids.device)[None]

    def _with_pictures(self, case: Case) -> tuple[list[int], dict[str, Tensor]]:
        self._ready()
        if self._pixels is None:
            raise PortError(f"{self.name}: case {case.id} has images, which are outside the scope: {self.scope.off}")
        shown = pictures(case.images, self._pixels)
        ids, spans = placed(case, shown.rows, self.info.config)
        kinds = torch.zeros(1, len(ids), dtype=torch.int32)
        for first, last in spans:
            kinds[:, first:last] = 1
        extras = {
            "pixel_values": shown.pixels,  # float32 for every precision: the same input for both sides
            "image_grid_thw": shown.grid,
            "mm_token_type_ids": kinds,
            "image_spans": torch.tensor(spans, dtype=torch.int64),
        }
        return ids, {k: v.to(self.setup.device) for k, v in extras.items()}

    def _pixel_format(self) -> PixelFormat:
        """Find out which pixel layout the tower takes, by asking it."""
        form = pixel_format(self.info, self.checkpoint)
        module = self._ready().module
        features = getattr(module, "get_image_features", None)
        if features is None:
            return form

        def rows_of(shown: Pictures) -> int:
            pixels = shown.pixels.to(self.setup.device)
            with torch.no_grad(), ExitStack() as stack:
                if self.setup.dtype == "float64":
                    stack.enter_context(Float64Islands())
                return _rows(features(pixel_values=pixels, image_grid_thw=shown.grid.to(self.setup.device)))

        layout = find_layout(form, rows_of)
        return PixelFormat(**{**{n: getattr(form, n) for n in form.__slots__}, "layout": layout})


def _pictures_within(extras: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Return the pixels of the pictures that lie in a span, and the span's token types."""
    if "image_spans" not in extras:
        return {}
    spans = extras["image_spans"].tolist()
    inside = [start <= first and last <= stop for first, last in spans]
    cut = [s for s, whole in zip(spans, inside, strict=True) if not whole and s[0] < stop and start < s[1]]
    if cut:
        raise PortError(f"expected whole pictures in tokens {start}..{stop}, found one at {cut[0]} cut in two")
    found = {"mm_token_type_ids": extras["mm_token_type_ids"][:, start:stop]}
    if any(inside):
        grid = extras["image_grid_thw"]
        keep = torch.tensor(inside, device=grid.device)
        owner = torch.repeat_interleave(torch.arange(len(spans), device=grid.device), grid.prod(-1))
        found |= {"pixel_values": extras["pixel_values"][keep[owner]], "image_grid_thw": grid[keep]}
    return found


def _logits(output: Any) -> Tensor:
    """Find the logits in what a module returned."""
    if isinstance(output, Tensor):
        return output
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if found is None and isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        found = output[0]
    if not isinstance(found, Tensor):
        raise PortError(f"expected a tensor or an output with .logits, found {type(output).__name__}")
    return found


def _cache_of(output: Any) -> Any:
    for name in CACHES:
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if found is not None:
            return found
    return output[1] if isinstance(output, tuple) and len(output) > 1 else None


def _rows(features: Any) -> int:
    """Count the rows of image features: a tensor, a list of them, or a record with `pooler_output`."""
    features = getattr(features, "pooler_output", features)
    if isinstance(features, (tuple, list)):
        return sum(_rows(f) for f in features if isinstance(f, Tensor))
    return int(features.reshape(-1, features.shape[-1]).shape[0])
