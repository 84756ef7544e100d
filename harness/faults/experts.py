"""Faults of mixtures of experts: routing, weights, experts. Knows how modules are built, not their classes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from harness.faults.catalogue import NoPlace, fault
from harness.faults.parts import Part, Parts, find, router_of
from harness.faults.ways import Calls, held, on_topk, other_activation, within

Places = list[str]
CHOICE = "chosen|choice|k,|router|route|bias|group"


def _count(router: Part) -> int:
    """Return the number of experts that a router knows."""
    weight = getattr(router, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, Tensor) else int(getattr(router, "num_experts", 8))


def _routed(parts: Parts, router: Part) -> Places:
    """Return where a wrong choice shows: with the choice itself."""
    name = parts.tap(router)
    return [f"{name}.topk", f"{name}.topk.*", name, f"{name}.out.*", f"{name.rpartition('.')[0]}.experts.in.*"]


def _weighted(parts: Parts, router: Part) -> Places:
    """Return where wrong weights of the chosen show."""
    name = parts.tap(router)
    return [f"{name}.out.*", f"{name}.weights", name, f"{name.rpartition('.')[0]}.experts.in.*"]


def _rewrite_weights(router: Part, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Replace the weights that a router gives: `change(weights, logits, chosen)`."""

    def hook(_: Part, args: Any, output: Any) -> Any:
        logits = output[0]
        chosen = next(o for o in output if not o.is_floating_point())
        return tuple(
            change(o, logits, chosen).to(o.dtype)
            if o.is_floating_point() and o is not logits and o.shape[0] == chosen.shape[0] and o.dim() == 2
            else o
            for o in output
        )

    router.register_forward_hook(hook)


@fault(cause=CHOICE, needs="a router with a bias")
def router_bias_ignored(parts: Parts) -> Places:
    """The router's correction bias (or its bias) takes no part."""

    def bias_of(layer: Part) -> Any:
        router = router_of(layer)
        return getattr(router, "e_score_correction_bias", getattr(router, "bias", None))

    router = router_of(parts.layer(lambda m: bias_of(m) is not None))
    bias = getattr(router, "e_score_correction_bias", None)
    within(router, lambda: held(bias if bias is not None else router.bias, 0.0))
    return _routed(parts, router)


@fault("TX19", cause="weight|renormalisation|softmax|sigmoid", needs="a router")
def router_raw_weights(parts: Parts) -> Places:
    """Routing weights are the raw logits of the chosen experts."""
    router = parts.router()
    _rewrite_weights(router, lambda old, logits, chosen: logits.gather(-1, chosen[..., : old.shape[-1]]))
    return _weighted(parts, router)


@fault(cause="weight|renormalisation|scaling", needs="a router")
def router_weights_unnormalised(parts: Parts) -> Places:
    """Routing weights are 5 % too small."""
    router = parts.router()
    _rewrite_weights(router, lambda old, *_: old * 0.95)
    return _weighted(parts, router)


@fault(cause="weight|scaling|renormalisation|factor", needs="a scaling factor of routed experts")
def routed_factor_twice(parts: Parts) -> Places:
    """The scaling factor of routed experts is applied twice."""
    router = parts.router()
    factor = getattr(router, "routed_scaling_factor", None) or getattr(router, "route_scale", None)
    if not isinstance(factor, (int, float)) or factor == 1:
        raise NoPlace("this router has no scaling factor")
    _rewrite_weights(router, lambda old, *_: old * factor)
    return _weighted(parts, router)


@fault(cause="weight|renormalisation|softmax|sigmoid", needs="a router")
def router_weights_exchanged(parts: Parts) -> Places:
    """The weights of the chosen experts are handed on in another order than the experts."""
    router = parts.router()
    _rewrite_weights(router, lambda old, *_: old.flip(-1))
    return _weighted(parts, router)


@fault(cause=CHOICE, needs="a router")
def router_one_less(parts: Parts) -> Places:
    """One expert less is chosen."""
    router = parts.router()
    count = _count(router)
    on_topk(router, lambda x, k: torch.topk(x, k - 1), lambda x: x.shape[-1] >= count)
    return _routed(parts, router)


