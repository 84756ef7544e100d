"""The built-in port with one wrong number somewhere: `builtin_numeric_ports.py:port?fault=NAME`.

Like `builtin_ports.py`, for what is right when it is loaded and wrong when it is computed: text, pictures, length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from port_file import Faults, around
from torch import Tensor

from accel_impl import experts, model, ops, rotary, sparse, vision
from accel_impl.held import Held
from accel_impl.model import Model, Step
from accel_impl.sparse import Span
from accel_impl.store import SlotStore
from accel_impl.vision import Tower

FAULTS = Faults()
port, fault = FAULTS.port, FAULTS.add
LAYER = 3
"""The layer that a fault sits in, where it sits in one; it attends sparsely and has experts."""


@contextmanager
def other(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let an attribute have another value for the time being."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


class Here:
    """Which layer, and which tokens, are being computed."""

    layer = -1
    start = 0
    stop = 0


def follow() -> None:
    """Keep `Here` up to date."""

    def layer(real: Any, self: Model, number: int, *args: Any) -> Any:
        Here.layer = number
        return real(self, number, *args)

    def run(real: Any, self: Model, step: Step, store: SlotStore, *args: Any) -> Any:
        Here.start, Here.stop = store.starts[0], store.starts[0] + store.count
        return real(self, step, store, *args)

    def further(real: Any, self: Model, number: int, *args: Any) -> Any:
        Here.layer = number
        return real(self, number, *args)

    around(Model, "_layer", layer)
    around(Model, "run", run)
    around(Model, "_further", further)


# --- text ---


@fault
def rope_base() -> None:
    """TX01: one layer's rotary base is a default instead of the configuration's."""

    def attention(real: Any, held: Held, number: int, tap: str, x: Tensor, span: Span, *args: Any, **more: Any) -> Any:
        if number == LAYER:
            wrong = dataclasses.replace(held.config.rope, rope_theta=500.0)
            turn = rotary.table(span.positions_BT, wrong, held.config.qk_rope_head_dim, held.device)
            span = dataclasses.replace(span, turn=turn)
        return real(held, number, tap, x, span, *args, **more)

    around(model, "sparse_attention", attention)


@fault
def softmax_scale() -> None:
    """TX04: the softmax scale lacks a factor, in both attention paths."""
    follow()
    for name in ("attend_prefill", "attend_decode"):

        def attend(real: Any, *args: Any) -> Tensor:
            return real(*args[:-1], args[-1] * (1.25 if Here.layer == LAYER else 1.0))

        around(ops, name, attend)


@fault
def sinks_dropped() -> None:
    """TX16: the sinks are not in the denominator."""
    follow()
    for name, place in (("attend_prefill", 6), ("attend_decode", 6)):

        def attend(real: Any, *args: Any, place: int = place) -> Tensor:
            given = list(args)
            given[place] = given[place] - (1e4 if Here.layer == LAYER else 0.0)
            return real(*given)

        around(ops, name, attend)


@fault
def norm_offset() -> None:
    """LD25: a norm multiplies by 1 + w."""

    def norm(real: Any, self: Held, x: Tensor, name: str) -> Tensor:
        y = real(self, x, name)
        wide = x.float()
        more = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)).to(y.dtype)
        return y + more if name.endswith(f"layers.{LAYER}.input_layernorm") else y

    around(Held, "rms_norm", norm)


@fault
def up_without_one() -> None:
    """TX17: the gated activation of the experts lost its +1."""
    follow()

    def swiglu(real: Any, use: Any, gate: Tensor, up: Tensor) -> Tensor:
        return real(use, gate, up - 1 if Here.layer == LAYER else up)

    around(ops, "swiglu_clamped", swiglu)


@fault
def router_bias_ignored() -> None:
    """The router's correction bias takes no part in the choice."""

    def routed(real: Any, held: Held, name: str, *args: Any) -> Any:
        key = f"{name}.gate.e_score_correction_bias"
        if f".{LAYER}." in name:
            none = dataclasses.replace(held.weights[key], tensor=torch.zeros_like(held.weights[key].tensor))
            held = dataclasses.replace(held, weights={**held.weights, key: none})
        return real(held, name, *args)

    around(experts, "_routed", routed)


@fault
def one_key_less() -> None:
    """The indexer chooses one key less."""

    def chosen(real: Any, held: Held, number: int, *args: Any) -> Tensor:
        fewer = dataclasses.replace(held.config, index_topk=held.config.index_topk - 1)
        return real(dataclasses.replace(held, config=fewer) if number == LAYER else held, number, *args)

    around(sparse, "_chosen", chosen)


@fault
def indexer_one_sided() -> None:
    """SP03: a rotation is applied to the indexer's queries, not to its keys."""

    def linear(real: Any, self: Held, x: Tensor, name: str) -> Tensor:
        y = real(self, x, name)
        if not name.endswith(f"layers.{LAYER}.self_attn.indexer.wq_b"):
            return y
        width = self.config.index_head_dim
        turn = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(1))).Q
        return (y.unflatten(-1, (-1, width)).float() @ turn).flatten(-2).to(y.dtype)

    around(Held, "linear", linear)


