"""Faults of matrices, norms, attention, cache and state. Knows how modules are built, not their classes."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import torch
from model_parts import (
    Calls,
    Parts,
    attention_of,
    fault,
    find,
    find_or_none,
    follow_positions,
    held,
    on_arguments,
    on_cache,
    on_mask,
    on_output,
    out_projection,
    widen_logits,
    within,
)
from torch import Tensor, nn


@fault
def linear_scaled(parts: Parts) -> None:
    """An output projection is 1 % too large."""
    on_output(out_projection(parts.attention()), lambda y, _: y * 1.01)


@fault
def norm_offset(parts: Parts) -> None:
    """An RMSNorm multiplies by 1 + w where the model says w (or the reverse)."""
    norm = find(parts.layer(), r"(^|_)input_layernorm$")

    def change(y: Tensor, given: Any) -> Tensor:
        x = (given[0] or tuple(given[1].values()))[0].float()
        return (y.float() + x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).to(y.dtype)

    on_output(norm, change)


@fault
def norm_eps(parts: Parts) -> None:
    """An RMSNorm has a far larger epsilon."""
    norm = find(parts.layer(), r"post_attention_layernorm$")
    name = next(n for n in ("variance_epsilon", "eps") if hasattr(norm, n))
    setattr(norm, name, 0.05)


@fault
def residual_scaled(parts: Parts) -> None:
    """A layer adds its input once and 2 % more."""

    def change(y: Tensor, given: Any) -> Tensor:
        x = (given[0] or (given[1].get("hidden_states"),))[0]
        return y + 0.02 * x if isinstance(x, Tensor) and x.shape == y.shape else y * 1.02

    on_output(parts.layer(), change)


@fault
def logits_scaled(parts: Parts) -> None:
    """The logits lack a scale of 1.03."""
    on_output(parts.module.get_output_embeddings(), lambda y, _: y * 1.03)


@fault
def logits_capped(parts: Parts) -> None:
    """The logits go through a soft cap that the model does not have, or miss the one it has."""
    cap = next((m for p, m in parts.module.named_modules() if re.search(r"logit\w*cap", p)), None)
    if cap is not None:
        cap.forward = functools.wraps(cap.forward)(lambda x: x)  # type: ignore[method-assign]
        return
    on_output(parts.module.get_output_embeddings(), lambda y, _: 6 * torch.tanh(y / 6))


# --- attention


@fault
def vocabulary_unmasked(parts: Parts) -> None:
    """Logits have columns beyond the vocabulary, which are zero."""
    widen_logits(parts, 0.0)


@fault
def rope_base(parts: Parts) -> None:
    """One layer's rotary angles come from another base."""
    rotary = parts.rotary()
    wrong = copy.deepcopy(rotary)
    for name, buffer in wrong.named_buffers():
        buffer.data = buffer.data**0.8 if "inv_freq" in name else buffer.data
    last: list[Any] = []
    rotary.register_forward_pre_hook(lambda _, a, k: last.append((a, k)), with_kwargs=True)

    def change(kwargs: dict[str, Any]) -> None:
        kwargs["position_embeddings"] = wrong(*last[-1][0], **last[-1][1])

    on_arguments(parts.attention(lambda m: hasattr(m, "scaling")), change)


@fault
def attention_scale(parts: Parts) -> None:
    """The softmax scale is 10 % off."""
    attention = parts.attention(lambda m: hasattr(m, "scaling"))
    attention.scaling = attention.scaling * 1.1


@fault
def mask_future(parts: Parts) -> None:
    """Every query sees one key of the future."""
    on_mask(parts.attention(lambda m: hasattr(m, "scaling")), lambda seen: seen | seen.roll(1, -1))


@fault
def mask_top_left(parts: Parts) -> None:
    """In a chunk the causal mask is aligned with the first key, not with the last."""

    def change(seen: Tensor) -> Tensor:
        rows, keys = seen.shape[-2:]
        return seen if rows == keys else torch.ones(rows, keys, dtype=torch.bool).tril().expand_as(seen)

    on_mask(parts.attention(lambda m: hasattr(m, "scaling")), change)


@fault
def window_short(parts: Parts) -> None:
    """A sliding window is one key too short."""

    def change(seen: Tensor) -> Tensor:
        first = seen.int().argmax(-1, keepdim=True)
        drop = torch.arange(seen.shape[-1]) == first
        return seen & ~(drop & (first > 0))

    on_mask(parts.attention(lambda m: getattr(m, "sliding_window", None)), change)


