"""Faults of any adapter, at the taps that it shows. Knows tap names and axes; must not know ports.

They reach a port that is no nn.Module, such as the built-in one.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.adapter import Inputs, Weight
from harness.faults import catalogue
from harness.faults.tapped import Call, Tapped, renamed

Places = list[str]
fault = functools.partial(catalogue.fault, via="taps")
benign = functools.partial(catalogue.benign, via="taps")
PHASE = "chunk|decode|slot|phase|only in|prefill"


def _part(y: Tensor, axis: int, index: Any, factor: float) -> Tensor:
    """Scale one slice of a tensor."""
    y = y.clone()
    y.select(axis, index).mul_(factor)
    return y


def _scaled(ports: Tapped, pattern: str, factor: float) -> Places:
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


@fault(cause="off|wrong|projection|scale|slope")
def tap_attention_scaled(ports: Tapped) -> Places:
    """An attention's output is 1 % too large."""
    return _scaled(ports, r"layers\.\d+\.attn$", 1.01)


@fault(cause="off|wrong|norm|scale|slope")
def tap_norm_scaled(ports: Tapped) -> Places:
    """A norm is 1 % too large."""
    return _scaled(ports, r"layers\.\d+\.input_norm$", 1.01)


@fault(cause="off|wrong|glue|residual|scale|slope")
def tap_residual_scaled(ports: Tapped) -> Places:
    """The sum of input and attention is 1 % too large."""
    return _scaled(ports, r"layers\.\d+\.mid$", 1.01)


@fault(cause="off|wrong|embed|scale|slope")
def tap_embedding_scaled(ports: Tapped) -> Places:
    """Embeddings are 2 % too large."""
    return _scaled(ports, r"^embed$", 1.02)


@fault(cause="off|wrong|expert|activation|scale|slope", needs="a shared expert")
def tap_shared_expert_scaled(ports: Tapped) -> Places:
    """A shared expert is 2 % too large."""
    return _scaled(ports, r"shared_expert$", 1.02)


@fault("TX11", cause="cap|logits|off|wrong")
def tap_logits_capped(ports: Tapped) -> Places:
    """The logits go through a soft cap of 6."""
    tap = ports.find(r"^logits$")
    ports.made(tap, lambda y, _: 6 * torch.tanh(y / 6))
    return [tap]


@fault("ST12", cause="logits|scale|cap|off|wrong")
def tap_logits_scaled(ports: Tapped) -> Places:
    """The logits are 3 % too large."""
    return _scaled(ports, r"^logits$", 1.03)


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
    """The output projection finds heads in each other's place."""
    tap = ports.find(r"attn\.core$")
    axis = ports.axis(tap, "head")
    ports.handed(tap, lambda y, _: y.roll(1, axis))
    return [tap.removesuffix(".core")]


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


@fault("LC04", stage="long_context", cause="position|token|off|wrong", needs="more than 128 tokens")
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


@fault(cause="decode|position", needs="rotary, phases")
def tap_decode_position(ports: Tapped) -> Places:
    """Single steps are one position too far."""
    ports.find(r"k_rope$")

    def change(inputs: Inputs, call: Call) -> Inputs:
        if call.rows != 1 or not call.start:
            return inputs
        positions = inputs.position_ids
        positions = torch.arange(inputs.token_ids.shape[-1])[None] if positions is None else positions
        return dataclasses.replace(inputs, position_ids=positions + 1)

    ports.inputs(change)
    return ["layers.0", "layers.0.attn*"]


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


# --- choices


@fault(cause="weight|renormalisation|scaling|off|wrong", needs="a router")
def tap_routing_weights_small(ports: Tapped) -> Places:
    """Routing weights are 5 % too small."""
    return _scaled(ports, r"router\.weights$", 0.95)


@fault(cause="weight|expert|order|off|wrong", needs="a router")
def tap_routing_weights_exchanged(ports: Tapped) -> Places:
    """Routing weights reach the experts in another order."""
    tap = ports.find(r"router\.weights$")
    ports.handed(tap, lambda y, _: y.flip(-1))
    return [tap.replace("router.weights", "experts")]


@fault("MC11", cause="expert|order|off|wrong", needs="experts")
def tap_experts_exchanged(ports: Tapped) -> Places:
    """Two experts lie in each other's place."""
    tap = ports.find(r"router\.topk$")
    order = torch.arange(4096)
    order[1], order[2] = 2, 1
    ports.handed(tap, lambda ids, _: order[ids].to(ids.dtype))
    return [tap.replace("router.topk", "experts"), tap.replace("topk", "weights")]


@fault("AC08", cause="chosen|choice|k,", needs="a router")
def tap_last_route_wrong(ports: Tapped) -> Places:
    """The last chosen expert is always the first of all."""
    tap = ports.find(r"router\.topk$")
    ports.made(tap, lambda ids, _: torch.cat((ids[..., :-1], torch.zeros_like(ids[..., -1:])), -1))
    return [tap]


@fault("SP03", cause="rotary|indexer|rotation|permuted", needs="an indexer")
def tap_indexer_one_sided(ports: Tapped) -> Places:
    """A rotation is applied to the indexer's queries only."""
    tap = ports.find(r"indexer\.q$")

    def change(y: Tensor, _: Call) -> Tensor:
        width = y.shape[-1]
        turn: Tensor = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(1))).Q
        return (y.float() @ turn).to(y.dtype)

    ports.made(tap, change)
    return [tap]


@fault(cause="k,|number|chosen|choice", needs="an indexer")
def tap_one_key_less(ports: Tapped) -> Places:
    """An indexer chooses one key less."""
    tap = ports.find(r"indexer\.topk$")
    ports.made(tap, lambda ids, _: torch.cat((ids[..., :-1], torch.full_like(ids[..., -1:], -1)), -1))
    return [tap]


