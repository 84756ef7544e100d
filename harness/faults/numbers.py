"""Faults of matrices, norms, residuals, embeddings and logits. Knows how modules are built, not their classes."""

from __future__ import annotations

import functools
import random
import re
from typing import Any

import torch
from torch import Tensor, nn

from harness.faults.catalogue import NoPlace, fault
from harness.faults.parts import Part, Parts, find, find_or_none, out_projection
from harness.faults.ways import given, held, on_arguments, on_output, other_activation, widen_logits, within

Places = list[str]
WHOLE = "off|wrong|scale|times|projection|linear|slope"
"""Words of which a cause of a plainly wrong value has one."""


@fault(cause=WHOLE)
def linear_scaled(parts: Parts) -> Places:
    """An output projection is 1 % too large."""
    part = out_projection(parts.attention())
    on_output(part, lambda y, _: y * 1.01)
    return [parts.tap(part), parts.tap(parts.attention())]


@fault(cause=WHOLE)
def linear_bias_lost(parts: Parts) -> Places:
    """The bias of an output projection is not added."""
    part = out_projection(parts.attention(lambda m: isinstance(getattr(out_projection(m), "bias", None), nn.Parameter)))
    within(part, lambda: held(part.bias, 0.0))
    return [parts.tap(part)]


@fault("LD20", cause="only|phase|prefill|off|wrong", needs="a call of at least 8 tokens")
def gemm_offset(parts: Parts) -> Places:
    """The path for 8 tokens and more subtracts a zero point twice; the path for one token does not."""
    part = out_projection(parts.attention())
    on_output(part, lambda y, _: y - 0.05 if y.shape[-2] >= 8 else y)
    return [parts.tap(part), parts.tap(parts.attention())]


def _rows_times(parts: Parts, rows: slice, factor: float) -> Places:
    """Multiply some tokens of an output projection."""
    part = out_projection(parts.attention())

    def change(y: Tensor, _: Any) -> Tensor:
        y = y.clone()
        y[..., rows, :] *= factor
        return y

    on_output(part, change)
    return [parts.tap(part), parts.tap(parts.attention())]


@fault("AC17", cause="token|position|off|wrong", needs="a call of more than 32 tokens")
def linear_tile(parts: Parts) -> Places:
    """One tile of rows (32 to 47) of an output projection is summed by a kernel that is 5 % off."""
    return _rows_times(parts, slice(32, 48), 1.05)


@fault(cause="token|second|2|off|wrong", needs="a call of at least 8 tokens")
def linear_second_row(parts: Parts) -> Places:
    """A kernel takes two tokens at a time, and the second one of each pair comes out 1 % too large."""
    return _rows_times(parts, slice(1, None, 2), 1.01)


@fault(cause="position|grow|late|off|wrong", needs="a call of at least 8 tokens")
def linear_drift(parts: Parts) -> Places:
    """An output projection is off by more with every token before it: 0.1 % for each."""
    part = out_projection(parts.attention())

    def change(y: Tensor, _: Any) -> Tensor:
        return y * (1 + 1e-3 * torch.arange(y.shape[-2], device=y.device)[:, None]).to(y.dtype)

    on_output(part, change)
    return [parts.tap(part), parts.tap(parts.attention())]


