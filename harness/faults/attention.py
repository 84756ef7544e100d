"""Faults of attention: rotary tables, scales, masks, windows, sinks. Knows how modules are built, not their classes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from harness.faults.catalogue import NoPlace, fault
from harness.faults.parts import Part, Parts, find, find_or_none, out_projection
from harness.faults.ways import (
    Calls,
    follow_positions,
    held,
    on_arguments,
    on_mask,
    on_output,
    within,
)

Places = list[str]
ROTARY = "rotary|rope|angle|position"


def _mixed(parts: Parts, attention: Part) -> Places:
    """Return where an attention shows what it mixed: before its output projection, or as a whole.

    What an attention is given reaches its indexer too, where it has one.
    """
    chosen = [parts.tap(attention, ".indexer.*")] if find_or_none(attention, r"indexer$") is not None else []
    return [parts.tap(attention, ".core"), parts.tap(attention), *chosen]


def _other_table(parts: Parts, change: Any) -> Places:
    """Give one attention the rotary tables of a changed copy of the module that makes them."""
    rotary = parts.rotary()
    wrong = copy.deepcopy(rotary)
    for name, buffer in wrong.named_buffers():
        buffer.data = change(buffer.data) if "inv_freq" in name else buffer.data
    last: list[Any] = []
    rotary.register_forward_pre_hook(lambda _, a, k: last.append((a, k)), with_kwargs=True)

    def swap(kwargs: dict[str, Any]) -> None:
        if kwargs.get("position_embeddings") is None:
            raise NoPlace("this attention is given no rotary table")
        kwargs["position_embeddings"] = wrong(*last[-1][0], **last[-1][1])
        last[:] = last[-1:]

    attention = parts.softmax_attention()
    on_arguments(attention, swap)
    return [parts.tap(attention, ".in.position_embeddings*"), *_mixed(parts, attention), parts.tap(attention, ".q*")]


@fault("TX01", cause=ROTARY, needs="rotary")
def rope_base(parts: Parts) -> Places:
    """One layer's rotary angles come from another base."""
    return _other_table(parts, lambda table: table**0.8)