@fault
def decode_position() -> None:
    """Single steps are one position too far."""

    def run(real: Any, self: Model, step: Step, store: SlotStore, *args: Any) -> Any:
        late = dataclasses.replace(step, positions_BT=step.positions_BT + 1)
        return real(self, late if store.sparse else step, store, *args)

    around(Model, "run", run)


@fault
def softcap_missing() -> None:
    """TX11: the final soft cap is not applied."""

    def logits(real: Any, self: Model, *args: Any) -> Tensor:
        with other(self, "config", dataclasses.replace(self.config, logit_softcap=1e4)):
            return real(self, *args)

    around(Model, "_logits", logits)


@fault
def page_left_over() -> None:
    """A second request finds in its first page what the request before left there."""
    left: list[Tensor] = []

    def put(real: Any, self: SlotStore, layer: int, values: Any) -> None:
        if self.starts[0] == 0 and layer == LAYER and "latent" in values:
            own = values["latent"]
            count = min(self.memory.pages.page_tokens, own.shape[1])
            earlier = [v for v in left if v.shape[1] >= count][-1:]
            left.append(own[:, :count].clone())
            if earlier:
                values = {**values, "latent": torch.cat((earlier[0][:, :count], own[:, count:]), dim=1)}
        real(self, layer, values)

    around(SlotStore, "put", put)


@fault
def keys_unscaled() -> None:
    """LC07: latents are rounded to fp8 without a scale on their way into the cache, and read with one."""

    def put(real: Any, self: SlotStore, layer: int, values: Any) -> None:
        if layer == LAYER and "latent" in values and self.memory.pages.slots > 1:  # not what a forward makes for itself
            latent = values["latent"]
            values = {**values, "latent": latent.to(torch.float8_e4m3fn).to(latent.dtype) * 0.95}
        real(self, layer, values)

    around(SlotStore, "put", put)


# --- length ---


@fault
def beyond_160() -> None:
    """LC04: attention is wrong from position 160 on."""
    follow()

    def attended(real: Any, held: Held, layer: int, *args: Any) -> Tensor:
        value = real(held, layer, *args)
        late = torch.arange(Here.start, Here.stop) >= 160
        return torch.where(late[None, :, None, None], value * 1.08, value) if layer == LAYER else value

    around(sparse, "_attended", attended)


@fault
def indexer_rotates_when_long() -> None:
    """SP01: beyond 100 keys the indexer takes another path, which rotates neighbours instead of halves."""
    follow()

    def turned(real: Any, held: Held, x: Tensor, span: Span) -> Tensor:
        if Here.layer != LAYER or Here.stop <= 100:
            return real(held, x, span)
        first, rest = x.tensor_split([held.config.index_rope_dim], dim=-1)
        return torch.cat((ops.rope(held.use, first, *span.index_turn, interleaved=True), rest), dim=-1)

    around(sparse, "_turned", turned)


@fault
def memory_kept() -> None:
    """LC12: every forward keeps what it computed, per layer and token."""
    follow()
    kept: list[Tensor] = []

    def layer(real: Any, self: Model, number: int, *args: Any) -> Any:
        value = real(self, number, *args)
        if Here.stop > 160:  # at length only: the test is about long context, and the machine may be small
            kept.append(torch.ones(value[-1].shape[1], 1 << 16))
        return value

    around(Model, "_layer", layer)


# --- pictures ---


@fault
def pictures_swapped() -> None:
    """IM09: the features of two pictures are put into each other's place."""

    def tower(real: Any, self: Tower, pixel_values: Tensor, grids: Tensor, record: Any) -> Any:
        rows, deepstack = real(self, pixel_values, grids, record)
        first = int(grids[0].prod()) // self.config.spatial_merge_size**2
        return torch.cat((rows[first:], rows[:first])), deepstack

    around(Tower, "__call__", tower)


@fault
def placed_one_late() -> None:
    """The rows of pictures lie one row too late."""

    def tower(real: Any, *args: Any) -> Any:
        rows, deepstack = real(*args)
        return rows.roll(1, 0), deepstack

    around(Tower, "__call__", tower)


@fault
def patches_raster() -> None:
    """IM03: patches come in raster order where the tower merges blocks."""

    def pixels(real: Any, images: Any, config: Any) -> Any:
        with other(vision, "block_major", lambda grid, merge: grid.flatten(0, 1)):
            return real(images, config)

    around(vision, "pixels", pixels)


@fault
def corners_aligned() -> None:
    """IM01: the position table is resized with corners aligned."""

    def bilinear(real: Any, source: int, target: int, device: Any) -> Tensor:
        at = torch.arange(target) * (source - 1) / max(1, target - 1)
        return (1 - (at[:, None] - torch.arange(source)).abs()).clamp(min=0).float().to(device)

    around(vision, "bilinear", bilinear)


@fault
def channels_reversed() -> None:
    """IM06: mean and deviation are those of blue, green, red."""

    def pixels(real: Any, images: Any, config: Any) -> Any:
        return real(images, dataclasses.replace(config, mean=config.mean[::-1], std=config.std[::-1]))

    around(vision, "pixels", pixels)


@fault
def pictures_attend_across() -> None:
    """IM13: patches attend to the patches of all pictures."""
    around(ops, "attend_patches", lambda real, use, q, k, v, lengths: real(use, q, k, v, [sum(lengths)]))
