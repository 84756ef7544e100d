"""The built-in port with one wrong number somewhere: `builtin_numeric_ports.py:port?fault=NAME`.

Like `builtin_ports.py`, for what is right when it is loaded and wrong when it is computed: text, pictures, length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_impl import ops, vision
from accel_impl.cache import PagedCache, SlotStore
from accel_impl.model import Model
from accel_impl.port import AccelAdapter
from accel_impl.vision import Tower

FAULTS: dict[str, Callable[[], Any]] = {}
LAYER = 2
"""The layer that a fault sits in, where it sits in one."""


def port(checkpoint: Path, setup: Any) -> AccelAdapter:
    """Return the built-in port with the fault that the SPEC names."""
    options = dict(setup.options)
    FAULTS[options.pop("fault")]()
    return AccelAdapter(checkpoint, dataclasses.replace(setup, options=options))


def fault(inject: Callable[[], None]) -> Callable[[], None]:
    """Name a fault after its function."""
    FAULTS[inject.__name__] = inject
    return inject


def around(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace `owner.name` by `change(original, *args)`."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


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

    def layer(real: Any, self: Model, number: int, *args: Any) -> Tensor:
        Here.layer = number
        return real(self, number, *args)

    def run(real: Any, self: Model, inputs: Any, start: int, stop: int, *args: Any) -> Tensor:
        Here.start, Here.stop = start, stop
        return real(self, inputs, start, stop, *args)

    around(Model, "_layer", layer)
    around(Model, "run", run)


def with_config(method: str, **changes: Any) -> None:
    """Let one method of the model see another configuration, in one layer where it has layers."""

    def call(real: Any, self: Model, *args: Any) -> Any:
        here = Here.layer == LAYER or method == "_logits"
        with other(self, "config", dataclasses.replace(self.config, **changes) if here else self.config):
            return real(self, *args)

    follow()
    around(Model, method, call)


# --- text ---


@fault
def rope_base() -> None:
    """TX01: one layer's rotary base is a default instead of the configuration's."""
    with_config("_attention", rope_theta=500.0)


@fault
def softmax_scale() -> None:
    """TX04: the softmax scale lacks a factor, in both attention paths."""
    follow()
    for name in ("attend_dense", "attend_sparse"):

        def attend(real: Any, *args: Any) -> Tensor:
            return real(*args[:-1], args[-1] * (1.25 if Here.layer == LAYER else 1.0))

        around(ops, name, attend)


@fault
def sinks_dropped() -> None:
    """TX16: the sinks are not in the denominator."""
    follow()
    for name, place in (("attend_dense", 5), ("attend_sparse", 5)):

        def attend(real: Any, *args: Any, place: int = place) -> Tensor:
            given = list(args)
            given[place] = given[place] - (1e4 if Here.layer == LAYER else 0.0)
            return real(*given)

        around(ops, name, attend)


@fault
def norm_offset() -> None:
    """LD25: a norm multiplies by 1 + w."""

    def norm(real: Any, self: Model, x: Tensor, name: str) -> Tensor:
        y = real(self, x, name)
        wide = x.float()
        more = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)).to(y.dtype)
        return y + more if name.endswith(f"layers.{LAYER}.input_layernorm") else y

    around(Model, "_rms_norm", norm)


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
    follow()

    def moe(real: Any, self: Model, x: Tensor, name: str, tap: str, record: Any) -> Tensor:
        key = f"{name}.gate.e_score_correction_bias"
        held = self.weights[key]
        if Here.layer != LAYER:
            return real(self, x, name, tap, record)
        none = dataclasses.replace(held, tensor=torch.zeros_like(held.tensor))
        with other(self, "weights", {**self.weights, key: none}):
            return real(self, x, name, tap, record)

    around(Model, "_moe", moe)


@fault
def one_key_less() -> None:
    """The indexer chooses one key less."""
    with_config("_choose", index_topk=1)


@fault
def indexer_one_sided() -> None:
    """SP03: a rotation is applied to the indexer's queries, not to its keys."""

    def linear(real: Any, self: Model, x: Tensor, name: str) -> Tensor:
        y = real(self, x, name)
        if not name.endswith(f"layers.{LAYER}.self_attn.indexer.wq_b"):
            return y
        width = self.config.index_head_dim
        turn = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(1))).Q
        return (y.unflatten(-1, (-1, width)).float() @ turn).flatten(-2).to(y.dtype)

    around(Model, "_linear", linear)