@fault("TX05", cause=ROTARY, needs="rotary")
def rope_middle_bands(parts: Parts) -> Places:
    """The middle bands of one layer's rotary frequencies are 5 % off, as from a rounded correction range."""

    def change(table: Tensor) -> Tensor:
        table = table.clone()
        third = max(1, table.numel() // 3)
        table[third : 2 * third] *= 1.05
        return table

    return _other_table(parts, change)


@fault("TX08", stage="text|long_context", cause=ROTARY, needs="rotary")
def rope_in_bf16(parts: Parts) -> Places:
    """The rotary frequencies of the whole model are kept in bf16."""
    rotary = parts.rotary()
    for name, buffer in rotary.named_buffers():
        if "inv_freq" in name:
            buffer.data = buffer.data.bfloat16().to(buffer.dtype)
    return [parts.tap(rotary), parts.tap(rotary, ".*")]


@fault(cause=ROTARY, needs="rotary")
def rope_style(parts: Parts) -> Places:
    """One layer pairs neighbours with tables made for halves (or the reverse)."""
    parts.rotary()
    attention = parts.softmax_attention()

    def change(kwargs: dict[str, Any]) -> None:
        tables = kwargs.get("position_embeddings")
        if tables is None:
            raise NoPlace("this attention is given no rotary table")
        kwargs["position_embeddings"] = tuple(t[..., : t.shape[-1] // 2].repeat_interleave(2, -1) for t in tables)

    on_arguments(attention, change)
    return [parts.tap(attention, ".in.position_embeddings*"), *_mixed(parts, attention)]


@fault(stage="text|long_context", cause=ROTARY, needs="rotary, more than 128 tokens")
def positions_coarse(parts: Parts) -> Places:
    """Positions from 128 on lose their last bit, as in a type of 7 bits."""
    rotary = parts.rotary()

    def change(kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("position_ids")
        if ids is not None:
            kwargs["position_ids"] = torch.where(ids >= 128, ids // 2 * 2, ids)

    on_arguments(parts.module, change)
    return [parts.tap(rotary), parts.tap(rotary, ".*")]


@fault("TX04", cause="scale|times|softmax|slope", needs="softmax attention")
def attention_scale(parts: Parts) -> Places:
    """The softmax scale is 10 % off."""
    attention = parts.softmax_attention()
    attention.scaling = attention.scaling * 1.1
    return _mixed(parts, attention)


@fault(cause="mask|causal|future", needs="softmax attention with a mask")
def mask_future(parts: Parts) -> Places:
    """Every query sees one key of the future."""
    attention = parts.softmax_attention()
    on_mask(attention, lambda seen: seen | seen.roll(1, -1))
    return [parts.tap(attention, ".in.attention_mask"), *_mixed(parts, attention)]


@fault(cause="mask|causal|position|token", needs="softmax attention with a mask")
def mask_first_key(parts: Parts) -> Places:
    """No query but the first sees the first key."""

    def change(seen: Tensor) -> Tensor:
        seen = seen.clone()
        seen[..., 1:, 0] = False
        return seen

    attention = parts.softmax_attention()
    on_mask(attention, change)
    return [parts.tap(attention, ".in.attention_mask"), *_mixed(parts, attention)]


@fault("TX13", cause="mask|chunk|decode|phase", needs="softmax attention with a mask, phases")
def mask_top_left(parts: Parts) -> Places:
    """In a chunk the causal mask is aligned with the first key, not with the last."""

    def change(seen: Tensor) -> Tensor:
        rows, keys = seen.shape[-2:]
        return seen if rows == keys else torch.ones(rows, keys, dtype=torch.bool).tril().expand_as(seen)

    attention = parts.softmax_attention()
    on_mask(attention, change)
    return [parts.tap(attention, ".in.attention_mask"), *_mixed(parts, attention), _layer_of(parts.tap(attention))]


def _layer_of(tap: str) -> str:
    """Return the layer around an attention: a phase is replayed by layers only."""
    return tap.rpartition(".")[0]


@fault(cause="window|mask|position", needs="a sliding window")
def window_short(parts: Parts) -> Places:
    """A sliding window is one key too short."""

    def change(seen: Tensor) -> Tensor:
        first = seen.int().argmax(-1, keepdim=True)
        drop = torch.arange(seen.shape[-1]) == first
        return seen & ~(drop & (first > 0))

    attention = parts.attention(lambda m: getattr(m, "sliding_window", None))
    on_mask(attention, change)
    return [parts.tap(attention, ".in.attention_mask"), *_mixed(parts, attention)]


@fault(cause="window|mask|position", needs="a sliding window")
def window_ignored(parts: Parts) -> Places:
    """A layer with a sliding window attends to all keys."""
    attention = parts.attention(lambda m: getattr(m, "sliding_window", None))

    def change(seen: Tensor) -> Tensor:
        rows, keys = seen.shape[-2:]
        return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows).expand_as(seen)

    on_mask(attention, change)
    return [parts.tap(attention, ".in.attention_mask"), *_mixed(parts, attention)]


@fault("TX16", cause="sink", needs="attention sinks")
def sinks_dropped(parts: Parts) -> Places:
    """The attention sinks are not in the denominator."""
    attention = parts.attention(lambda m: find_or_none(m, "sink") is not None or hasattr(m, "sinks"))
    if isinstance(getattr(attention, "sinks", None), nn.Parameter):
        within(attention, lambda: held(attention.sinks, -1e4))
        return _mixed(parts, attention)
    part = find(attention, "sink")
    on_output(part, lambda y, _: torch.full_like(y, -1e4))
    return [parts.tap(part), *_mixed(parts, attention)]


@fault("AC06", cause="softmax|off|wrong|slope|times", needs="softmax attention")
def softmax_band(parts: Parts) -> Places:
    """A softmax over 41 to 64 or 129 to 192 keys has the wrong normaliser."""

    def change(func: Any, args: Any, kwargs: Any) -> Any:
        if func not in (torch.softmax, Tensor.softmax, nn.functional.softmax):
            return NotImplemented
        y = func(*args, **kwargs)
        return y * 0.97 if 40 < y.shape[-1] <= 64 or 128 < y.shape[-1] <= 192 else y

    attention = parts.softmax_attention()
    within(attention, lambda: Calls(change))
    return _mixed(parts, attention)


@fault("LC04", stage="text|long_context", cause="position|token", needs="more than 128 tokens")
def beyond_128(parts: Parts) -> Places:
    """Attention is wrong from position 128 on."""
    box = follow_positions(parts.module)
    attention = parts.attention()
    part = out_projection(attention)

    def change(y: Tensor, _: Any) -> Tensor:
        late = (box["ids"].reshape(-1, y.shape[1])[-1] >= 128)[None, :, None]
        return torch.where(late, y * 1.08, y)

    on_output(part, change)
    return [_layer_of(parts.tap(attention)), parts.tap(part), parts.tap(attention)]


@fault("SP06", stage="text|long_context", cause="position|token|off|wrong", needs="a call of more than 128 tokens")
def launch_swallowed(parts: Parts) -> Places:
    """A step of more than 128 tokens exceeds a grid limit: attention leaves its buffer as it was."""
    attention = parts.attention()
    part = out_projection(attention)
    on_output(part, lambda y, _: torch.zeros_like(y) if y.shape[1] > 128 else y)
    return [_layer_of(parts.tap(attention)), parts.tap(part), parts.tap(attention)]


@fault(cause="head", needs="softmax attention")
def head_scaled(parts: Parts) -> Places:
    """One head is 5 % too large."""
    attention = parts.softmax_attention()
    part = out_projection(attention)
    heads = parts.module.config.get_text_config().num_attention_heads

    def change(_: Part, args: Any) -> Any:
        x = args[0].unflatten(-1, (heads, -1)).clone()
        x[..., 1, :] *= 1.05
        return (x.flatten(-2), *args[1:])

    part.register_forward_pre_hook(change)
    return [*_mixed(parts, attention), parts.tap(part)]


@fault(cause="head|value|off|wrong|projection", needs="grouped keys and values")
def value_heads_exchanged(parts: Parts) -> Places:
    """Two heads of values lie in each other's place."""
    attention = parts.attention(lambda m: find_or_none(m, r"^v_proj$"))
    part = find(attention, r"^v_proj$")
    config = parts.module.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads

    def change(y: Any, _: Any) -> Any:
        return y.unflatten(-1, (heads, -1)).roll(1, -2).flatten(-2)

    on_output(part, change)
    return [parts.tap(part), parts.tap(part, ".*")]


@fault("SP16", cause="off|wrong|causal|core", needs="recurrent state")
def rounding_anchor_leaks(parts: Parts) -> Places:
    """What a recurrent mixer gives for a token depends a little on the token after it."""
    _, mixer = parts.recurrent()
    part = out_projection(mixer)

    def change(_: Part, args: Any) -> Any:
        x = args[0]
        return (x + 0.02 * torch.cat((x[:, 1:], x[:, -1:]), 1), *args[1:]) if x.shape[1] > 1 else args

    part.register_forward_pre_hook(change)
    return [*_mixed(parts, mixer), parts.tap(part)]
