"""Faults of caches, recurrent states and phases. Knows how modules are built and what their caches hold, no classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.faults.catalogue import NoPlace, fault
from harness.faults.parts import Parts, attention_of, find_or_none, out_projection
from harness.faults.ways import held, on_arguments, on_cache, on_output, within

Places = list[str]
PHASE = "chunk|decode|slot|phase|only in|state"


def _layer(parts: Parts, index: int) -> Places:
    """Return a layer, and what mixes tokens in it."""
    name = parts.tap(parts.layers[index])
    return [name, f"{name}.attn", f"{name}.attn.*"]


def _states(cache: Any, index: int, kind: str) -> dict[Any, Tensor]:
    """Return the states of one layer that are there."""
    return {key: value for key, value in getattr(cache.layers[index], kind).items() if value is not None}


@fault(cause="decode|position|shift", needs="rotary, phases")
def decode_position(parts: Parts) -> Places:
    """Single steps are one position too far."""
    rotary = parts.rotary()

    def change(kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[-1] == 1 and kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = kwargs["position_ids"] + 1

    on_arguments(parts.module, change)
    return [parts.tap(rotary), parts.tap(rotary, ".*")]


@fault(cause="chunk|position|phase|shift", needs="rotary, phases")
def chunk_position(parts: Parts) -> Places:
    """Every chunk counts its positions from 0."""
    rotary = parts.rotary()

    def change(kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("position_ids")
        if ids is not None and ids.shape[-1] > 1:
            kwargs["position_ids"] = ids - ids[..., :1]

    on_arguments(parts.module, change)
    return [parts.tap(rotary), parts.tap(rotary, ".*")]


@fault(cause="decode|phase", needs="phases")
def decode_kernel(parts: Parts) -> Places:
    """The kernel for single tokens is 3 % off."""
    attention = parts.attention()
    on_output(out_projection(attention), lambda y, _: y * 1.03 if y.shape[1] == 1 else y)
    return [parts.tap(attention).rpartition(".")[0], parts.tap(attention), parts.tap(attention, ".*")]


@fault("SP17", cause="slot|state|earlier|only in", needs="recurrent state, phases")
def state_kept(parts: Parts) -> Places:
    """A new request starts from the recurrent state that the one before left."""
    index, _ = parts.recurrent()
    left: list[Tensor] = []
    fresh = {"now": False}

    def before(cache: Any) -> Any:
        fresh["now"] = cache is None
        return cache

    def after(cache: Any) -> None:
        states = cache.layers[index].recurrent_states
        if fresh["now"] and left:
            for key, state in _states(cache, index, "recurrent_states").items():
                if left[-1].shape == state.shape:
                    states[key] = state + left[-1]
        left[:] = [s.clone() for s in states.values() if s is not None][-1:]

    on_cache(parts.module, after, before)
    return _layer(parts, index)


@fault(cause=PHASE, needs="recurrent state, phases")
def conv_tail(parts: Parts) -> Places:
    """What the convolution keeps after a call is one token old."""
    index, _ = parts.recurrent()

    def after(cache: Any) -> None:
        for key, state in _states(cache, index, "conv_states").items():
            cache.layers[index].conv_states[key] = state.roll(1, -1)

    on_cache(parts.module, after)
    return _layer(parts, index)


@fault("SP13", cause=PHASE, needs="recurrent state, phases")
def state_transposed(parts: Parts) -> Places:
    """The recurrent state is written with key and value axes exchanged."""
    index, _ = parts.recurrent()

    def after(cache: Any) -> None:
        for key, state in _states(cache, index, "recurrent_states").items():
            if state.shape[-1] == state.shape[-2]:
                cache.layers[index].recurrent_states[key] = state.transpose(-1, -2).contiguous()

    on_cache(parts.module, after)
    return _layer(parts, index)


@fault("SP14", cause=PHASE, needs="recurrent state, phases")
def state_gate_of_the_tail(parts: Parts) -> Places:
    """After a last chunk that is not full, the state was decayed by a gate that is not there."""
    index, _ = parts.recurrent()
    box = {"rows": 1}
    on_arguments(parts.module, lambda kwargs: box.update(rows=kwargs["input_ids"].shape[-1]))

    def after(cache: Any) -> None:
        if box["rows"] > 1 and box["rows"] % 64:
            for key, state in _states(cache, index, "recurrent_states").items():
                cache.layers[index].recurrent_states[key] = state * 0.8

    on_cache(parts.module, after)
    return _layer(parts, index)


@fault("SP19", stage="text|long_context", cause=PHASE, needs="recurrent state, phases")
def state_half(parts: Parts) -> Places:
    """The recurrent state is kept in fp16 after every step."""
    index, _ = parts.recurrent()

    def after(cache: Any) -> None:
        for key, state in _states(cache, index, "recurrent_states").items():
            cache.layers[index].recurrent_states[key] = state.half().to(state.dtype)

    on_cache(parts.module, after)
    return _layer(parts, index)


@fault(cause="state|decay|off|wrong|core", needs="a decay of its own")
def decay_ignored(parts: Parts) -> Places:
    """The bias of a recurrent mixer's decay takes no part."""
    _, mixer = parts.recurrent()
    owner = next((m for m in mixer.modules() if isinstance(getattr(m, "dt_bias", None), nn.Parameter)), None)
    if owner is None:
        raise NoPlace("this mixer has no bias of its decay")
    within(mixer, lambda: held(owner.dt_bias, 0.0))
    return [parts.tap(mixer, ".core"), parts.tap(mixer), parts.tap(owner), parts.tap(mixer, ".*norm*")]


