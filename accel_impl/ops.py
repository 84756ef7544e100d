"""The contract of every operator: name, arguments, shapes. Knows no implementation; the backend's table has them.

Each function below is an entry point, called as `ops.NAME(use, ...)` where `use` is the backend. It looks its
implementation up in the table at every call, so wrapping `accel_impl.ops.NAME` reaches every variant.

Shapes: B batch, T queries, S keys, H heads, D features of a head, F features, L latent features, R rotary features,
K chosen, E experts, P patches. `dtype` below is the dtype of the first argument.
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


NAMES: list[str] = []


def _operator(contract: Callable[..., Tensor]) -> Callable[..., Tensor]:
    NAMES.append(contract.__name__)

    @functools.wraps(contract)
    def entry(use: Use, *args: Any, **kwargs: Any) -> Tensor:
        return use.implementation(contract.__name__)(*args, **kwargs)

    return entry


@_operator
def rms_norm(x_F: Tensor, weight_F: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight, in float32, rounded once to dtype."""


@_operator
def layer_norm(x_F: Tensor, weight_F: Tensor, bias_F: Tensor, eps: float) -> Tensor:
    """Return the layer norm over the last axis, in float32, rounded once to dtype."""


@_operator
def rope(x_BTHR: Tensor, positions_BT: Tensor, *, theta: float, interleaved: bool) -> Tensor:
    """Rotate pairs (2i, 2i + 1) if interleaved, else (i, i + R / 2), by position * theta^(-2i / R); in float32."""


@_operator
def linear(x_F: Tensor, weight: Resident, bias: Tensor | None = None, *, out: torch.dtype | None = None) -> Tensor:
    """Return x W^T + bias in dtype, or unrounded where `out` is float32 (a partial sum that will be reduced)."""


@_operator
def swiglu(gate_F: Tensor, up_F: Tensor) -> Tensor:
    """Return silu(gate) * up."""


@_operator
def swiglu_clamped(gate_F: Tensor, up_F: Tensor) -> Tensor:
    """Return g sigmoid(1.702 g) (clamp(up, -7, 7) + 1) with g = min(gate, 7)."""


@_operator
def gelu(x_F: Tensor, *, tanh: bool) -> Tensor:
    """Return the tanh or the erf form of GELU."""


@_operator
def indexer_scores(q_BTHD: Tensor, k_BSD: Tensor, weights_BTH: Tensor, positions_BT: Tensor) -> Tensor:
    """Return sum_h w[t, h] relu(q[t, h] . k[s]) H^-0.5 D^-0.5 as [B, T, S] float32, -inf where s > position of t."""


@_operator
def choose_keys(scores_BTS: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` highest scores, ties to the lower id, ascending, -1 where there are fewer."""


@_operator
def attend_dense(
    q_BTHD: Tensor,
    latent_BSL: Tensor,
    rope_BSR: Tensor,
    kv_b: Resident,
    sinks_H: Tensor,
    chosen_BTK: Tensor,
    scale: float,
) -> Tensor:
    """Attend from many queries to the keys each has chosen, all keys at hand. Returns [B, T, H, V].

    kv_b [H * (nope + V), L] expands a latent to a head's key and value. D = nope + R.
    """


@_operator
def attend_sparse(
    q_BTHD: Tensor,
    latent_BTKL: Tensor,
    rope_BTKR: Tensor,
    kv_b: Resident,
    sinks_H: Tensor,
    valid_BTK: Tensor,
    scale: float,
) -> Tensor:
    """Attend to the chosen keys only, already gathered. Returns [B, T, H, V]."""


@_operator
def choose_experts(scores_BTE: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` highest scores, ties to the lower id, in ascending order [B, T, K]."""


@_operator
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


@_operator
def attend_patches(q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor, lengths: Sequence[int]) -> Tensor:
    """Attend in full inside each picture (`lengths` patches each), never across. Returns [P, H, D]."""
