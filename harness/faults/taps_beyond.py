"""More faults of any adapter at its taps: choices, pictures, weights; harmless ones. Must not know ports."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import torch
from torch import Tensor

from harness.adapter import Weight
from harness.faults import catalogue
from harness.faults.tapped import Call, Tapped, renamed
from harness.faults.taps import scaled

Places = list[str]
fault = functools.partial(catalogue.fault, via="taps")
benign = functools.partial(catalogue.benign, via="taps")


def _positions(call: Call) -> Tensor:
    return torch.arange(call.start, call.stop)


# --- choices


@fault(cause="weight|renormalisation|scaling|off|wrong", needs="a router")
def tap_routing_weights_small(ports: Tapped) -> Places:
    """Routing weights are 5 % too small."""
    return scaled(ports, r"router\.weights$", 0.95)


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


@fault(stage="image", cause="off|wrong|block|scale|times", needs="a vision tower")
def tap_tower_block_scaled(ports: Tapped) -> Places:
    """A block of the tower is 1 % too large."""
    return scaled(ports, r"^vision\.blocks\.\d+$", 1.01)


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


@fault("LD17", stage="load", cause="times|scale|times|ratio")
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
