"""The decoder of one rank: embedding, mixes across layers, layers, logits, one more token. Knows what follows what.

Every unit's output goes through `record`, and what comes back is what the next unit gets. Must not know files, threads,
or how weights and keys are stored.

Legend: B requests, T tokens of this call, F features, N streams, M rows of pictures, V words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_impl import ops
from accel_impl.experts import experts
from accel_impl.held import HIDDEN, Held
from accel_impl.prepare import placeholders
from accel_impl.recurrent import recurrent_attention
from accel_impl.sparse import Span, span_of, sparse_attention
from accel_impl.store import SlotStore
from accel_impl.vision import Tower
from harness.adapter import Inputs, Recorder, silent
from harness.errors import PortError

LOGITS = "batch token vocab"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """What the tower makes of a request's pictures. `rows_MF` at the placeholders, `deepstack` [M, F] for each outlet.

    `places_M` are the placeholders' places in the request, on the host.
    """

    rows_MF: Tensor
    deepstack: tuple[Tensor, ...]
    places_M: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one call computes: tokens of requests side by side, all of the same count.

    `token_ids_BT` and `positions_BT` lie on the host. `total` is what scores are padded to. `pictures` belong to the
    only request of the call; `further` says whether the layer for one more token runs, too.
    """

    token_ids_BT: Tensor
    positions_BT: Tensor
    total: int
    pictures: Pictures | None = None
    further: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Logits [B, T, V] float32 of what follows each token, and of what follows that (last stage only)."""

    logits: Tensor
    further: Tensor | None = None


class Model:
    """One rank's layers. `features` of pictures are given by the caller, who may hold them over several calls."""

    def __init__(self, held: Held) -> None:
        self.held, self.config, self.place, self.weights = held, held.config, held.place, held.weights
        self.tower = Tower(held) if held.config.vision and held.place.first else None
        for kind in ("latent_sparse_prefill", "latent_sparse_decode", "recurrent_prefill", "recurrent_decode"):
            held.use.map_attention(kind)

    def features(self, inputs: Inputs, record: Recorder) -> Pictures | None:
        """Run the tower where this rank holds it, hand what it gives to later stages; None without pictures."""
        if "pixel_values" not in inputs.extras:
            return None
        places_M = placeholders(inputs, self.config.image_token_id)
        shape = (1 + len(self.config.deepstack_layers), len(places_M), self.config.hidden_size)
        if self.tower is not None:
            rows, deepstack = self.tower(inputs.extras["pixel_values"], inputs.extras["image_grid"], record)
            given = torch.stack((rows, *deepstack))
        else:
            given = self.place.take_over(shape, self.held.dtype)
        if not self.place.last:
            self.place.send_on(given)
        return Pictures(rows_MF=given[0], deepstack=tuple(given[1:]), places_M=places_M)

    def run(self, step: Step, store: SlotStore, record: Recorder) -> Output:
        """Return what follows the tokens of a step, and leave their keys and states in the store."""
        layers = self.place.layers(self.config.num_hidden_layers)
        arriving = step.pictures if store.lacks_pictures else None
        if arriving is not None:
            store.open_pictures(arriving.places_M)
        span = span_of(self.held, store.places, step.positions_BT, step.total)
        if self.place.first:
            streams = [self._embed(step, store, record)]
        else:
            shape = (self._streams_before(layers.start), *step.token_ids_BT.shape, self.config.hidden_size)
            streams = list(self.place.take_over(shape, self.held.dtype))
        for layer in layers:
            streams = self._layer(layer, streams, step, span, store, record, arriving)
        if not self.place.last:
            self.place.send_on(torch.stack(streams))
        logits, further = self._ends(streams, step, span, store, record) if self.place.last else (None, None)
        shape = (*step.token_ids_BT.shape, self.config.vocab_size)
        return Output(logits=self.place.share_logits(logits, shape), further=further)

    def _streams_before(self, layer: int) -> int:
        """Count the streams that are handed to a layer: those put by, and the one that goes on."""
        return 1 + sum(self.config.ends_a_block(n) for n in range(layer))

    # ---- parts

    def _embed(self, step: Step, store: SlotStore, record: Recorder) -> Tensor:
        h = record("embed", self._embedding(step.token_ids_BT), dims=HIDDEN)
        if step.pictures is None:
            return h
        here, rows_M = self._placeholders(step.pictures, store)
        merged = h.clone()
        merged[0, here] = step.pictures.rows_MF[rows_M].to(h.dtype)
        return record("merged", merged, dims=HIDDEN)

    def _embedding(self, token_ids_BT: Tensor) -> Tensor:
        return F.embedding(token_ids_BT.to(self.held.device), self.held.tensor("model.embed_tokens.weight"))

    def _placeholders(self, pictures: Pictures, store: SlotStore) -> tuple[Tensor, Tensor]:
        """Return the tokens of this call that are placeholders, counted from its first, and their rows."""
        start, device = store.starts[0], self.held.device
        rows_M = ((pictures.places_M >= start) & (pictures.places_M < start + store.count)).nonzero().flatten()
        return (pictures.places_M[rows_M] - start).to(device), rows_M.to(device)

    def _mix(self, streams: list[Tensor], name: str) -> Tensor:
        query_F = self.held.wide(f"{name}.query")
        return ops.mix_streams(self.held.use, torch.stack(streams), query_F, self.config.rms_norm_eps)

    def _layer(
        self, layer: int, streams: list[Tensor], step: Step, span: Span, store: SlotStore, record: Recorder,
        arriving: Pictures | None,
    ) -> list[Tensor]:  # fmt: skip
        """Return the streams after a layer; the last one goes on. `arriving` pictures become keys in this call."""
        held, name, tap = self.held, f"model.layers.{layer}", f"layers.{layer}"
        x = streams[-1]
        if layer:
            x = record(f"{tap}.attn_mix", self._mix(streams, f"{name}.attn_res"), dims=HIDDEN)
        x = record(f"{tap}.input_norm", held.rms_norm(x, f"{name}.input_layernorm"), dims=HIDDEN)
        if self.config.is_recurrent(layer):
            attn = recurrent_attention(held, layer, x, store, record)
        else:
            images = arriving.rows_MF if arriving is not None else None
            attn = sparse_attention(held, layer, f"{tap}.attn", x, span, store, record, images_MF=images)
        attn = record(f"{tap}.attn", attn, dims=HIDDEN)
        put_by = streams if self.config.ends_a_block(layer) else streams[:-1]
        h = record(f"{tap}.mid", attn if self.config.ends_a_block(layer) else streams[-1] + attn, dims=HIDDEN)
        x = record(f"{tap}.mlp_mix", self._mix([*put_by, h], f"{name}.mlp_res"), dims=HIDDEN)
        h = h + self._feed_forward(layer, name, tap, x, record)
        if step.pictures is not None and layer in self.config.deepstack_layers:
            here, rows_M = self._placeholders(step.pictures, store)
            rows = step.pictures.deepstack[self.config.deepstack_layers.index(layer)][rows_M]
            h[0, here] = h[0, here] + rows.to(h.dtype)
        return [*put_by, record(tap, h, dims=HIDDEN)]

    def _feed_forward(self, layer: int, name: str, tap: str, x: Tensor, record: Recorder) -> Tensor:
        x = record(f"{tap}.post_attn_norm", self.held.rms_norm(x, f"{name}.post_attention_layernorm"), dims=HIDDEN)
        if self.config.is_dense(layer):
            return record(f"{tap}.mlp", self.held.gated(x, f"{name}.mlp"), dims=HIDDEN)
        return record(f"{tap}.moe", experts(self.held, layer, f"{tap}.moe", x, record), dims=HIDDEN)

    # ---- the end

    def _ends(
        self, streams: list[Tensor], step: Step, span: Span, store: SlotStore, record: Recorder
    ) -> tuple[Tensor, Tensor | None]:
        x = record("final_mix", self._mix(streams, "model.final_res"), dims=HIDDEN)
        norm = record("norm", self.held.rms_norm(x, "model.norm"), dims=HIDDEN)
        logits = record("logits", self._logits(norm), dims=LOGITS, kind="logits")
        earlier = torch.cat((store.norm()[:, None], norm[:, :-1]), dim=1)
        store.put_norm(norm[:, -1])
        if self.config.further is None or not step.further:
            return logits, None
        return logits, self._further(self.config.further, earlier, step, span, store, record)[0]

    def draft(self, step: Step, earlier_BTF: Tensor, store: SlotStore) -> tuple[Tensor, Tensor]:
        """Return logits of what follows tokens whose `norm` before may be a guess, and what stands for their own."""
        if self.config.further is None:
            raise PortError("expected a layer for one more token to draft with, found none")
        span = span_of(self.held, store.places, step.positions_BT, step.total)
        return self._further(self.config.further, earlier_BTF, step, span, store, silent)

    def _logits(self, x: Tensor) -> Tensor:
        cap = self.config.logit_softcap
        part = self.held.linear(x, "lm_head").float()
        return cap * torch.tanh(self.place.gather(part, self.config.vocab_size, 2) / cap)

    def _further(
        self, layer: int, earlier: Tensor, step: Step, span: Span, store: SlotStore, record: Recorder
    ) -> tuple[Tensor, Tensor]:
        """Return logits of what follows each token, from `norm` of the one before and the token; and the own norm."""
        held, name = self.held, f"model.layers.{layer}"
        token = held.rms_norm(self._embedding(step.token_ids_BT), f"{name}.enorm")
        x = torch.cat((token, held.rms_norm(earlier, f"{name}.hnorm")), dim=-1)
        x = record("mtp.in", held.linear(x, f"{name}.eh_proj"), dims=HIDDEN)
        normed = record("mtp.input_norm", held.rms_norm(x, f"{name}.input_layernorm"), dims=HIDDEN)
        attn = sparse_attention(held, layer, "mtp.attn", normed, span, store, record, pictures=False)
        x = record("mtp.mid", x + record("mtp.attn", attn, dims=HIDDEN), dims=HIDDEN)
        x = record("mtp", x + self._feed_forward(layer, name, "mtp", x, record), dims=HIDDEN)
        x = record("mtp.norm", held.rms_norm(x, f"{name}.shared_head.norm"), dims=HIDDEN)
        return record("mtp.logits", self._logits(x), dims=LOGITS, kind="logits"), x
