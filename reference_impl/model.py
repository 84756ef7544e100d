"""The decoder, as plainly as it can be written. Knows weights, a request and taps; must not know files, text or slots.

    B batch (1)  T tokens of this call  L tokens of the whole request  N rows of pictures  D features  V words

Every `record(...)` returns what the model must go on with, so that a replay isolates each part.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from harness.adapter import Recorder
from harness.errors import PortError
from reference_impl.config import Config
from reference_impl.experts import experts
from reference_impl.layers import gated, linear, mix, rms_norm, wide
from reference_impl.recurrent import recurrent_attention
from reference_impl.request import Call, Pictures
from reference_impl.sparse import sparse_attention
from reference_impl.vision import tower

HIDDEN, WORDS = "batch token feature", "batch token vocab"


class Model:
    """The seed model. `weights` are decoded parameters by checkpoint name, in the precision to run in."""

    def __init__(self, config: Config, weights: Mapping[str, Tensor]) -> None:
        self.config, self.weights = config, weights
        self._parts: dict[str, dict[str, Tensor]] = {}

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Return the weights below a prefix, by the rest of their names."""
        if prefix not in self._parts:
            below = {k: v for k, v in self.weights.items() if k.startswith(f"{prefix}.")}
            self._parts[prefix] = {k.removeprefix(f"{prefix}."): v for k, v in below.items()}
        return self._parts[prefix]

    def forward(self, token_ids_BT: Tensor, call: Call) -> Tensor:
        """Process tokens [start, start + T) of a request after those that it has; return their logits [B, T, V]."""
        c, record, pictures = self.config, call.record, call.cache.pictures
        embedded_BTD = F.embedding(token_ids_BT, self.weights["model.embed_tokens.weight"])
        h_BTD = embedded_BTD = record("embed", embedded_BTD, dims=HIDDEN)
        if pictures is not None:
            h_BTD = record("merged", placed(h_BTD, pictures, pictures.rows_ND, call), dims=HIDDEN)
        earlier: list[Tensor] = []
        for n in range(c.num_hidden_layers):
            h_BTD = self.layer(n, h_BTD, earlier, call)
        x_BTD = mix(self.weights["model.final_res.query"], [*earlier, h_BTD], c.rms_norm_eps)
        x_BTD = record("final_mix", x_BTD, dims=HIDDEN)
        x_BTD = record("norm", rms_norm(x_BTD, self.weights["model.norm.weight"], c.rms_norm_eps), dims=HIDDEN)
        logits_BTV = record("logits", self.logits(x_BTD), dims=WORDS)
        if c.num_nextn_predict_layers:
            self.further_token(embedded_BTD, x_BTD, call)
        call.cache.length_tokens += token_ids_BT.shape[1]
        return logits_BTV

    def layer(self, n: int, h_BTD: Tensor, earlier: list[Tensor], call: Call) -> Tensor:
        """Apply one decoder layer to the stream of its block; `earlier` holds the streams before, and is added to."""
        c, at, w, record = self.config, f"layers.{n}", self.part(f"model.layers.{n}"), call.record
        x_BTD = h_BTD
        if n:
            x_BTD = mix(w["attn_res.query"], [*earlier, h_BTD], c.rms_norm_eps)
            x_BTD = record(f"{at}.attn_mix", x_BTD, dims=HIDDEN)
        x_BTD = rms_norm(x_BTD, w["input_layernorm.weight"], c.rms_norm_eps)
        x_BTD = record(f"{at}.input_norm", x_BTD, dims=HIDDEN)
        attended_BTD = self.attention(n, f"{at}.attn", x_BTD, call)
        if n % c.residual_block_layers == 0:
            earlier.append(h_BTD)
            h_BTD = record(f"{at}.mid", attended_BTD, dims=HIDDEN)
        else:
            h_BTD = record(f"{at}.mid", h_BTD + attended_BTD, dims=HIDDEN)
        x_BTD = mix(w["mlp_res.query"], [*earlier, h_BTD], c.rms_norm_eps)
        x_BTD = record(f"{at}.mlp_mix", x_BTD, dims=HIDDEN)
        h_BTD = h_BTD + self.feed_forward(n, at, x_BTD, record)
        pictures = call.cache.pictures
        if pictures is not None and n in c.deepstack_layers:
            rows_ND = pictures.deepstack[c.deepstack_layers.index(n)]
            h_BTD = h_BTD + placed(torch.zeros_like(h_BTD), pictures, rows_ND, call)
        return record(at, h_BTD, dims=HIDDEN)

    def attention(self, n: int, at: str, x_BTD: Tensor, call: Call) -> Tensor:
        """Apply the attention of a layer to normed tokens. Only layers of the model itself have pictures as keys."""
        if not self.config.is_sparse(n):
            return recurrent_attention(self.config, self.part(f"model.layers.{n}.linear_attn"), at, x_BTD, call)
        pictures = call.cache.pictures if n < self.config.num_hidden_layers else None
        w = self.part(f"model.layers.{n}.self_attn")
        return sparse_attention(self.config, w, at, n, x_BTD, call, pictures)

    def feed_forward(self, n: int, at: str, x_BTD: Tensor, record: Recorder) -> Tensor:
        """Norm, and apply the dense block or the experts of a layer."""
        norm = self.weights[f"model.layers.{n}.post_attention_layernorm.weight"]
        x_BTD = record(f"{at}.post_attn_norm", rms_norm(x_BTD, norm, self.config.rms_norm_eps), dims=HIDDEN)
        mlp = f"model.layers.{n}.mlp"
        if self.config.is_dense(n):
            return record(f"{at}.mlp", gated(self.part(mlp), x_BTD), dims=HIDDEN)
        return experts(self.config, lambda name: self.part(f"{mlp}.{name}".rstrip(".")), f"{at}.moe", x_BTD, record)

    def further_token(self, embedded_BTD: Tensor, normed_BTD: Tensor, call: Call) -> Tensor:
        """Predict what follows each token from the token itself and the model's last norm of the token before.

        Returns logits [B, T, V]. Source: arXiv 2412.19437, section 2.2 (one module, one layer).
        """
        c, record, n = self.config, call.record, self.config.num_hidden_layers
        w = self.part(f"model.layers.{n}")
        before_BTD = call.cache.after_last("mtp.norm", normed_BTD, 1)[:, :-1]
        both = [
            rms_norm(embedded_BTD, w["enorm.weight"], c.rms_norm_eps),
            rms_norm(before_BTD, w["hnorm.weight"], c.rms_norm_eps),
        ]
        h_BTD = record("mtp.in", linear(torch.cat(both, dim=-1), w["eh_proj.weight"]), dims=HIDDEN)
        x_BTD = rms_norm(h_BTD, w["input_layernorm.weight"], c.rms_norm_eps)
        x_BTD = record("mtp.input_norm", x_BTD, dims=HIDDEN)
        h_BTD = record("mtp.mid", h_BTD + self.attention(n, "mtp.attn", x_BTD, call), dims=HIDDEN)
        h_BTD = record("mtp", h_BTD + self.feed_forward(n, "mtp", h_BTD, record), dims=HIDDEN)
        x_BTD = record("mtp.norm", rms_norm(h_BTD, w["shared_head.norm.weight"], c.rms_norm_eps), dims=HIDDEN)
        return record("mtp.logits", self.logits(x_BTD), dims=WORDS)

    def logits(self, normed_BTD: Tensor) -> Tensor:
        """Return capped logits, in float32 (float64 in a float64 model)."""
        cap = self.config.logit_softcap
        return cap * torch.tanh(wide(linear(normed_BTD, self.weights["lm_head.weight"])) / cap)

    def look(self, pixel_values: Tensor, grid: Tensor, token_ids_BL: Tensor, record: Recorder) -> Pictures:
        """Run the tower on all pictures of a request. Raises PortError where there are fewer image tokens than rows."""
        rows_ND, deepstack = tower(self.part("visual"), self.config.vision, pixel_values, grid, record)
        places = (token_ids_BL[0] == self.config.image_token_id).nonzero()[:, 0]
        if len(places) < len(rows_ND):
            raise PortError(f"expected {len(rows_ND)} image tokens, one for each row, found {len(places)}")
        return Pictures(rows_ND=rows_ND, deepstack=deepstack, places_N=places[: len(rows_ND)])


def placed(h_BTD: Tensor, pictures: Pictures, rows_ND: Tensor, call: Call) -> Tensor:
    """Put rows of pictures in the places of their tokens, as far as this call has them."""
    inside_N, places = pictures.here(call.start, call.start + h_BTD.shape[1])
    return h_BTD.index_copy(1, places, rows_ND[inside_N].expand(len(h_BTD), -1, -1))
