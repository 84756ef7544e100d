"""The reference as a port: day0's protocol around the model. Knows requests, slots and cases; must not know stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.adapter import Inputs, Recorder, Rounding, TokenIds, Weight
from harness.errors import PortError, SpecError, nearest
from harness.types import Case, Facts, Scope, Setup
from reference_impl.config import Config, read_config
from reference_impl.loader import load_weights
from reference_impl.model import Model
from reference_impl.pixels import to_patches
from reference_impl.request import Cache, Call
from reference_impl.tokenizer import TextFrontEnd

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
KEPT_WIDE = (".sinks", ".e_score_correction_bias", ".A_log", ".dt_bias", "_res.query")
"""Parameters that stay float32 below float32."""


class ReferenceAdapter:
    """The seed model in one precision on one device. Raises SpecError for an option or a precision it does not have."""

    name = "reference"
    scope = Scope(
        image=True,
        phases=("prefill", "chunk", "decode"),
        max_length_tokens=8192,
        chat=True,
    )

    def __init__(self, checkpoint: Path, setup: Setup) -> None:
        if setup.dtype not in DTYPES:
            raise SpecError(
                f"expected a dtype of the reference, found {setup.dtype!r}{nearest(setup.dtype, list(DTYPES))}"
            )
        if setup.options:
            raise SpecError(
                f"expected no options beside dtype and device for the reference, found {sorted(setup.options)}"
            )
        self.checkpoint, self.setup = checkpoint, setup
        self._slots: dict[int, Cache] = {}
        self._lossless: dict[str, bool] = {}
        self._model: Model | None = None
        self._text: TextFrontEnd | None = None
        self.rounding: Rounding | None = None

    # --- Adapter ---

    def load(self, checkpoint: Path, setup: Setup) -> Facts:
        """Load the weights in the setup's precision. Facts: `planned_bytes` (of the weights), `unused`, `unfilled`."""
        config, dtype, device = read_config(checkpoint), DTYPES[setup.dtype], torch.device(setup.device)
        held: dict[str, Tensor] = {}
        weights, unused = load_weights(checkpoint, config)
        for name, decoded in weights.items():
            kept_wide = name.endswith(KEPT_WIDE) and dtype == torch.bfloat16
            held[name] = decoded.to(device=device, dtype=torch.float32 if kept_wide else dtype)
            self._lossless[name] = torch.equal(held[name].cpu().double(), decoded.double())
        self.checkpoint, self.setup, self._slots = checkpoint, setup, {}
        self._model = Model(config, held)
        return {"planned_bytes": sum(w.nbytes for w in held.values()), "unused": unused, "unfilled": []}

    def prepare(self, case: Case, record: Recorder) -> Inputs:
        """Turn a case into token ids, positions and patches."""
        config = self._loaded.config
        extras: dict[str, Tensor] = {}
        rows: list[int] = []
        if case.images:
            pixel_values, grid = to_patches(case.images, config.vision)
            rows = (grid.prod(dim=1) // config.vision.spatial_merge_size**2).tolist()
            extras = {"pixel_values": pixel_values, "image_grid": grid}
        ids = torch.tensor([self._token_ids(case, config, rows)], dtype=torch.int64)
        ids = record("inputs.token_ids", ids, dims="batch token")
        positions = record("inputs.position_ids", torch.arange(ids.shape[1])[None], dims="batch token")
        for name, dims in (("pixel_values", "patch feature"), ("image_grid", "image axis")):
            if name in extras:
                extras[name] = record(f"inputs.{name}", extras[name], dims=dims)
        return Inputs(token_ids=ids, position_ids=positions, extras=extras)

    def forward(self, inputs: Inputs, record: Recorder) -> Tensor:
        """Return the logits of a whole prefill."""
        return self._call(self._empty(), inputs, 0, inputs.token_ids.shape[1], inputs.token_ids.shape[1], record)

    def generate(self, inputs: Inputs, max_new_tokens: int, record: Recorder) -> TokenIds:
        """Return greedy token ids; the last may be an end-of-sequence id."""
        cache, start, prompt = self._empty(), 0, inputs.token_ids.shape[1]
        length = min(prompt + max_new_tokens, self._loaded.config.max_position_embeddings)
        ids, new = inputs.token_ids, TokenIds()
        while prompt + len(new) < length and not (new and new[-1] in self.eos_ids()):
            grown = Inputs(token_ids=ids, extras=inputs.extras)
            logits = self._call(cache, grown, start, ids.shape[1], length, record)
            start = ids.shape[1]
            new.append(int(logits[0, -1].argmax()))
            ids = torch.cat([ids, torch.tensor([new[-1:]])], dim=1)
        return new

    def close(self) -> None:
        """Free weights and slots."""
        self._model, self._slots, self._text = None, {}, None

    # --- Roundable ---

    def round_with(self, rounding: Rounding) -> None:
        """Compute from now on with rounded weights, inputs of products and caches."""
        held = dict(self._loaded.weights)
        for name, weight in held.items():
            if weight.dim() == 2:
                held[name] = rounding.weight(name, weight)
        self._model, self.rounding = Model(self._loaded.config, held), rounding

    # --- Phased ---

    def open(self) -> int:
        """Take the lowest free slot."""
        slot = next(i for i in range(len(self._slots) + 1) if i not in self._slots)
        self._slots[slot] = self._empty()
        return slot

    def step(self, slot: int, inputs: Inputs, start: int, stop: int, record: Recorder) -> Tensor:
        """Process tokens [start, stop) after those already in the slot; return their logits."""
        if slot not in self._slots:
            raise PortError(f"expected an open slot, found {slot}; open are {sorted(self._slots)}")
        return self._call(self._slots[slot], inputs, start, stop, inputs.token_ids.shape[1], record)

    def free(self, slot: int) -> None:
        """Give the slot back."""
        self._slots.pop(slot, None)

    # --- Weighted ---

    def weights(self) -> Iterator[Weight]:
        """Yield every parameter, decoded, as memory holds it."""
        for name, tensor in self._loaded.weights.items():
            yield Weight(name=name, tensor=tensor, checkpoint=name, lossless=self._lossless[name])

    # --- Tokenizing ---

    def encode(self, text: str) -> TokenIds:
        """Tokenise a prompt, `<bos>` in front."""
        return self._front_end.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn token ids into text, special tokens left out."""
        return self._front_end.decode(token_ids)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render a conversation with the generation prompt."""
        return self._front_end.render(messages)

    def eos_ids(self) -> frozenset[int]:
        """Return the ids that end a generation."""
        return frozenset(self._loaded.config.eos_token_id)

    # --- inside ---

    def _empty(self) -> Cache:
        """Return a cache without tokens."""
        return Cache(rounded=None if self.rounding is None else self.rounding.writer())

    @property
    def _loaded(self) -> Model:
        if self._model is None:
            raise PortError("expected the reference to be loaded, found no weights; call load first")
        return self._model

    @property
    def _front_end(self) -> TextFrontEnd:
        if self._text is None:
            self._text = TextFrontEnd(self.checkpoint)
        return self._text

    def _call(self, cache: Cache, inputs: Inputs, start: int, stop: int, length: int, record: Recorder) -> Tensor:
        """Run the model on tokens [start, stop) of a request that will have `length` tokens."""
        model, limit = self._loaded, self._loaded.config.max_position_embeddings
        if cache.length_tokens != start or not start < stop <= inputs.token_ids.shape[1]:
            held = cache.length_tokens
            raise PortError(
                f"expected a span that starts at token {held}, found [{start}, {stop}) of {inputs.token_ids.shape[1]}"
            )
        if length > limit:
            raise PortError(f"expected at most {limit} tokens, found {length}")
        device = self.setup.device
        ids = inputs.token_ids.to(device)
        positions = torch.arange(ids.shape[1])[None] if inputs.position_ids is None else inputs.position_ids
        call = Call(
            positions_BT=positions[:, start:stop].to(device),
            start=start,
            length_tokens=length,
            cache=cache,
            record=record,
        )
        with torch.no_grad(), self.rounding.inputs() if self.rounding is not None else nullcontext():
            if start == 0 and "pixel_values" in inputs.extras:
                pixel_values, grid = (inputs.extras[k].to(device) for k in ("pixel_values", "image_grid"))
                cache.pictures = model.look(pixel_values, grid, ids, record)
            return model.forward(ids[:, start:stop], call)

    def _token_ids(self, case: Case, config: Config, rows: Sequence[int]) -> TokenIds:
        """Return a case's ids with `<image>` repeated for the rows of each picture."""
        image = config.image_token_id
        if case.token_ids is not None:
            if len(case.image_at) != len(rows):
                raise PortError(
                    f"case {case.id}: expected a place for each of {len(rows)} images, found {len(case.image_at)}"
                )
            ids = list(case.token_ids)
            for at, count in sorted(zip(case.image_at, rows, strict=True), key=lambda place: place[0], reverse=True):
                ids[at:at] = [image] * count
            return ids
        if case.messages is not None:
            ids = self._front_end.encode_rendered(self.render(case.messages))
        else:
            ids = self.encode(case.prompt or "")
        if ids.count(image) != len(rows):
            raise PortError(
                f"case {case.id}: expected {len(rows)} <image> tokens for its images, found {ids.count(image)}"
            )
        left = iter(rows)
        return [i for token in ids for i in ([image] * next(left) if token == image else [token])]
