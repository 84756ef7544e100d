"""Faults of mixtures of experts and of sparse selection. Knows how modules are built, not their classes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from model_parts import (
    Calls,
    Parts,
    allowed,
    bind_names,
    fault,
    find_or_none,
    held,
    on_arguments,
    on_output,
    router_of,
    within,
)
from torch import Tensor, nn


@fault
def router_bias_ignored(parts: Parts) -> None:
    """The router's correction bias (or its bias) takes no part."""
    router = router_of(
        parts.layer(lambda m: getattr(router_of(m), "e_score_correction_bias", getattr(router_of(m), "bias", None)))
    )
    bias = getattr(router, "e_score_correction_bias", None)
    within(router, lambda: held(bias if bias is not None else router.bias, 0.0))


@fault
def router_raw_weights(parts: Parts) -> None:
    """Routing weights are the raw logits of the chosen experts."""
    router = parts.router()

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        logits = output[0]
        chosen = next(o for o in output if not o.is_floating_point())
        return tuple(
            logits.gather(-1, chosen[..., : o.shape[-1]]).to(o.dtype)
            if o.is_floating_point() and o is not logits and o.shape == chosen.shape
            else o
            for o in output
        )

    router.register_forward_hook(hook)


@fault
def router_weights_unnormalised(parts: Parts) -> None:
    """Routing weights are 5 % too small."""
    router = parts.router()

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        chosen = next(o for o in output if not o.is_floating_point())
        return tuple(o * 0.95 if o.is_floating_point() and o.shape == chosen.shape else o for o in output)

    router.register_forward_hook(hook)


def _topk(module: nn.Module, change: Callable[..., Any], width: Callable[[Tensor], bool]) -> None:
    def watch(func: Any, args: Any, kwargs: Any) -> Any:
        if func not in (torch.topk, Tensor.topk) or not width(args[0]):
            return NotImplemented
        given = dict(zip(("input", "k", "dim"), args, strict=False)) | kwargs
        return change(func, given)

    within(module, lambda: Calls(watch))


@fault
def router_one_less(parts: Parts) -> None:
    """One expert less is chosen."""
    router = parts.router()
    count = router.weight.shape[0] if hasattr(router, "weight") else 8

    def change(func: Any, given: dict[str, Any]) -> Any:
        given["k"] = given["k"] - 1
        return torch.topk(**given)

    _topk(router, change, lambda x: x.shape[-1] >= count)


@fault
def topk_last_wrong(parts: Parts) -> None:
    """A top-k kernel returns 0 for the last index of the router."""
    router = parts.router()
    count = router.weight.shape[0] if hasattr(router, "weight") else 8

    def change(func: Any, given: dict[str, Any]) -> Any:
        values, indices = torch.topk(**given)
        wrong = indices.clone()
        wrong[..., -1] = 0
        return torch.return_types.topk((values, wrong))

    _topk(router, change, lambda x: x.shape[-1] >= count)


@fault
def experts_exchanged(parts: Parts) -> None:
    """Two experts lie in each other's place."""
    experts = parts.experts()
    inner = experts.forward

    @functools.wraps(inner)
    def forward(hidden: Tensor, index: Tensor, *args: Any, **kwargs: Any) -> Any:
        order = torch.arange(64)
        order[1], order[2] = 2, 1
        return inner(hidden, order[index].to(index.dtype), *args, **kwargs)

    experts.forward = forward  # type: ignore[method-assign]


@fault
def expert_scaled(parts: Parts) -> None:
    """One expert's output is 10 % too large."""
    experts = parts.experts()
    inner = experts.forward
    which: list[int] = []

    @functools.wraps(inner)
    def forward(hidden: Tensor, index: Tensor, weights: Tensor, *args: Any, **kwargs: Any) -> Any:
        which.append(which[0] if which else int(index.flatten()[0]))
        return inner(hidden, index, torch.where(index == which[0], weights * 1.1, weights), *args, **kwargs)

    experts.forward = forward  # type: ignore[method-assign]


@fault
def shared_activation(parts: Parts) -> None:
    """The shared expert (the dense MLP where there is none) has another activation."""

    def place(layer: nn.Module) -> nn.Module:
        for pattern in (r"shared_experts?$", r"mlp$"):
            found = find_or_none(layer, pattern)
            if found is not None and hasattr(found, "act_fn"):
                return found
        raise ValueError("no activation to exchange")

    place(parts.layer(place)).act_fn = nn.GELU()


# --- sparse selection


@fault
def indexer_rope(parts: Parts) -> None:
    """The indexer rotates neighbours instead of halves."""
    indexer = parts.indexer()

    def change(kwargs: dict[str, Any]) -> None:
        if kwargs.get("position_embeddings") is None:
            raise ValueError("this indexer has no rotary table")
        kwargs["position_embeddings"] = tuple(
            t[..., : t.shape[-1] // 2].repeat_interleave(2, -1) for t in kwargs["position_embeddings"]
        )

    parts.rotary()
    bind_names(indexer)
    on_arguments(indexer, change)


@fault
def indexer_one_sided(parts: Parts) -> None:
    """A rotation is applied to the indexer's queries only."""
    indexer = parts.indexer()
    draw = torch.Generator().manual_seed(1)
    width = indexer.wk.weight.shape[0]
    turn = torch.linalg.qr(torch.randn(width, width, generator=draw)).Q
    on_output(indexer.wq_b, lambda y, _: (y.unflatten(-1, (-1, width)).float() @ turn).flatten(-2).to(y.dtype))


@fault
def indexer_future(parts: Parts) -> None:
    """The indexer may choose one key of the future."""
    indexer = parts.indexer()
    bind_names(indexer)

    def change(kwargs: dict[str, Any]) -> None:
        mask = kwargs["attention_mask"]
        seen = allowed(mask)
        seen = seen | seen.roll(1, -1)
        kwargs["attention_mask"] = (
            seen if mask.dtype == torch.bool else torch.zeros_like(mask).masked_fill(~seen, torch.finfo(mask.dtype).min)
        )

    on_arguments(indexer, change)


@fault
def indexer_weights_ignored(parts: Parts) -> None:
    """All heads of the indexer weigh the same."""
    on_output(parts.indexer().weights_proj, lambda y, _: torch.ones_like(y))


@fault
def indexer_one_less(parts: Parts) -> None:
    """One key less is chosen."""
    parts.indexer().index_topk -= 1
