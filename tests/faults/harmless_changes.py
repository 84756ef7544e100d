"""Changes that any honest port may make. Knows how modules are built, not their classes."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from model_parts import Parts, benign, on_output, router_of, widen_logits
from torch import Tensor, nn


@benign
def norm_rounded_first(parts: Parts) -> None:
    """Every RMSNorm rounds before the weight instead of after it (or the reverse)."""
    for part in parts.module.modules():
        weight = getattr(part, "weight", None)
        epsilon = getattr(part, "variance_epsilon", None)
        if epsilon is None or not isinstance(weight, Tensor) or type(part).__name__.endswith("Gated"):
            continue

        def change(y: Tensor, given: Any, weight: Tensor = weight, epsilon: float = epsilon) -> Tensor:
            x = (given[0] or tuple(given[1].values()))[0].float()
            return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.float()).to(y.dtype)

        on_output(part, change)


@benign
def softmax_then_choose(parts: Parts) -> None:
    """Routing weights come from a softmax over the chosen logits where the model normalises after a softmax."""
    for layer in parts.layers:
        try:
            router = router_of(layer)
        except ValueError:
            continue
        if hasattr(router, "e_score_correction_bias") or not getattr(router, "norm_topk_prob", True):
            continue

        def hook(_: nn.Module, args: Any, output: Any) -> Any:
            logits, weights, chosen = output
            return logits, torch.softmax(logits.gather(-1, chosen).float(), -1).to(weights.dtype), chosen

        router.register_forward_hook(hook)


@benign
def batch_of_two(parts: Parts) -> None:
    """Projections run over twice as many rows."""
    for layer in parts.layers:
        for part in layer.modules():
            if isinstance(part, nn.Linear):
                inner = part.forward

                def forward(x: Tensor, inner: Any = inner) -> Tensor:
                    return inner(torch.cat((x, torch.zeros_like(x)), 0))[: x.shape[0]]

                part.forward = functools.wraps(inner)(forward)  # type: ignore[method-assign]


@benign
def sums_split(parts: Parts) -> None:
    """Output projections add two halves, each rounded, as two cards would."""
    for layer in parts.layers:
        for path, part in layer.named_modules():
            if isinstance(part, nn.Linear) and re.search(r"(o_proj|out_proj|down_proj)$", path):

                def forward(x: Tensor, part: nn.Linear = part) -> Tensor:
                    half = x.shape[-1] // 2
                    first = nn.functional.linear(x[..., :half], part.weight[:, :half])
                    return first + nn.functional.linear(x[..., half:], part.weight[:, half:], part.bias)

                part.forward = functools.wraps(part.forward)(forward)  # type: ignore[method-assign]


@benign
def wide_projections(parts: Parts) -> None:
    """Projections run in float32 and round once."""
    for layer in parts.layers:
        for part in layer.modules():
            if isinstance(part, nn.Linear):

                def forward(x: Tensor, part: nn.Linear = part) -> Tensor:
                    bias = None if part.bias is None else part.bias.float()
                    return nn.functional.linear(x.float(), part.weight.float(), bias).to(x.dtype)

                part.forward = functools.wraps(part.forward)(forward)  # type: ignore[method-assign]


@benign
def mkldnn_off(parts: Parts) -> None:
    """Products come from another library."""
    torch.backends.mkldnn.enabled = False


@benign
def one_thread(parts: Parts) -> None:
    """One thread instead of several."""
    torch.set_num_threads(1)


@benign
def padded_vocabulary(parts: Parts) -> None:
    """Logits have columns beyond the vocabulary, which are masked."""
    widen_logits(parts, float("-inf"))
