"""The decoder of one rank: prefill, chunk and decode over a store of keys. Knows names of weights and operators.

Every unit's output goes through `record`, and what comes back is what the next unit gets. Must not know files, threads
or how weights are stored.

Legend: B batch (1), T tokens of this call, S keys so far, F features, H heads of this rank, D head width, K chosen,
E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_impl import ops
from accel_impl.backend import BackendAdapter
from accel_impl.config import Config
from accel_impl.formats import Resident
from accel_impl.parallel import Place
from accel_impl.vision import Tower
from harness.adapter import Inputs, Recorder

HIDDEN, HEADS, CHOICE = "batch token feature", "batch token head feature", "batch token choice"
INDEXER_EPS = 1e-6
"""Of the layer norm of the indexer's keys; the configuration does not name it."""


class Store(Protocol):
    """Where keys go and come from: `accel_impl.cache.NoCache` or `SlotStore`. `sparse` asks for the decode path."""

    sparse: bool

    def put(self, layer: int, values: Mapping[str, Tensor]) -> None:
        """Keep the values of this call's tokens."""

    def all(self, layer: int, field: str) -> Tensor:
        """Return the values of all tokens so far [1, S, width]."""

    def chosen(self, layer: int, field: str, chosen_BTK: Tensor) -> Tensor:
        """Return the values of chosen tokens only [1, T, K, width]; asked of a sparse store only."""