@fault
def decode_position() -> None:
    """Single steps are one position too far."""

    def run(real: Any, self: Model, inputs: Any, start: int, stop: int, *args: Any) -> Tensor:
        if stop - start == 1 and start > 0:
            positions = inputs.position_ids
            positions = torch.arange(inputs.token_ids.shape[1])[None] if positions is None else positions
            inputs = dataclasses.replace(inputs, position_ids=positions + 1)
        return real(self, inputs, start, stop, *args)

    around(Model, "run", run)


@fault
def softcap_missing() -> None:
    """TX11: the final soft cap is not applied."""
    with_config("_logits", logit_softcap=1e4)


@fault
def page_left_over() -> None:
    """A second request finds in its first page what the request before left there."""
    left: list[Tensor] = []

    def write(real: Any, self: PagedCache, layer: int, field: str, slot: int, start: int, values: Tensor) -> None:
        real(self, layer, field, slot, start, values)
        if start == 0 and layer == LAYER and field == "latent":
            count = min(self.page_tokens, values.shape[1])
            earlier = [v for v in left if v.shape[1] >= count][-1:]
            left.append(values[:, :count].clone())
            if earlier:
                real(self, layer, field, slot, 0, earlier[0][:, :count])

    around(PagedCache, "write", write)


@fault
def keys_unscaled() -> None:
    """LC07: latents are rounded to fp8 without a scale on their way into the cache, and read with one."""

    def put(real: Any, self: SlotStore, layer: int, values: Any) -> None:
        latent = values["latent"]
        wrong = latent.to(torch.float8_e4m3fn).to(latent.dtype) * 0.95
        real(self, layer, {**values, "latent": wrong} if layer == LAYER else values)

    around(SlotStore, "put", put)


# --- length ---


@fault
def beyond_128() -> None:
    """LC04: attention is wrong from position 128 on."""
    follow()

    def core(real: Any, self: Model, layer: int, *args: Any) -> Tensor:
        value = real(self, layer, *args)
        late = torch.arange(Here.start, Here.stop) >= 128
        return torch.where(late[None, :, None, None], value * 1.08, value) if layer == LAYER else value

    around(Model, "_core", core)


@fault
def page_number_wraps() -> None:
    """LC01: the number of a page overflows: pages above 128 tokens' worth are those at the start of the request."""

    def read(real: Any, self: PagedCache, layer: int, field: str, slot: int, stop: int) -> Tensor:
        value = real(self, layer, field, slot, stop)
        return value[:, torch.arange(stop) % 128] if layer == LAYER and field == "latent" else value

    around(PagedCache, "read", read)


@fault
def indexer_rotates_when_long() -> None:
    """SP01: beyond 100 keys the indexer takes another path, which rotates neighbours instead of halves."""
    follow()

    def rotate(real: Any, self: Model, x: Tensor, positions: Tensor) -> Tensor:
        if Here.layer != LAYER or Here.stop <= 100:
            return real(self, x, positions)
        turned, rest = x.tensor_split([self.config.index_rope_dim], dim=-1)
        turned = ops.rope(self.use, turned, positions, theta=self.config.rope_theta, interleaved=True)
        return torch.cat((turned, rest), dim=-1)

    around(Model, "_index_rope", rotate)


@fault
def memory_kept() -> None:
    """LC12: every forward keeps what it computed, per layer and token."""
    follow()
    kept: list[Tensor] = []

    def layer(real: Any, self: Model, number: int, h: Tensor, *args: Any) -> Tensor:
        value = real(self, number, h, *args)
        if Here.stop > 140:  # at length only: the test is about long context, and the machine may be small
            kept.append(torch.ones(value.shape[1], 1 << 16))
        return value

    around(Model, "_layer", layer)


# --- pictures ---


@fault
def pictures_swapped() -> None:
    """IM09: the features of two pictures are put into each other's place."""

    def tower(real: Any, self: Tower, pixel_values: Tensor, grids: Tensor, record: Any) -> Tensor:
        rows = real(self, pixel_values, grids, record)
        first = int(grids[0].prod()) // self.config.spatial_merge_size**2
        return torch.cat((rows[first:], rows[:first]))

    around(Tower, "__call__", tower)


@fault
def placed_one_late() -> None:
    """The rows of pictures lie one row too late."""
    around(Tower, "__call__", lambda real, *args: real(*args).roll(1, 0))


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

    def positions(real: Any, self: Tower, grids: Tensor) -> Tensor:
        interpolate = torch.nn.functional.interpolate
        with other(vision.F, "interpolate", lambda *a, **k: interpolate(*a, **{**k, "align_corners": True})):
            return real(self, grids)

    around(Tower, "positions", positions)


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