@fault(cause="not allowed|causal|chosen", needs="an indexer")
def tap_key_of_the_future(ports: Tapped) -> Places:
    """An indexer chooses the key after its own token."""
    tap = ports.find(r"indexer\.topk$")

    def change(ids: Tensor, call: Call) -> Tensor:
        ids = ids.clone()
        ids[..., 0] = (_positions(call) + 1).clamp(max=call.stop - 1).reshape(1, -1).to(ids.dtype)
        return ids

    ports.made(tap, change)
    return [tap]


@fault(cause="head weights|indexer|off|wrong", needs="an indexer with head weights")
def tap_indexer_weights_ignored(ports: Tapped) -> Places:
    """All heads of an indexer weigh the same."""
    tap = ports.find(r"indexer\.weights$")
    ports.made(tap, lambda y, _: torch.ones_like(y))
    return [tap]


@fault(cause="core|off|wrong|mask|window", needs="an indexer")
def tap_choice_of_the_row_before(ports: Tapped) -> Places:
    """Attention uses the choice of the token before."""
    tap = ports.find(r"indexer\.topk$")
    ports.handed(tap, lambda ids, _: torch.cat((ids[:, :1], ids[:, :-1]), 1))
    return [tap.replace("indexer.topk", "core")]


# --- pictures


@fault("IM06", stage="image", cause="channel|picture|pixel|cut", needs="a vision tower")
def tap_colours_reversed(ports: Tapped) -> Places:
    """Colours come in the order blue, green, red."""
    tap = ports.find(r"^inputs\.pixel_values$")
    ports.made(tap, lambda y, _: y.reshape(*y.shape[:-1], 3, -1).flip(-2).reshape(y.shape))
    return [tap]


@fault("IM09", stage="image", cause="order|row|picture", needs="a vision tower")
def tap_pictures_swapped(ports: Tapped) -> Places:
    """The features of two pictures are put into each other's place."""
    tap = ports.find(r"^vision\.merger$")
    ports.handed(tap, lambda y, _: torch.cat((y[6:], y[:6])))
    return ["merged"]


@fault(stage="image", cause="order|row|picture", needs="a vision tower")
def tap_pictures_late(ports: Tapped) -> Places:
    """The rows of pictures lie one row too late."""
    tap = ports.find(r"^vision\.merger$")
    ports.handed(tap, lambda y, _: y.roll(1, 0))
    return ["merged"]


@fault(stage="image", cause="off|wrong|block|scale", needs="a vision tower")
def tap_tower_block_scaled(ports: Tapped) -> Places:
    """A block of the tower is 1 % too large."""
    return _scaled(ports, r"^vision\.blocks\.\d+$", 1.01)


@fault("IM01", stage="image", cause="position|patch|table|order", needs="a table of patch positions")
def tap_patch_positions_late(ports: Tapped) -> Places:
    """Patches get the position of the patch before."""
    tap = ports.find(r"^vision\.pos_embed$")
    ports.made(tap, lambda y, _: y.roll(1, 0))
    return [tap]


# --- weights


def _weight(ports: Tapped, pattern: str, change: Callable[[Tensor], Tensor]) -> Places:
    """Change what memory holds of the last weight whose name matches."""
    found = [w.name for w in ports.adapter.weights() if re.search(pattern, w.name)]
    if not found:
        raise catalogue.NoPlace(f"no weight here is called {pattern}")
    name = found[len(found) // 2]

    def told(weight: Weight) -> Weight:
        return renamed(weight, change(weight.tensor.clone())) if weight.name == name else weight

    ports.weights(told)
    return [name]


@fault("LD17", stage="load", cause="times|scale|ratio")
def tap_weight_halved(ports: Tapped) -> Places:
    """A matrix is half of what it should be."""
    return _weight(ports, r"o_proj\.weight$", lambda w: w * 0.5)


@fault("LD03", stage="load", cause="zero|never written")
def tap_weight_zero(ports: Tapped) -> Places:
    """A matrix was never written."""
    return _weight(ports, r"down_proj\.weight$", torch.zeros_like)


@fault("LD07", stage="load", cause="random")
def tap_weight_random(ports: Tapped) -> Places:
    """A matrix is initialised again after it was loaded."""
    draw = torch.Generator().manual_seed(3)
    return _weight(ports, r"o_proj\.weight$", lambda w: (torch.randn(w.shape, generator=draw) * 0.02).to(w.dtype))


@fault("LD09", stage="load", cause="constant|1")
def tap_norm_not_loaded(ports: Tapped) -> Places:
    """The weight of a norm stays 1."""
    return _weight(ports, r"layernorm\.weight$", torch.ones_like)


# --- harmless


@benign()
def tap_keys_in_another_order(ports: Tapped) -> None:
    """An indexer lists the chosen keys in another order."""
    ports.made(ports.find(r"indexer\.topk$"), lambda ids, _: ids.flip(-1))


@benign("BN25")
def tap_padded_vocabulary(ports: Tapped) -> None:
    """Logits have columns beyond the vocabulary, which are masked."""
    tap = ports.find(r"^logits$")
    ports.made(tap, lambda y, _: torch.nn.functional.pad(y, (0, 3), value=float("-inf")))


@benign("BN30")
def tap_negative_zero(ports: Tapped) -> None:
    """Zeros of a layer are negative, and what is below the smallest normal number is zero."""
    tap = ports.find(r"^layers\.\d+$")
    tiny = torch.finfo(torch.float32).tiny
    ports.made(tap, lambda y, _: torch.where(y.float().abs() < tiny, torch.full_like(y, -0.0), y))


@benign()
def tap_nothing(ports: Tapped) -> None:
    """The same port again."""