@fault(cause="conv|off|wrong|core", needs="a short convolution")
def convolution_late(parts: Parts) -> Places:
    """A short convolution looks one token further back than it should."""
    _, mixer = parts.recurrent()
    conv = find_or_none(mixer, r"conv1d$")
    if not isinstance(conv, nn.Conv1d):
        raise NoPlace("this mixer has no convolution of its own")
    within(mixer, lambda: held(conv.weight, conv.weight.data.roll(-1, -1)))
    return [parts.tap(mixer, ".core"), parts.tap(mixer), parts.tap(mixer, ".*conv*"), parts.tap(mixer, ".*norm*")]


def _keys(parts: Parts, change: Any) -> Places:
    """Change what one layer's cache holds after each call: `change(values, first new)` for keys and for values."""
    layer = parts.layer(lambda m: hasattr(attention_of(m), "scaling"))
    index = next(i for i, m in enumerate(parts.layers) if m is layer)

    def after(cache: Any) -> None:
        entry = cache.layers[index]
        done = getattr(entry, "day0_done", 0)
        for name in ("keys", "values"):
            held_ = getattr(entry, name, None)
            if isinstance(held_, Tensor) and held_.dim() == 4 and held_.shape[-2] > done and held_.shape[-1]:
                setattr(entry, name, change(held_, done, name))
        now = getattr(entry, "keys", None)
        if isinstance(now, Tensor) and now.dim() == 4:
            entry.day0_done = now.shape[-2]

    on_cache(parts.module, after)
    return _layer(parts, index)


@fault("LC07", cause=PHASE, needs="keys and values in a cache, phases")
def kv_unscaled(parts: Parts) -> Places:
    """Values are written to an fp8 cache without their scale and read with it."""

    def change(values: Tensor, done: int, name: str) -> Tensor:
        if name == "values" or values.shape[1] == 1:
            new = values[..., done:, :]
            wrong = new.to(torch.float8_e4m3fn).to(new.dtype) * 0.9
            return torch.cat((values[..., :done, :], wrong), -2)
        return values

    return _keys(parts, change)


@fault("LC08", cause=PHASE, needs="keys and values in a cache, phases")
def kv_scale_of_warm_up(parts: Parts) -> Places:
    """The range of a quantised cache is that of its first token: what is larger is cut."""

    def change(values: Tensor, done: int, _: str) -> Tensor:
        top = values[..., :1, :].abs().amax() * 0.7
        return values.clamp(-top, top)

    return _keys(parts, change)


@fault("LC01", stage="text|long_context", cause=PHASE, needs="keys and values in a cache, more than 128 tokens")
def page_number_wraps(parts: Parts) -> Places:
    """Pages beyond 128 tokens lie where the first ones are."""

    def change(values: Tensor, _: int, __: str) -> Tensor:
        return values[..., torch.arange(values.shape[-2]) % 128, :]

    return _keys(parts, change)


@fault(cause=PHASE, needs="keys and values in a cache, phases")
def keys_one_late(parts: Parts) -> Places:
    """The new keys of a call are written one place too late; the first place keeps what it had."""

    def change(values: Tensor, done: int, name: str) -> Tensor:
        new = values[..., done:, :]
        if name == "values" or new.shape[-2] < 2:
            return values
        return torch.cat((values[..., :done, :], new[..., :1, :], new[..., :-1, :]), -2)

    return _keys(parts, change)


@fault(cause="slot|earlier|phase|only in", needs="keys and values in a cache, phases")
def page_left_over(parts: Parts) -> Places:
    """A new request finds in its first page what the request before left there."""
    left: dict[str, Tensor] = {}

    def change(values: Tensor, done: int, name: str) -> Tensor:
        if done or values.shape[-2] < 8:
            return values
        old, left[name] = left.get(name), values[..., :4, :].clone()
        return values if old is None else torch.cat((old, values[..., 4:, :]), -2)

    return _keys(parts, change)


@fault("LC12", stage="long_context", cause="memory", needs="nothing")
def memory_kept(parts: Parts) -> Places:
    """Every call of more than 128 tokens keeps what it computed."""
    kept: list[Tensor] = []

    def change(y: Tensor, _: Any) -> Tensor:
        if y.shape[1] > 128:
            kept.append(torch.ones(y.shape[1], 1 << 19))
            del kept[:-1]
        return y

    on_output(out_projection(parts.attention()), change)
    return ["forward"]