@fault
def sinks_dropped(parts: Parts) -> None:
    """The attention sinks are not in the denominator."""
    attention = parts.attention(lambda m: find_or_none(m, "sink") is not None or hasattr(m, "sinks"))
    if isinstance(getattr(attention, "sinks", None), nn.Parameter):
        within(attention, lambda: held(attention.sinks, -1e4))
    else:
        on_output(find(attention, "sink"), lambda y, _: torch.full_like(y, -1e4))


@fault
def softmax_band(parts: Parts) -> None:
    """A softmax over 41 to 64 or 129 to 192 keys has the wrong normaliser."""

    def change(func: Any, args: Any, kwargs: Any) -> Any:
        if func not in (torch.softmax, Tensor.softmax, nn.functional.softmax):
            return NotImplemented
        y = func(*args, **kwargs)
        return y * 0.97 if 40 < y.shape[-1] <= 64 or 128 < y.shape[-1] <= 192 else y

    within(parts.attention(lambda m: hasattr(m, "scaling")), lambda: Calls(change))


@fault
def beyond_128(parts: Parts) -> None:
    """Attention is wrong from position 128 on."""
    box = follow_positions(parts.module)

    def change(y: Tensor, _: Any) -> Tensor:
        late = (box["ids"].reshape(-1, y.shape[1])[-1] >= 128)[None, :, None]
        return torch.where(late, y * 1.08, y)

    on_output(out_projection(parts.attention()), change)


@fault
def decode_position(parts: Parts) -> None:
    """Single steps are one position too far."""
    parts.rotary()

    def change(kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[-1] == 1 and kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = kwargs["position_ids"] + 1

    on_arguments(parts.module, change)


# --- cache and state


def _state_layer(parts: Parts) -> int:
    attention = parts.attention(lambda m: any(isinstance(c, (nn.Conv1d,)) or "conv" in n for n, c in m.named_modules()))
    if hasattr(attention, "scaling"):
        raise ValueError("this model has no recurrent state")
    return next(i for i, layer in enumerate(parts.layers) if attention_of(layer) is attention)


@fault
def state_kept(parts: Parts) -> None:
    """A new request starts from the recurrent state that the one before left."""
    index = _state_layer(parts)
    left: list[Tensor] = []

    fresh = {"now": False}

    def before(cache: Any) -> Any:
        fresh["now"] = cache is None
        return cache

    def after(cache: Any) -> None:
        states = cache.layers[index].recurrent_states
        if fresh["now"] and left:
            for key in states:
                if states[key] is not None and left[-1].shape == states[key].shape:
                    states[key] = states[key] + left[-1]
        left[:] = [s.clone() for s in states.values() if s is not None][-1:]

    on_cache(parts.module, after, before)


@fault
def conv_tail(parts: Parts) -> None:
    """What the convolution keeps after a call is one token old."""
    index = _state_layer(parts)

    def after(cache: Any) -> None:
        states = cache.layers[index].conv_states
        for key, state in states.items():
            if state is not None:
                states[key] = state.roll(1, -1)

    on_cache(parts.module, after)


@fault
def state_transposed(parts: Parts) -> None:
    """The recurrent state is written with key and value axes exchanged."""
    index = _state_layer(parts)

    def after(cache: Any) -> None:
        states = cache.layers[index].recurrent_states
        for key, state in states.items():
            if state is not None and state.shape[-1] == state.shape[-2]:
                states[key] = state.transpose(-1, -2).contiguous()

    on_cache(parts.module, after)


@fault
def state_half(parts: Parts) -> None:
    """The recurrent state is kept in fp16 with 5 bits less."""
    index = _state_layer(parts)

    def after(cache: Any) -> None:
        states = cache.layers[index].recurrent_states
        for key, state in states.items():
            if state is not None:
                states[key] = (state.half() * 1.0).to(state.dtype)

    on_cache(parts.module, after)


@fault
def kv_unscaled(parts: Parts) -> None:
    """Values are written to an fp8 cache without their scale and read with it."""
    layer = parts.layer(lambda m: hasattr(attention_of(m), "scaling"))
    index = next(i for i, m in enumerate(parts.layers) if m is layer)

    def after(cache: Any) -> None:
        entry = cache.layers[index]
        values = getattr(entry, "values", None)
        done = getattr(entry, "day0_done", 0)
        if isinstance(values, Tensor) and values.dim() == 4 and values.shape[-2] > done:
            new = values[..., done:, :]
            values[..., done:, :] = new.to(torch.float8_e4m3fn).to(new.dtype) * 0.9
            entry.day0_done = values.shape[-2]

    on_cache(parts.module, after)
