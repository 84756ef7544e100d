"""Faults of any adapter, at the taps that it shows. Knows tap names and axes; must not know ports.

They reach a port that is no nn.Module, such as the built-in one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from harness.adapter import Inputs
from harness.faults import catalogue
from harness.faults.tapped import Call, Tapped

Places = list[str]
fault = functools.partial(catalogue.fault, via="taps")
benign = functools.partial(catalogue.benign, via="taps")
PHASE = "chunk|decode|slot|phase|only in|prefill"


def _part(y: Tensor, axis: int, index: Any, factor: float) -> Tensor:
    """Scale one slice of a tensor."""
    y = y.clone()
    y.select(axis, index).mul_(factor)
    return y


def scaled(ports: Tapped, pattern: str, factor: float) -> Places:
    """Let what a tap shows be too large by a factor."""
    tap = ports.find(pattern)
    ports.made(tap, lambda y, _: y * factor)
    return [tap]


def _turned(x: Tensor, angle_T: Tensor) -> Tensor:
    """Rotate the last pair of features by an angle per token. x: [1, T, ..., F]."""
    angle = angle_T.reshape(1, -1, *([1] * (x.dim() - 3))).float()
    a, b = x[..., -2].float(), x[..., -1].float()
    turned = torch.stack((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)
    return torch.cat((x[..., :-2], turned.to(x.dtype)), -1)


def _positions(call: Call) -> Tensor:
    return torch.arange(call.start, call.stop)


# --- values


@fault(cause="off|wrong|projection|scale|times|slope")
def tap_attention_scaled(ports: Tapped) -> Places:
    """An attention's output is 1 % too large."""
    return scaled(ports, r"layers\.\d+\.attn$", 1.01)


@fault(cause="off|wrong|norm|scale|times|slope")
def tap_norm_scaled(ports: Tapped) -> Places:
    """A norm is 1 % too large."""
    return scaled(ports, r"layers\.\d+\.input_norm$", 1.01)


@fault(cause="off|wrong|glue|residual|scale|times|slope")
def tap_residual_scaled(ports: Tapped) -> Places:
    """The sum of input and attention is 1 % too large."""
    return scaled(ports, r"layers\.\d+\.mid$", 1.01)


@fault(cause="off|wrong|embed|scale|times|slope")
def tap_embedding_scaled(ports: Tapped) -> Places:
    """Embeddings are 2 % too large."""
    return scaled(ports, r"^embed$", 1.02)


@fault(cause="off|wrong|expert|activation|scale|times|slope", needs="a shared expert")
def tap_shared_expert_scaled(ports: Tapped) -> Places:
    """A shared expert is 2 % too large."""
    return scaled(ports, r"shared_expert$", 1.02)


@fault("TX11", cause="cap|logits|off|wrong")
def tap_logits_capped(ports: Tapped) -> Places:
    """The logits go through a soft cap of 6."""
    tap = ports.find(r"^logits$")
    ports.made(tap, lambda y, _: 6 * torch.tanh(y / 6))
    return [tap]


@fault("ST12", cause="logits|scale|times|cap|off|wrong")
def tap_logits_scaled(ports: Tapped) -> Places:
    """The logits are 3 % too large."""
    return scaled(ports, r"^logits$", 1.03)


@fault(cause="finite")
def tap_not_finite(ports: Tapped) -> Places:
    """One channel of a layer is not a number from the ninth token on."""
    tap = ports.find(r"^layers\.\d+$")

    def change(y: Tensor, call: Call) -> Tensor:
        y = y.clone()
        y[:, max(0, 8 - call.start) :, 3] = float("nan")
        return y

    ports.made(tap, change)
    return [tap]


# --- attention


@fault(cause="head|core|off|wrong", needs="heads")
def tap_head_scaled(ports: Tapped) -> Places:
    """One head of an attention is 5 % too large."""
    tap = ports.find(r"attn\.core$")
    axis = ports.axis(tap, "head")
    ports.made(tap, lambda y, _: _part(y, axis, 1, 1.05))
    return [tap]