class Model:
    """One rank's layers. `features` of pictures are given by the caller, who may hold them over several calls."""

    def __init__(
        self, config: Config, weights: Mapping[str, Resident], place: Place, use: BackendAdapter, dtype: torch.dtype
    ) -> None:
        self.config, self.weights, self.place, self.use, self.dtype = config, weights, place, use, dtype
        self.tower = Tower(config.vision, weights, place, use, dtype) if config.vision and place.first else None
        for kind in ("latent_sparse_prefill", "latent_sparse_decode"):
            use.map_attention(kind)

    def _tensor(self, name: str) -> Tensor:
        return self.weights[name].decode(self.dtype)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return ops.linear(self.use, x, self.weights[f"{name}.weight"])

    def _exact(self, x: Tensor, name: str) -> Tensor:
        return ops.linear(self.use, x.float(), self.weights[f"{name}.weight"])

    def _row_linear(self, x: Tensor, name: str) -> Tensor:
        """Multiply by a matrix cut along its input and sum over ranks, rounding once."""
        if self.place.tp.size == 1:
            return self._linear(x, name)
        partial = ops.linear(self.use, x, self.weights[f"{name}.weight"], out=torch.float32)
        return self.place.reduce(partial).to(self.dtype)

    def _rms_norm(self, x: Tensor, name: str) -> Tensor:
        return ops.rms_norm(self.use, x, self._tensor(f"{name}.weight"), self.config.rms_norm_eps)

    def features(self, inputs: Inputs, record: Recorder) -> Tensor | None:
        """Run the tower, if this rank holds it and the request has pictures."""
        if self.tower is None or "pixel_values" not in inputs.extras:
            return None
        return self.tower(inputs.extras["pixel_values"], inputs.extras["image_grid"], record)

    def run(
        self, inputs: Inputs, start: int, stop: int, store: Store, features: Tensor | None, record: Recorder
    ) -> Tensor:
        """Return the logits [1, T, vocabulary] float32 of tokens [start, stop)."""
        total = inputs.token_ids.shape[1]
        positions = inputs.position_ids if inputs.position_ids is not None else torch.arange(total)[None]
        positions_BT = positions[:, start:stop]
        shape = (1, stop - start, self.config.hidden_size)
        if self.place.first:
            h = self._embed(inputs, start, stop, features, record)
        else:
            h = self.place.take_over(shape, self.dtype)
        for layer in self.place.layers(self.config.num_hidden_layers):
            h = record(f"layers.{layer}", self._layer(layer, h, positions_BT, total, store, record), dims=HIDDEN)
        logits = None
        if self.place.last:
            logits = self._logits(record("norm", self._rms_norm(h, "model.norm"), dims=HIDDEN), record)
        else:
            self.place.send_on(h)
        return self.place.share_logits(logits, (1, stop - start, self.config.vocab_size))

    def _embed(self, inputs: Inputs, start: int, stop: int, features: Tensor | None, record: Recorder) -> Tensor:
        ids = inputs.token_ids[:, start:stop]
        h = record("embed", F.embedding(ids, self._tensor("model.embed_tokens.weight")), dims=HIDDEN)
        if features is None:
            return h
        is_image = inputs.token_ids[0] == self.config.image_token_id
        row = is_image.long().cumsum(0) - 1
        here = is_image[start:stop]
        merged = h.clone()
        merged[0, here] = features[row[start:stop][here]].to(h.dtype)
        return record("merged", merged, dims=HIDDEN)

    def _layer(self, layer: int, h: Tensor, positions_BT: Tensor, total: int, store: Store, record: Recorder) -> Tensor:
        name, tap = f"model.layers.{layer}", f"layers.{layer}"
        x = record(f"{tap}.input_norm", self._rms_norm(h, f"{name}.input_layernorm"), dims=HIDDEN)
        mixed = self._attention(layer, x, positions_BT, total, store, record)
        h = record(f"{tap}.mid", h + record(f"{tap}.attn", mixed, dims=HIDDEN), dims=HIDDEN)
        x = record(f"{tap}.post_attn_norm", self._rms_norm(h, f"{name}.post_attention_layernorm"), dims=HIDDEN)
        if self.config.is_dense(layer):
            return h + record(f"{tap}.mlp", self._gated(x, f"{name}.mlp"), dims=HIDDEN)
        return h + record(f"{tap}.moe", self._moe(x, f"{name}.mlp", f"{tap}.moe", record), dims=HIDDEN)

    def _attention(
        self, layer: int, x: Tensor, positions_BT: Tensor, total: int, store: Store, record: Recorder
    ) -> Tensor:
        config, name, tap = self.config, f"model.layers.{layer}.self_attn", f"layers.{layer}.attn"
        rotate = {"theta": config.rope_theta, "interleaved": True}
        q_a = record(f"{tap}.q_a", self._linear(x, f"{name}.q_a_proj"), dims=HIDDEN)
        q_a = record(f"{tap}.q_norm", self._rms_norm(q_a, f"{name}.q_a_layernorm"), dims=HIDDEN)
        q = self._linear(q_a, f"{name}.q_b_proj").unflatten(-1, (-1, config.head_dim))
        q_nope, q_rope = q.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
        q = torch.cat((q_nope, ops.rope(self.use, q_rope, positions_BT, **rotate)), dim=-1)
        heads = config.num_attention_heads
        q_BTHD = self.place.record_cut(record, f"{tap}.q", q, heads, 2, HEADS)
        kv = self._linear(x, f"{name}.kv_a_proj_with_mqa")
        latent, k_rope = kv.split((config.kv_lora_rank, config.qk_rope_head_dim), dim=-1)
        latent = record(f"{tap}.kv_latent", self._rms_norm(latent, f"{name}.kv_a_layernorm"), dims=HIDDEN)
        k_rope = ops.rope(self.use, k_rope[:, :, None], positions_BT, **rotate)[:, :, 0]
        k_rope = record(f"{tap}.k_rope", k_rope, dims=HIDDEN)
        chosen_BTK = self._choose(layer, x, q_a, positions_BT, total, {"latent": latent, "rope": k_rope}, store, record)
        core = self._core(layer, q_BTHD, chosen_BTK, store)
        core = self.place.record_cut(record, f"{tap}.core", core, heads, 2, HEADS)
        return self._row_linear(core.flatten(2), f"{name}.o_proj")

    def _choose(
        self,
        layer: int,
        x: Tensor,
        q_a: Tensor,
        positions_BT: Tensor,
        total: int,
        keys: Mapping[str, Tensor],
        store: Store,
        record: Recorder,
    ) -> Tensor:
        """Put this call's keys into the store and return the keys that each query attends to [1, T, K], -1 unused."""
        config, name, tap = self.config, f"model.layers.{layer}.self_attn.indexer", f"layers.{layer}.attn.indexer"
        q = self._linear(q_a, f"{name}.wq_b").unflatten(-1, (-1, config.index_head_dim))
        q = record(f"{tap}.q", self._index_rope(q, positions_BT), dims=HEADS)
        k = self._linear(x, f"{name}.wk")
        bias = self._tensor(f"{name}.k_norm.bias")
        k = ops.layer_norm(self.use, k, self._tensor(f"{name}.k_norm.weight"), bias, INDEXER_EPS)
        k = record(f"{tap}.k", self._index_rope(k[:, :, None], positions_BT)[:, :, 0], dims=HIDDEN)
        weights = record(f"{tap}.weights", self._exact(x, f"{name}.weights_proj"), dims=HIDDEN)
        store.put(layer, {**keys, "index": k})
        scores = ops.indexer_scores(self.use, q, store.all(layer, "index"), weights, positions_BT)
        scores = F.pad(scores, (0, max(0, total - scores.shape[-1])), value=float("-inf"))
        scores = record(f"{tap}.topk.scores", scores, dims="batch token key", kind="scores")
        return record(
            f"{tap}.topk", ops.choose_keys(self.use, scores, config.index_topk), dims=CHOICE, kind="selection"
        )

    def _index_rope(self, x_BTHD: Tensor, positions_BT: Tensor) -> Tensor:
        turned, rest = x_BTHD.tensor_split([self.config.index_rope_dim], dim=-1)
        turned = ops.rope(self.use, turned, positions_BT, theta=self.config.rope_theta, interleaved=False)
        return torch.cat((turned, rest), dim=-1)

    def _core(self, layer: int, q_BTHD: Tensor, chosen_BTK: Tensor, store: Store) -> Tensor:
        """Attend: the decode path gathers the chosen keys only, every other path has all keys at hand."""
        name = f"model.layers.{layer}.self_attn"
        kv_b, sinks_H = self.weights[f"{name}.kv_b_proj.weight"], self.weights[f"{name}.sinks"].decode(torch.float32)
        scale = self.config.head_dim**-0.5
        if store.sparse:
            latent, rope = (store.chosen(layer, part, chosen_BTK) for part in ("latent", "rope"))
            return ops.attend_sparse(self.use, q_BTHD, latent, rope, kv_b, sinks_H, chosen_BTK >= 0, scale)
        latent, rope = (store.all(layer, part) for part in ("latent", "rope"))
        return ops.attend_dense(self.use, q_BTHD, latent, rope, kv_b, sinks_H, chosen_BTK, scale)

    def _gated(self, x: Tensor, name: str) -> Tensor:
        inner = ops.swiglu(self.use, self._linear(x, f"{name}.gate_proj"), self._linear(x, f"{name}.up_proj"))
        return self._row_linear(inner, f"{name}.down_proj")

    def _moe(self, x: Tensor, name: str, tap: str, record: Recorder) -> Tensor:
        config = self.config
        router = f"{tap}.router"
        logits = record(f"{router}.logits", self._exact(x, f"{name}.gate"), dims="batch token expert")
        p_BTE = torch.sigmoid(logits)
        biased = p_BTE + self.weights[f"{name}.gate.e_score_correction_bias"].decode(torch.float32)
        biased = record(f"{router}.topk.scores", biased, dims="batch token expert", kind="scores")
        ids = ops.choose_experts(self.use, biased, config.num_experts_per_tok)
        ids = record(f"{router}.topk", ids, dims=CHOICE, kind="routing")
        chosen = p_BTE.gather(-1, ids)
        weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
        weights = record(f"{router}.weights", weights, dims=CHOICE)
        partial = ops.grouped_experts(self.use, x, ids, weights, self._experts(name), self._clamped)
        routed = record(f"{tap}.experts", self.place.reduce_experts(partial).to(self.dtype), dims=HIDDEN)
        shared = record(f"{tap}.shared_expert", self._gated(x, f"{name}.shared_experts"), dims=HIDDEN)
        return routed + shared

    def _experts(self, name: str) -> dict[int, tuple[Resident, Resident, Resident]]:
        held = self.place.experts(self.config.n_routed_experts)
        return {
            expert: tuple(
                self.weights[f"{name}.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")
            )  # type: ignore[misc]
            for expert in held
        }

    def _clamped(self, gate: Tensor, up: Tensor) -> Tensor:
        return ops.swiglu_clamped(self.use, gate, up)

    def _logits(self, x: Tensor, record: Recorder) -> Tensor:
        cap = self.config.logit_softcap
        part = self._linear(x, "lm_head").float()
        whole = self.place.gather(part, self.config.vocab_size, 2)
        return record("logits", cap * torch.tanh(whole / cap), dims="batch token vocab", kind="logits")
