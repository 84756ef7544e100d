"""The contract of every operator: name, arguments, shapes. Knows no implementation; the backend's table has them.

Each function below is an entry point, called as `ops.NAME(use, ...)` where `use` is the backend. It looks its
implementation up in the table at every call, so wrapping `accel_impl.ops.NAME` reaches every level. The dotted name is
the one that the table, reports and `fallback=` use.

Shapes: B batch, T queries, S keys, H heads, D features of a head, F features, L latent features, R rotary features,
K chosen, E experts, P patches, N rows of a pool, Z slots, C channels, W inputs that a convolution looks back at.
`dtype` below is the dtype of the first argument; "wide" is float32, rounded once to dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from accel_impl.formats import Resident


class Use(Protocol):
    """What an operator is looked up in."""

    def implementation(self, name: str) -> Callable[..., Tensor]:
        """Return the implementation in use."""


NAMES: dict[str, str] = {}
"""Functions by their dotted names."""


def _operator(name: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    def entry_of(contract: Callable[..., Tensor]) -> Callable[..., Tensor]:
        NAMES[name] = contract.__name__

        @functools.wraps(contract)
        def entry(use: Use, *args: Any, **kwargs: Any) -> Tensor:
            return use.implementation(name)(*args, **kwargs)

        return entry

    return entry_of


# ---- norms, activations, products


@_operator("norm.rms")
def rms_norm(x_F: Tensor, weight_F: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight, wide."""


@_operator("norm.layer")
def layer_norm(x_F: Tensor, weight_F: Tensor, bias_F: Tensor, eps: float) -> Tensor:
    """Return the layer norm over the last axis, wide."""


@_operator("norm.gated")
def gated_norm(x_F: Tensor, weight_F: Tensor, gate_F: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight * sigmoid(gate), wide, in the gate's dtype."""


@_operator("norm.unit")
def unit_norm(x_F: Tensor, eps: float, scale: float) -> Tensor:
    """Return x / sqrt(sum x^2 + eps) * scale, wide."""


@_operator("rope.turn")
def rope(x_BTHR: Tensor, cos_BTR: Tensor, sin_BTR: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate pairs (2i, 2i + 1) if interleaved, else (i, i + R / 2), wide. cos, sin [B, T, R / 2] float32."""


@_operator("linear")
def linear(x_F: Tensor, weight: Resident, bias: Tensor | None = None, *, out: torch.dtype | None = None) -> Tensor:
    """Return x W^T + bias in dtype, or unrounded where `out` is float32 (a partial sum that will be reduced)."""


@_operator("act.swiglu")
def swiglu(gate_F: Tensor, up_F: Tensor) -> Tensor:
    """Return silu(gate) * up."""


@_operator("act.swiglu_clamped")
def swiglu_clamped(gate_F: Tensor, up_F: Tensor) -> Tensor:
    """Return g sigmoid(1.702 g) (clamp(up, -7, 7) + 1) with g = min(gate, 7)."""


@_operator("act.gelu")
def gelu(x_F: Tensor, *, tanh: bool) -> Tensor:
    """Return the tanh or the erf form of GELU."""


@_operator("residual.mix")
def mix_streams(streams_NBTF: Tensor, query_F: Tensor, eps: float) -> Tensor:
    """Return sum_i p_i rms(s_i), p = softmax_i(query . rms(s_i) / sqrt(F)), of N streams [N, B, T, F]."""


# ---- recurrent attention


@_operator("conv.causal")
def causal_conv(x_BTC: Tensor, past_BWC: Tensor, weight_CW: Tensor) -> Tensor:
    """Return silu of the depthwise convolution of each channel with its W last inputs and itself, wide [B, T, C].

    weight_CW [C, W + 1]: the last tap meets the token itself.
    """


@_operator("recurrent.gate")
def decay_rate(x_BTHK: Tensor, a_log_H: Tensor, bias_HK: Tensor) -> Tensor:
    """Return -exp(a_log) softplus(x + bias) in float32."""


@_operator("recurrent.prefill")
def scan_chunks(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, decay_BTHK: Tensor, beta_BTH: Tensor, memory_ZHKV: Tensor,
    index_B: Tensor,
) -> Tensor:  # fmt: skip
    """Return S^T q of the gated delta rule for many tokens in float32 [B, T, H, V]; state changes in place.

    S <- diag(exp(decay)) S; S <- S + beta k (v - S^T k)^T. memory float32.
    """


@_operator("recurrent.decode")
def scan_step(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, decay_BTHK: Tensor, beta_BTH: Tensor, memory_ZHKV: Tensor,
    index_B: Tensor,
) -> Tensor:  # fmt: skip
    """Return the same for one token of each slot (T = 1)."""


# ---- sparse attention


@_operator("index.scores")
def indexer_scores(q_BTHD: Tensor, k_BSD: Tensor, weights_BTH: Tensor, places_BT: Tensor, window: int) -> Tensor:
    """Return sum_h w[t, h] relu(q[t, h] . k[s]) H^-0.5 D^-0.5 [B, T, S] float32, -inf where s > place - window."""


@_operator("index.select")
def choose_keys(scores_BTS: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` highest scores, ties to the lower id, ascending, -1 where there are fewer."""


@_operator("attn.sparse_prefill")
def attend_prefill(
    q_BTHD: Tensor, latent_NL: Tensor, rope_NR: Tensor, rows_BTK: Tensor, kv_b: Resident, sinks_H: Tensor, scale: float
) -> Tensor:
    """Attend from many queries to the rows of a pool that each has chosen (-1 is none). Returns [B, T, H, V].

    kv_b [H * (D - R + V), L] expands a latent to a head's key (without its rotary part) and value. The softmax has one
    more score, sinks, whose value is 0.
    """


@_operator("attn.sparse_decode")
def attend_decode(
    q_BTHD: Tensor, latent_NL: Tensor, rope_NR: Tensor, rows_BTK: Tensor, kv_b: Resident, sinks_H: Tensor, scale: float
) -> Tensor:
    """Do the same for few queries."""


@_operator("attn.patches")
def attend_patches(q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor, lengths: Sequence[int]) -> Tensor:
    """Attend in full inside each picture (`lengths` patches each), never across. Returns [P, H, D]."""


# ---- experts


@_operator("moe.groups")
def group_worth(scores_BTE: Tensor, groups: int) -> Tensor:
    """Return for groups of neighbours the sum of the two best scores of each [B, T, groups]."""


@_operator("moe.select")
def choose_experts(scores_BTE: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` highest scores (of experts or groups), ties to the lower, ascending [B, T, K]."""


@_operator("moe.experts")
def grouped_experts(
    x_BTF: Tensor,
    ids_BTK: Tensor,
    weights_BTK: Tensor,
    experts: Mapping[int, Sequence[Resident]],
    act: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Return the weighted sum of the chosen experts that are held here, in float32 (a partial sum) [B, T, F].

    experts: id -> (gate, up, down).
    """


# ---- loading


@_operator("mxfp4.decode")
def decode_mxfp4(packed: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Write an MXFP4 matrix into `out` [O, I] float32: packed [O, I / 2], low nibble first; scale [O, I / 32] E8M0."""