@fault(cause="head|projection|off|wrong|attn", needs="heads")
def tap_heads_exchanged(ports: Tapped) -> Places:
    """What follows attention (a gated norm, or the output projection) finds heads in each other's place."""
    tap = ports.find(r"attn\.core$")
    axis = ports.axis(tap, "head")
    ports.handed(tap, lambda y, _: y.roll(1, axis))
    unit = tap.removesuffix(".core")
    return [f"{unit}.norm", unit]


@fault("TX01", cause="rotary|rope|position|off|wrong", needs="rotary queries")
def tap_queries_turned(ports: Tapped) -> Places:
    """One pair of features of the queries turns faster than it should."""
    tap = ports.find(r"attn\.q$")
    ports.made(tap, lambda y, call: _turned(y, 0.05 * _positions(call)))
    return [tap]


@fault("TX05", cause="rotary|rope|position|off|wrong", needs="rotary keys")
def tap_keys_turned(ports: Tapped) -> Places:
    """One pair of features of the keys turns faster than it should."""
    tap = ports.find(r"attn\.k_rope$")
    ports.made(tap, lambda y, call: _turned(y, 0.05 * _positions(call)))
    return [tap]


@fault("LC04", stage="text|long_context", cause="position|token|off|wrong", needs="more than 128 tokens")
def tap_beyond_128(ports: Tapped) -> Places:
    """Attention is wrong from position 128 on."""
    tap = ports.find(r"attn\.core$")

    def change(y: Tensor, call: Call) -> Tensor:
        late = (_positions(call) >= 128).reshape(1, -1, *([1] * (y.dim() - 2)))
        return torch.where(late, y * 1.08, y)

    ports.made(tap, change)
    return [tap.rpartition(".attn")[0], tap]


# --- phases


@fault(cause=PHASE, needs="phases")
def tap_decode_kernel(ports: Tapped) -> Places:
    """The attention of single tokens is 3 % too large."""
    tap = ports.find(r"layers\.\d+\.attn$")
    ports.made(tap, lambda y, call: y * 1.03 if call.rows == 1 and call.start else y)
    return [tap.rpartition(".")[0], tap]


@fault("LD20", cause=PHASE + "|off|wrong", needs="phases")
def tap_prefill_kernel(ports: Tapped) -> Places:
    """The attention of calls of 8 tokens and more has an offset; that of fewer has none."""
    tap = ports.find(r"layers\.\d+\.attn$")
    ports.made(tap, lambda y, call: y - 0.05 if call.rows >= 8 else y)
    return [tap]


@fault(cause="decode|position|shift", needs="rotary, phases")
def tap_decode_position(ports: Tapped) -> Places:
    """Single steps are one position too far."""
    ports.find(r"k_rope$")
    unit = next(name for name in ports.taps if name.endswith("k_rope")).rpartition(".")[0]

    def change(inputs: Inputs, call: Call) -> Inputs:
        if call.rows != 1 or not call.start:
            return inputs
        positions = inputs.position_ids
        positions = torch.arange(inputs.token_ids.shape[-1])[None] if positions is None else positions
        return dataclasses.replace(inputs, position_ids=positions + 1)

    ports.inputs(change)
    return [unit.rpartition(".")[0], f"{unit}*"]


@fault("LC07", cause=PHASE, needs="a latent in the cache, phases")
def tap_latent_unscaled(ports: Tapped) -> Places:
    """Latents of chunks and steps are rounded to fp8 without a scale on their way into the cache."""
    tap = ports.find(r"kv_latent$")
    ports.handed(tap, lambda y, call: y.to(torch.float8_e4m3fn).to(y.dtype) * 0.95 if call.start else y)
    return [tap.rpartition(".attn")[0], tap.rpartition(".")[0], tap]


@fault(cause="slot|earlier|" + PHASE, needs="a latent in the cache, phases")
def tap_page_left_over(ports: Tapped) -> Places:
    """A later request finds in its first page what the request before left there."""
    tap = ports.find(r"kv_latent$")
    left: dict[int, Tensor] = {}

    def change(y: Tensor, call: Call) -> Tensor:
        if call.start or call.request == 0 or y.shape[1] < 8:
            return y
        old = left.get(call.request - 1)
        left[call.request] = y[:, :4].clone()
        return y if old is None else torch.cat((old, y[:, 4:]), 1)

    ports.handed(tap, change)
    return [tap.rpartition(".attn")[0], tap.rpartition(".")[0], tap]