@fault("AC08", cause=CHOICE, needs="a router")
def topk_last_wrong(parts: Parts) -> Places:
    """A top-k kernel returns 0 for the last index of the router."""
    router = parts.router()
    count = _count(router)

    def change(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, indices = torch.topk(x, k)
        wrong = indices.clone()
        wrong[..., -1] = 0
        return values, wrong

    on_topk(router, change, lambda x: x.shape[-1] >= count)
    return _routed(parts, router)


@fault("TX20", cause=CHOICE, needs="groups of experts")
def group_of_the_best(parts: Parts) -> Places:
    """A group is scored by its best expert instead of its best two."""

    def grouped(layer: Part) -> bool:
        return int(getattr(router_of(layer), "num_group", 1) or 1) > 1

    router = router_of(parts.layer(grouped))
    inside = _count(router) // int(router.num_group)

    def change(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, indices = torch.topk(x, k)
        values = values.clone()
        values[..., 1:] = 0
        return values, indices

    on_topk(router, change, lambda x: x.dim() == 3 and x.shape[-1] == inside)
    return _routed(parts, router)


@fault("TX20", cause=CHOICE, needs="groups of experts")
def group_mask_ignored(parts: Parts) -> Places:
    """Experts of every group may be chosen."""

    def grouped(layer: Part) -> bool:
        return int(getattr(router_of(layer), "num_group", 1) or 1) > 1

    router = router_of(parts.layer(grouped))

    def change(func: Any, args: Any, kwargs: Any) -> Any:
        return args[0] if func in (Tensor.masked_fill, torch.masked_fill) else NotImplemented

    within(router, lambda: Calls(change))
    return _routed(parts, router)


@fault(cause="weight|sigmoid|softmax|renormalisation|chosen", needs="a router with sigmoid scores")
def router_softmax(parts: Parts) -> Places:
    """Scores are a softmax over experts where the model takes a sigmoid of each."""
    router = router_of(parts.layer(lambda m: hasattr(router_of(m), "e_score_correction_bias")))

    def change(func: Any, args: Any, kwargs: Any) -> Any:
        return torch.softmax(args[0], -1) if func in (torch.sigmoid, Tensor.sigmoid) else NotImplemented

    within(router, lambda: Calls(change))
    return [*_routed(parts, router), *_weighted(parts, router), f"{parts.tap(router)}.*"]


def _expert_call(parts: Parts, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Places:
    """Give the experts other choices and weights: `change(chosen, weights)`."""
    experts = parts.experts()
    inner = experts.forward

    @functools.wraps(inner)
    def forward(hidden: Tensor, index: Tensor, weights: Tensor, *args: Any, **kwargs: Any) -> Any:
        return inner(hidden, *change(index, weights), *args, **kwargs)

    experts.forward = forward
    return [parts.tap(experts)]


@fault("MC11", cause="expert|order|off|wrong", needs="experts")
def experts_exchanged(parts: Parts) -> Places:
    """Two experts lie in each other's place."""

    def change(index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.arange(64)
        order[1], order[2] = 2, 1
        return order[index].to(index.dtype), weights

    return _expert_call(parts, change)


def _one_expert(parts: Parts, factor: float) -> Places:
    which: list[int] = []

    def change(index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        which[:] = which or [int(index.flatten()[0])]
        return index, torch.where(index == which[0], weights * factor, weights)

    return _expert_call(parts, change)


@fault(cause="expert|scale|times|slope|off|wrong", needs="experts")
def expert_scaled(parts: Parts) -> Places:
    """One expert's output is 10 % too large."""
    return _one_expert(parts, 1.1)


@fault(cause="expert|scale|times|slope|off|wrong", needs="experts")
def expert_slightly_scaled(parts: Parts) -> Places:
    """One expert's output is 1 % too large."""
    return _one_expert(parts, 1.01)


@fault(cause="expert|dropped|capacity|off|wrong", needs="experts")
def expert_capacity(parts: Parts) -> Places:
    """An expert takes at most 8 tokens of a call and drops the rest."""

    def change(index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        kept = torch.ones_like(weights)
        for expert in set(index.flatten().tolist()):
            rows = (index == expert).nonzero()
            for token, place in rows[8:].tolist():
                kept[token, place] = 0
        return index, weights * kept

    return _expert_call(parts, change)


@fault("TX17", cause="clamp|gate|activation|expert|off|wrong", needs="a clamp in the experts' activation")
def clamp_of_experts(parts: Parts) -> Places:
    """The experts' activation is clamped at a quarter of its limit."""
    experts = parts.experts()
    name = next((n for n in ("limit", "swiglu_limit") if isinstance(getattr(experts, n, None), (int, float))), None)
    if name is None:
        raise NoPlace("these experts have no clamp")
    setattr(experts, name, getattr(experts, name) / 16)
    return [parts.tap(experts)]


@fault("TX17", cause="activation|gate|expert|off|wrong", needs="a slope in the experts' activation")
def slope_of_experts(parts: Parts) -> Places:
    """The experts' activation has a slope of 1."""
    experts = parts.experts()
    if not isinstance(getattr(experts, "alpha", None), (int, float)):
        raise NoPlace("the activation of these experts has no slope")
    experts.alpha = 1.0
    return [parts.tap(experts)]


@fault("TX17", cause="activation|gate|expert|off|wrong", needs="an activation of experts")
def activation_of_experts(parts: Parts) -> Places:
    """The routed experts have another activation."""
    experts = parts.experts()
    experts.act_fn = other_activation(getattr(experts, "act_fn", None))
    return [parts.tap(experts)]


@fault("TX23", cause="activation|gate|off|wrong", needs="a shared expert")
def shared_activation(parts: Parts) -> Places:
    """The shared expert has another activation."""

    def place(layer: Part) -> Part:
        found = find(layer, r"shared_experts?$")
        other_activation(getattr(found, "act_fn", None))
        return found

    shared = place(parts.layer(place))
    shared.act_fn = other_activation(shared.act_fn)
    return [parts.tap(shared), parts.tap(shared, ".*")]


@fault(cause="gate|shared|off|wrong", needs="a gate of the shared expert")
def shared_gate_ignored(parts: Parts) -> Places:
    """The gate of the shared expert is always open."""
    gate = find(parts.layer(lambda m: find(m, r"shared_expert_gate$")), r"shared_expert_gate$")
    gate.register_forward_hook(lambda _, args, y: torch.full_like(y, 20.0))
    return [parts.tap(gate)]


@fault("AC01", cause="activation|gate|expert|off|wrong", needs="experts with gate and up in one matrix")
def strides_ignored(parts: Parts) -> Places:
    """The experts' activation reads a slice as if it lay in one piece."""
    experts = parts.experts()
    activation = getattr(experts, "act_fn", None)
    if not isinstance(activation, nn.Module):
        raise NoPlace("these experts have no activation of their own")

    def read(x: Tensor) -> Tensor:
        if x.is_contiguous() or x.numel() == 0:
            return x
        return torch.as_strided(x, x.shape, torch.empty(x.shape).stride(), x.storage_offset())

    activation.register_forward_pre_hook(lambda _, args: (read(args[0]), *args[1:]))
    return [parts.tap(experts)]