@fault(cause="race|twice|chance")
def sum_left_to_chance(parts: Parts) -> Places:
    """The last tile of an output projection is read before its sum is complete: up to a tenth is missing, by chance."""
    part, chance = out_projection(parts.attention()), random.Random(5)

    def change(y: Tensor, _: Any) -> Tensor:
        y, width = y.clone(), max(1, y.shape[-1] // 8)
        y[..., -width:] *= 1 - 0.1 * chance.random()
        return y

    on_output(part, change)
    return [parts.tap(part), parts.tap(parts.attention())]


@fault(cause="round|off|wrong|bias|slope")
def rounded_towards_zero(parts: Parts) -> Places:
    """An output projection cuts its result to the port's precision instead of rounding it."""
    part = out_projection(parts.attention())
    if not isinstance(getattr(part, "weight", None), Tensor):
        raise NoPlace("the output projection is no plain matrix")

    def forward(x: Tensor) -> Tensor:
        y = nn.functional.linear(x.float(), part.weight.float(), None if part.bias is None else part.bias.float())
        near = y.to(x.dtype)
        up = near.float().abs() > y.abs()
        return torch.where(up, torch.nextafter(near, torch.zeros_like(near)), near)

    part.forward = forward
    return [parts.tap(part), parts.tap(parts.attention())]


@fault(cause="channel|off|wrong")
def block_of_channels(parts: Parts) -> Places:
    """The last eighth of an output projection's channels has another block scale (6 %)."""
    part = out_projection(parts.attention())

    def change(y: Tensor, _: Any) -> Tensor:
        y = y.clone()
        y[..., -(y.shape[-1] // 8) :] *= 1.06
        return y

    on_output(part, change)
    return [parts.tap(part), parts.tap(parts.attention())]


@fault("LD25", cause="norm|offset|weight")
def norm_offset(parts: Parts) -> Places:
    """An RMSNorm multiplies by 1 + w where the model says w (or the reverse)."""
    norm = find(parts.layer(), r"(^|_)input_layernorm$")

    def change(y: Tensor, call: Any) -> Tensor:
        x: Tensor = given(call).float()
        return (y.float() + x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).to(y.dtype)

    on_output(norm, change)
    return [parts.tap(norm)]


@fault("TX09", cause="norm|epsilon")
def norm_eps(parts: Parts) -> Places:
    """An RMSNorm has a far larger epsilon."""
    norm = find(parts.layer(), r"post_attention_layernorm$")
    name = next((n for n in ("variance_epsilon", "eps") if hasattr(norm, n)), None)
    if name is None:
        raise NoPlace("this norm has no epsilon of its own")
    setattr(norm, name, 0.05)
    return [parts.tap(norm)]


@fault(cause="norm|q_norm|k_norm|off|wrong", needs="norms of queries")
def query_norm_skipped(parts: Parts) -> Places:
    """Queries are not normalised."""
    attention = parts.attention(lambda m: find_or_none(m, r"^q_norm$"))
    norm = find(attention, r"^q_norm$")
    on_output(norm, lambda y, call: given(call).to(y.dtype))
    return [parts.tap(norm)]


@fault(cause="residual|glue|boundary")
def residual_scaled(parts: Parts) -> Places:
    """A layer adds its input once and 2 % more."""
    layer = parts.layer()

    def change(y: Tensor, call: Any) -> Tensor:
        x = given(call)
        return y + 0.02 * x if isinstance(x, Tensor) and x.shape == y.shape else y * 1.02

    on_output(layer, change)
    return [parts.tap(layer)]


@fault(cause="off|wrong|mid|residual|glue")
def layer_skipped(parts: Parts) -> Places:
    """A layer hands on what it was given."""
    layer = parts.layer()

    def change(y: Tensor, call: Any) -> Tensor:
        x = given(call)
        return x if isinstance(x, Tensor) and x.shape == y.shape else y * 0.5

    on_output(layer, change)
    return [parts.tap(layer)]


@fault(cause="finite")
def nan_in_a_layer(parts: Parts) -> Places:
    """One channel of a layer is not a number from the ninth token on."""
    layer = parts.layer()

    def change(y: Tensor, _: Any) -> Tensor:
        if y.dim() < 3 or y.shape[1] < 9:
            return y
        y = y.clone()
        y[:, 8:, ..., 3] = float("nan")
        return y

    on_output(layer, change)
    return [parts.tap(layer)]


@fault("TX25", cause="finite|off|wrong", needs="a call of at least 32 tokens")
def half_overflow(parts: Parts) -> Places:
    """What a feed-forward block gives goes through fp16 in calls of 32 tokens and more, scaled by 2^16."""
    part = parts.feed_forward()

    def change(y: Tensor, _: Any) -> Tensor:
        rows = y.shape[-2] if y.dim() > 1 else 0
        return ((y.float() * 2.0**15).half().float() / 2.0**15).to(y.dtype) if rows >= 32 else y

    on_output(part, change)
    return [parts.tap(part)]


@fault(cause="embed|table|scale|times|off|wrong")
def embedding_scaled(parts: Parts) -> Places:
    """Embeddings are multiplied by a factor of 1.02 that the model does not have."""
    part = parts.module.get_input_embeddings()
    on_output(part, lambda y, _: y * 1.02)
    return [parts.tap(part)]


@fault("TX29", cause="embed|ids|token|off|wrong")
def stale_token(parts: Parts) -> Places:
    """The last id of a call of several tokens is the one before it: a buffer was read too early."""
    part = parts.module.get_input_embeddings()

    def change(kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"]
        if ids.shape[-1] > 1:
            kwargs["input_ids"] = torch.cat((ids[..., :-1], ids[..., -2:-1]), -1)

    on_arguments(parts.module, change)
    return [parts.tap(part), parts.tap(part, ".*")]


@fault(cause="norm|off|wrong|scale|times")
def final_norm_scaled(parts: Parts) -> Places:
    """The last norm is 1 % too large."""
    owner = next(m for m in parts.module.modules() if any(c is parts.layers[0] for lst in m.children()
                 if isinstance(lst, nn.ModuleList) for c in lst))  # fmt: skip
    norm = find(owner, r"^norm$")
    on_output(norm, lambda y, _: y * 1.01)
    return [parts.tap(norm)]


@fault("ST12", cause="logits|head|scale|times|off|wrong")
def logits_scaled(parts: Parts) -> Places:
    """The logits lack a scale of 1.03."""
    head = parts.head()
    on_output(head, lambda y, _: y * 1.03)
    return [parts.tap(head), "logits"]


@fault("TX11", cause="cap|logits|head|off|wrong")
def logits_capped(parts: Parts) -> Places:
    """The logits go through a soft cap that the model does not have, or miss the one it has."""
    cap = next((m for p, m in parts.module.named_modules() if re.search(r"logit\w*cap", p)), None)
    if cap is not None:
        cap.forward = functools.wraps(cap.forward)(lambda x: x)
        return [parts.tap(cap), "logits"]
    head = parts.head()
    on_output(head, lambda y, _: 6 * torch.tanh(y / 6))
    return [parts.tap(head), "logits"]


@fault("MC20", cause="padded")
def vocabulary_unmasked(parts: Parts) -> Places:
    """Logits have columns beyond the vocabulary, which are zero."""
    widen_logits(parts, 0.0)
    return ["logits"]


@fault(cause="head|logits|norm|off|wrong")
def last_token_repeated(parts: Parts) -> Places:
    """The logits of a token are those of the one before it."""
    head = parts.head()
    on_output(head, lambda y, _: torch.cat((y[:, :1], y[:, :-1]), 1) if y.shape[1] > 1 else y)
    return [parts.tap(head), "logits"]


@fault(cause="activation|gate|off|wrong|mlp|clamp")
def dense_activation(parts: Parts) -> Places:
    """A dense block has another activation than the model's."""

    def block(layer: Part) -> Part:
        found = find(layer, r"^mlp$")
        if find_or_none(layer, r"experts") is not None:
            raise NoPlace("no dense block")
        other_activation(getattr(found, "act_fn", None))
        return found

    part = block(parts.layer(block))
    part.act_fn = other_activation(part.act_fn)
    return [parts.tap(part), parts.tap(part, ".*")]


@fault(cause="head|core|order|off|wrong")
def heads_exchanged(parts: Parts) -> Places:
    """The output projection finds two heads in each other's place."""
    attention = parts.attention()
    part = out_projection(attention)
    heads = getattr(attention, "num_heads", 0) or parts.module.config.get_text_config().num_attention_heads

    def change(args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0].unflatten(-1, (heads, -1))
        order = torch.arange(heads)
        order[0], order[1] = 1, 0
        return (x[..., order, :].flatten(-2), *args[1:])

    part.register_forward_pre_hook(lambda _, args: change(args))
    return [parts.tap(part), parts.tap(attention, ".core"), parts.tap(attention)]
