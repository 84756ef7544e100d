"""Recurrent attention: gated delta rule with a decay for each channel. Knows names of weights and operators.

Many tokens go in chunks, one token goes in place. What a request keeps is in the store.

Legend: B requests, T tokens, F features, C channels of q, k, v, H heads of this rank, K width of a head, W inputs kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accel_impl import ops
from accel_impl.held import HEADS, Held
from accel_impl.store import SlotStore
from harness.adapter import Recorder

UNIT_EPS = 1e-6
"""Added to the square of the length of queries and keys; the configuration does not name it."""


def recurrent_attention(held: Held, layer: int, x_BTF: Tensor, store: SlotStore, record: Recorder) -> Tensor:
    """Return the layer's attention over everything before, and let the request's state go on."""
    config, use, tap = held.config, held.use, f"layers.{layer}.attn"
    name = f"model.layers.{layer}.linear_attn"
    width, heads = config.linear_head_dim, config.linear_num_heads

    def recorded(part: str, value: Tensor, dims: str = HEADS) -> Tensor:
        return held.place.record_cut(record, f"{tap}.{part}", value, heads, 2, dims)

    q, k, v = (part.unflatten(-1, (-1, width)) for part in _mixed(held, layer, name, x_BTF, store))
    q_BTHK = recorded("q", ops.unit_norm(use, q, UNIT_EPS, width**-0.5))
    k_BTHK = recorded("k", ops.unit_norm(use, k, UNIT_EPS, 1.0))
    v_BTHK = recorded("v", v)
    low = held.linear(held.linear(x_BTF, f"{name}.f_a_proj"), f"{name}.f_b_proj").unflatten(-1, (-1, width))
    bias_HK = held.wide(f"{name}.dt_bias").unflatten(0, (-1, width))
    decay_BTHK = recorded("decay", ops.decay_rate(use, low, held.wide(f"{name}.A_log"), bias_HK))
    beta_BTH = torch.sigmoid(held.linear(x_BTF, f"{name}.b_proj").float())
    beta_BTH = recorded("beta", beta_BTH, "batch token head")
    scan = ops.scan_step if store.sparse else ops.scan_chunks
    core = scan(use, q_BTHK, k_BTHK, v_BTHK, decay_BTHK, beta_BTH, store.memory_of(layer), store.index_B)
    core_BTHK = recorded("core", core)
    gate = held.linear(held.linear(x_BTF, f"{name}.g_a_proj"), f"{name}.g_b_proj").unflatten(-1, (-1, width))
    normed = ops.gated_norm(use, core_BTHK, held.tensor(f"{name}.o_norm.weight"), gate, config.rms_norm_eps)
    return held.row_linear(recorded("norm", normed).flatten(2), f"{name}.o_proj")


def _mixed(held: Held, layer: int, name: str, x_BTF: Tensor, store: SlotStore) -> tuple[Tensor, ...]:
    """Return queries, keys and values [B, T, C / 3] after the short convolution, and keep its last inputs."""
    x_BTC = torch.cat([held.linear(x_BTF, f"{name}.{part}_proj") for part in "qkv"], dim=-1)
    past_BWC = store.inputs(layer)
    store.put_inputs(layer, torch.cat((past_BWC, x_BTC), dim=1)[:, -past_BWC.shape[1] :])
    weight_CW = held.tensor(f"{name}.conv1d.weight")[:, 0]
    return ops.causal_conv(held.use, x_BTC, past_BWC, weight_CW).chunk(3, dim=-1)
