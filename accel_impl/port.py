"""The port as the harness sees it. Knows every other module here; holds no arithmetic of its own."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_impl.backend import BackendAdapter
from accel_impl.cache import pages_for
from accel_impl.config import Config, read_config
from accel_impl.held import Held
from accel_impl.loader import Loaded, load
from accel_impl.memory import memory_of
from accel_impl.model import Model, Output, Pictures, Step
from accel_impl.offers import operator_table
from accel_impl.options import dtype_of, read_options
from accel_impl.parallel import Fleet, Place, SharedRecorder, distributed_place
from accel_impl.places import module_paths
from accel_impl.prepare import Preparing, appended
from accel_impl.shards import Shards
from accel_impl.sharing import Sharing
from accel_impl.store import Memory, SlotStore
from harness.adapter import Inputs, Operator, Recorder, TokenIds, Weight, silent
from harness.errors import PortError
from harness.types import Facts, Layout, Scope, Setup

LAYOUTS = (Layout(), Layout(tp=2), Layout(ep=2), Layout(pp=2))
"""Layouts that are claimed: all fit a world of two. Others (tp2xep2, tp2xpp2) run too."""


@dataclass(slots=True)
class _Request:
    """What a slot holds beside its pages."""

    pictures: Pictures | None = None


class AccelAdapter(Preparing, Sharing):
    """The built-in port: bf16 (or float32), custom operators, paged cache, tp/ep/pp, a server."""

    name = "builtin:accel"

    def __init__(self, checkpoint: Path, setup: Setup) -> None:
        self.options = read_options(setup.options)
        self.checkpoint, self.setup = checkpoint, setup
        switched = [name for name in self.options["fallback"].split(",") if name]
        self.use = BackendAdapter(prefer=self.options["ops"], compiler=self.options["compile"], fallback=switched)
        self.config: Config = read_config(checkpoint)
        self.scope = Scope(
            text=True,
            image=self.config.vision is not None,
            layouts=LAYOUTS,
            phases=("prefill", "chunk", "decode", "prefix", "rewound", "together"),
            max_length_tokens=min(
                self.config.max_position_embeddings, int(self.options["pages"]) * self.config.page_tokens
            ),
            serves=True,
            chat=True,
            fallbacks=self.use.fallbacks,
            precisions=("float32",) if setup.dtype == "bfloat16" else (),
        )
        self.module_paths = module_paths(self.config)
        self.place = Place()
        self.model: Model | None = None
        self.memory: Memory | None = None
        self._requests: dict[int, _Request] = {}
        self._simulated: dict[Layout, tuple[Fleet, list[Model]]] = {}
        self._server: Any = None

    # ---- weights

    def load(self, checkpoint: Path, setup: Setup) -> Facts:
        """Load this rank's weights and make its cache."""
        self._stop_server()  # its requests and prefixes are of what was loaded before
        self.checkpoint, self.setup = checkpoint, setup
        self.config, self.dtype, self.device = read_config(checkpoint), dtype_of(setup), torch.device(setup.device)
        self._simulated.clear()
        self._requests.clear()
        if self.place.idle:
            return {"idle": True}
        loaded = self._loaded(self.place)
        self.lossy = loaded.lossy
        self.model = self._model_of(loaded, self.place)
        self.memory = self._memory_of(self.place, int(self.options["pages"]), int(self.options["slots"]))
        return {**loaded.facts, "cache_bytes": self.memory.nbytes}

    def _model_of(self, loaded: Loaded, place: Place) -> Model:
        held = Held(
            config=self.config, weights=loaded.weights, place=place, use=self.use, dtype=self.dtype, device=self.device
        )
        return Model(held)

    def _memory_of(self, place: Place, pages: int, slots: int) -> Memory:
        return memory_of(self.config, place, pages=pages, slots=slots, dtype=self.dtype, device=self.device)

    def _converted(self, place: Place, *, order: str, poison: bool) -> Loaded:
        shards = Shards(self.checkpoint)
        return load(
            shards, self.config, place, self.dtype, order=order, poison=poison, device=self.device, use=self.use
        )

    def _loaded(self, place: Place) -> Loaded:
        """Load in the order, and with the poison, that the options say."""
        return self._converted(place, order=self.options["visit"], poison=self.options["poison"] == "1")

    def reload(self, *, reverse: bool, poison: bool) -> Facts:
        """Drop the weights and convert them anew, in either order, the workspace filled with NaN before each use."""
        self.model = None
        self._simulated.clear()
        loaded = self._converted(self.place, order="reverse" if reverse else "forward", poison=poison)
        self.lossy = loaded.lossy
        self.model = self._model_of(loaded, self.place)
        return loaded.facts

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what stays for each weight: one tensor, or codes and their scales."""
        for name, resident in self._model().weights.items():
            for part, tensor in resident.parts().items():
                yield f"{name}{part}", tensor

    def weights(self) -> Iterator[Weight]:
        """Yield what memory holds, decoded in float32 where it is quantised, under the checkpoint's names."""
        for name, held in self._model().weights.items():
            exact = name not in self.lossy
            yield Weight(name=name, tensor=held.decode(held.exact_dtype), checkpoint=name, lossless=exact)

    def close(self) -> None:
        """Stop the server and free everything."""
        self._stop_server()
        self.model = self.memory = self._front = self._reuse = None
        self._simulated.clear()
        self._requests.clear()

    def _stop_server(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._server = None

    def _model(self) -> Model:
        if self.model is None:
            raise PortError("expected a loaded port, found none; call load first")
        return self.model

    def memory_in_use(self) -> Memory:
        """Return pages and states of all slots. Raises PortError before `load`."""
        if self.memory is None:
            raise PortError("expected a loaded port, found no cache; call load first")
        return self.memory

    # ---- running

    def forward(self, inputs: Inputs, record: Recorder) -> Tensor:
        """Run a whole prefill."""
        if self.place.idle:
            return torch.empty(1, inputs.token_ids.shape[1], 0)
        return self.prefill(self._model(), inputs, record)

    @torch.no_grad()
    def prefill(self, model: Model, inputs: Inputs, record: Recorder) -> Tensor:
        """Run a whole prefill of one rank over pages and states of its own, which end with it."""
        length = inputs.token_ids.shape[1]
        pictures = model.features(inputs, record)
        pages = pages_for(length, len(pictures.places_M) if pictures is not None else 0, self.config.page_tokens)
        memory = self._memory_of(model.place, pages, 1)
        store = SlotStore(memory, [memory.open()], [0], length)
        return model.run(step_of(inputs, 0, length, pictures), store, record).logits

    def generate(self, inputs: Inputs, max_new_tokens: int, record: Recorder) -> TokenIds:
        """Prefill, then decode greedily over the paged cache."""
        return [token for token, _ in self.stream(inputs, max_new_tokens, record)]

    def stream(
        self, inputs: Inputs, max_new_tokens: int, record: Recorder
    ) -> Generator[tuple[int, Tensor], None, None]:
        """Yield greedy ids with the logits [vocabulary] that each was chosen from; end after an end-of-sequence id."""
        if self.place.idle or max_new_tokens < 1:
            return
        slot, start = self.open(), 0
        try:
            for _ in range(max_new_tokens):
                total = inputs.token_ids.shape[1]
                logits = self.step(slot, inputs, start, total, record)[0, -1]
                token = int(logits.argmax())
                yield token, logits
                if token in self.config.eos_token_id or total + 1 > self.config.max_position_embeddings:
                    return
                inputs, start = appended(inputs, [token]), total
        finally:
            self.free(slot)

    def open(self) -> int:
        """Take a slot."""
        slot = self.memory_in_use().open()
        self._requests[slot] = _Request()
        return slot

    def step(self, slot: int, inputs: Inputs, start: int, stop: int, record: Recorder) -> Tensor:
        """Process tokens [start, stop): a prefill, a chunk, or a sparse decode of one token."""
        if self.place.idle:
            return torch.empty(1, stop - start, 0)
        return self.advance(slot, inputs, start, stop, record).logits

    @torch.no_grad()
    def advance(
        self, slot: int, inputs: Inputs, start: int, stop: int, record: Recorder, *, further: bool = True
    ) -> Output:
        """Process tokens [start, stop) and return all that the model says; `further` runs the layer for one more."""
        model, request = self._model(), self._requests.get(slot)
        if request is None:
            raise PortError(f"expected an open slot, found {slot}; open are {sorted(self._requests)}")
        if request.pictures is None and (start == 0 or self.needs_rows(slot, inputs, start)):
            request.pictures = model.features(inputs, record)
        store = SlotStore(self.memory_in_use(), [slot], [start], stop - start)
        return model.run(step_of(inputs, start, stop, request.pictures, further=further), store, record)

    def picture_rows(self, inputs: Inputs) -> int:
        """Return how many rows of keys the pictures of a request take, beside its tokens."""
        found = "pixel_values" in inputs.extras
        return int((inputs.token_ids == self.config.image_token_id).sum()) if found else 0

    @torch.no_grad()
    def rows(self, inputs: Inputs) -> Pictures | None:
        """Run the tower alone, at any time and beside other steps; give the result to `attach`."""
        return self._model().features(inputs, silent)

    def attach(self, slot: int, pictures: Pictures | None) -> None:
        """Let a request have its rows of pictures before the step that takes them."""
        self._requests[slot].pictures = pictures

    def needs_rows(self, slot: int, inputs: Inputs, done: int) -> bool:
        """Say whether tokens from `done` on stand where pictures go, and their rows are not there yet."""
        return (
            self._requests[slot].pictures is None
            and self.picture_rows(inputs) > 0
            and bool((inputs.token_ids[:, done:] == self.config.image_token_id).any())
        )

    @torch.no_grad()
    def decode_together(
        self,
        slots: Sequence[int],
        tokens: Sequence[int],
        *,
        record: Recorder = silent,
        total: int = 0,
        further: bool = True,
    ) -> Output:
        """Process one more token of each slot, all in one call; logits [slots, 1, vocabulary]."""
        memory = self.memory_in_use()
        starts = [memory.pages.lengths[slot] for slot in slots]
        store = SlotStore(memory, slots, starts, 1)
        step = Step(
            token_ids_BT=torch.tensor(tokens, dtype=torch.int64)[:, None],
            positions_BT=torch.tensor(starts, dtype=torch.int64)[:, None],
            total=total,
            further=further,
        )
        return self._model().run(step, store, record)

    def free(self, slot: int) -> None:
        """Give the slot and its pages back."""
        self.memory_in_use().free(slot)
        if self._reuse is not None:
            self._reuse.ended(slot)
        del self._requests[slot]

    # ---- several cards

    def distribute(self, layout: Layout) -> None:
        """Take this process's place; every rank of the world must call this, then load."""
        self.place = distributed_place(layout, self.setup.device)
        self.model = self.memory = None

    def simulate(self, layout: Layout, inputs: Inputs, record: Recorder) -> Tensor:
        """Run every rank of a layout as a thread of this process; the first rank of each stage records."""
        if layout not in self._simulated:
            fleet = Fleet(layout)
            places = [fleet.place(rank) for rank in range(layout.world_size)]
            models = [self._model_of(self._loaded(p), p) for p in places]
            self._simulated[layout] = (fleet, models)
        fleet, models = self._simulated[layout]
        try:
            return fleet.run(lambda rank: self.prefill(models[rank], inputs, _recorder(models[rank].place, record)))[0]
        except PortError:
            del self._simulated[layout]  # its barriers are broken
            raise

    # ---- facts

    def cache_facts(self) -> Facts:
        """Return the accounting of the paged cache."""
        return self.memory_in_use().facts()

    def operators(self) -> Mapping[str, str | Operator]:
        """Return the level of every operator, and under the suite's names those that can be called alone."""
        return operator_table(self.use)

    # ---- service

    def serve(self) -> str:
        """Start the server on loopback if it is not up, and return its base URL."""
        if self._server is None:
            from accel_impl.server import Server

            self._server = Server(self)
        url: str = self._server.start()
        return url


def step_of(inputs: Inputs, start: int, stop: int, pictures: Pictures | None = None, *, further: bool = True) -> Step:
    """Return the step that processes tokens [start, stop) of a request."""
    total = inputs.token_ids.shape[1]
    positions = inputs.position_ids if inputs.position_ids is not None else torch.arange(total)[None]
    return Step(
        token_ids_BT=inputs.token_ids[:, start:stop],
        positions_BT=positions[:, start:stop],
        total=total,
        pictures=pictures,
        further=further,
    )


def _recorder(place: Place, record: Recorder) -> Recorder:
    return silent if record is silent else SharedRecorder(record, place.inner)
