"""Operators of the port under the names of the harness's suite, to be judged alone. Must not know models.

Each is the port's own implementation at the level that the table names, in the suite's order of arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from accel_impl import ops
from accel_impl.backend import BackendAdapter
from accel_impl.formats import Plain
from harness.adapter import Operator

FLOAT = torch.float32
Call = Callable[..., Any]


def operator_table(use: BackendAdapter) -> Mapping[str, str | Operator]:
    """Return the level of every operator, and those that the suite can call, at their level."""
    offered = {
        suite: Operator(
            call=make(use), level=use.table[name], variants={word: other(use) for word, other in more.items()}
        )
        for suite, (name, make, more) in OFFERED.items()
    }
    return {**use.table, **offered}


def _norm(use: BackendAdapter) -> Call:
    return lambda x, weight, eps: ops.rms_norm(use, x, weight, eps)


def _layer_norm(use: BackendAdapter) -> Call:
    return lambda x, weight, bias, eps: ops.layer_norm(use, x, weight, bias, eps)


def _swiglu(use: BackendAdapter) -> Call:
    return lambda gate, up: ops.swiglu(use, gate, up)


def _swiglu_clamped(use: BackendAdapter) -> Call:
    return lambda gate, up: ops.swiglu_clamped(use, gate, up)


def _linear(use: BackendAdapter) -> Call:
    return lambda x, weight, bias: ops.linear(use, x, Plain(tensor=weight), bias)


def _rotary(*, interleaved: bool) -> Callable[[BackendAdapter], Call]:
    def make(use: BackendAdapter) -> Call:
        def turn(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
            turned, rest = x_THD.tensor_split([2 * cos_TR.shape[-1]], dim=-1)
            table = (cos_TR.to(FLOAT)[None], sin_TR.to(FLOAT)[None])
            return torch.cat((ops.rope(use, turned[None], *table, interleaved=interleaved)[0], rest), dim=-1)

        return turn

    return make


def _gated_delta(use: BackendAdapter) -> Call:
    return _scan(lambda *args: ops.scan_chunks(use, *args))


def _gated_delta_by_steps(use: BackendAdapter) -> Call:
    def steps(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, memory: Tensor, index: Tensor) -> Tensor:
        parts = (q, k, v, decay, beta)
        cores = [ops.scan_step(use, *(x[:, t : t + 1] for x in parts), memory, index) for t in range(q.shape[1])]
        return torch.cat(cores, dim=1)

    return _scan(steps)


def _scan(entry: Call) -> Call:
    def scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Give every channel of a head its decay. Shapes: q, k [H, T, K]; v [H, T, V]; g, beta [H, T]."""
        if not q.shape[1]:
            return torch.empty_like(v), state.float()
        memory = state.float().clone()[None]
        by_token = [x.transpose(0, 1)[None] for x in (q, k, v, g.float()[..., None].expand_as(q), beta.float())]
        index = torch.zeros(1, dtype=torch.int64, device=q.device)
        core = entry(*by_token, memory, index)
        return core[0].transpose(0, 1).to(q.dtype), memory[0]

    return scan


def _chosen(entry: Call) -> Callable[[BackendAdapter], Call]:
    def make(use: BackendAdapter) -> Call:
        def attend(q_HTD: Tensor, k_SD: Tensor, v_SV: Tensor, keys_TK: Tensor) -> Tensor:
            """Let a latent be a key and a value side by side, which a matrix of ones and zeros takes apart again."""
            heads, keys, values = q_HTD.shape[0], k_SD.shape[-1], v_SV.shape[-1]
            latent = torch.cat((k_SD, v_SV), dim=-1)
            apart = torch.eye(keys + values, dtype=FLOAT, device=q_HTD.device).repeat(heads, 1)
            sinks = torch.full((heads,), float("-inf"), device=q_HTD.device)
            none = latent.new_empty(len(latent), 0)
            query = q_HTD.transpose(0, 1)[None]
            core = entry(use, query, latent, none, keys_TK[None], Plain(tensor=apart), sinks, keys**-0.5)
            return core[0].transpose(0, 1)

        return attend

    return make


def _mxfp4(use: BackendAdapter) -> Call:
    def decode(packed: Tensor, scale: Tensor) -> Tensor:
        out = torch.empty(len(packed), 2 * packed.shape[1], dtype=FLOAT, device=packed.device)
        return ops.decode_mxfp4(use, packed.contiguous(), scale.contiguous(), out)

    return decode


Make = Callable[[BackendAdapter], Call]
OFFERED: Mapping[str, tuple[str, Make, Mapping[str, Make]]] = {
    "rms_norm": ("norm.rms", _norm, {}),
    "layer_norm": ("norm.layer", _layer_norm, {}),
    "swiglu": ("act.swiglu", _swiglu, {}),
    "swiglu_clamped": ("act.swiglu_clamped", _swiglu_clamped, {}),
    "linear": ("linear", _linear, {}),
    "rotary_half": ("rope.turn", _rotary(interleaved=False), {}),
    "rotary_pairs": ("rope.turn", _rotary(interleaved=True), {}),
    "gated_delta": ("recurrent.prefill", _gated_delta, {"recurrent.decode": _gated_delta_by_steps}),
    "attention_chosen": (
        "attn.sparse_prefill", _chosen(ops.attend_prefill), {"attn.sparse_decode": _chosen(ops.attend_decode)},
    ),
    "from_mxfp4": ("mxfp4.decode", _mxfp4, {}),
}  # fmt: skip
"""The suite's name; the port's, what puts the arguments in order; the same for others that do the same."""
