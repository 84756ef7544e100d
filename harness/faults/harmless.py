"""Changes that any honest port may make: the run must stay accepted. Knows how modules are built, not their classes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from harness.faults.catalogue import NoPlace, benign
from harness.faults.parts import Part, Parts, router_of
from harness.faults.ways import Calls, given, on_output, on_topk, widen_logits, within


def _norms_in(parts: Parts, wide: torch.dtype) -> None:
    """Compute every RMSNorm in a wide precision, and round once."""
    for part in parts.module.modules():
        weight = getattr(part, "weight", None)
        epsilon = getattr(part, "variance_epsilon", None)
        if epsilon is None or not isinstance(weight, Tensor) or type(part).__name__.endswith("Gated"):
            continue

        def change(y: Tensor, call: Any, weight: Tensor = weight, epsilon: float = epsilon) -> Tensor:
            x: Tensor = given(call).to(wide)
            return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.to(wide)).to(y.dtype)

        on_output(part, change)


@benign("BN18")
def norm_rounded_first(parts: Parts) -> None:
    """Every RMSNorm rounds before the weight instead of after it (or the reverse)."""
    _norms_in(parts, torch.float32)


@benign("BN11")
def softmax_then_choose(parts: Parts) -> None:
    """Routing weights come from a softmax over the chosen logits where the model normalises after a softmax."""
    for layer in parts.layers:
        try:
            router = router_of(layer)
        except NoPlace:
            continue
        if hasattr(router, "e_score_correction_bias") or not getattr(router, "norm_topk_prob", True):
            continue

        def hook(_: Part, args: Any, output: Any) -> Any:
            logits, weights, chosen = output
            return logits, torch.softmax(logits.gather(-1, chosen).float(), -1).to(weights.dtype), chosen

        router.register_forward_hook(hook)


def _linears(parts: Parts, change: Callable[[Any, Any], Tensor], pattern: str = "") -> None:
    """Give every matrix of every layer another way to its product: `change(part, x)`."""
    for layer in parts.layers:
        for path, part in layer.named_modules():
            if isinstance(part, nn.Linear) and re.search(pattern, path):
                setattr(part, "forward", functools.partial(change, part))  # noqa: B010  a method is replaced on purpose


OUTPUTS = r"(o_proj|out_proj|down_proj)$"


@benign("BN01")
def batch_of_two(parts: Parts) -> None:
    """Projections run over twice as many rows."""

    def forward(part: Part, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.cat((x, torch.zeros_like(x)), 0), part.weight, part.bias)[: x.shape[0]]

    _linears(parts, forward)


@benign("BN04")
def sums_split(parts: Parts) -> None:
    """Output projections add two halves, each rounded, as two cards would."""

    def forward(part: Part, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        first = nn.functional.linear(x[..., :half], part.weight[:, :half])
        return first + nn.functional.linear(x[..., half:], part.weight[:, half:], part.bias)

    _linears(parts, forward, OUTPUTS)


@benign()
def wide_projections(parts: Parts) -> None:
    """Projections run in float32 and round once."""

    def forward(part: Part, x: Tensor) -> Tensor:
        bias = None if part.bias is None else part.bias.float()
        return nn.functional.linear(x.float(), part.weight.float(), bias).to(x.dtype)

    _linears(parts, forward)


@benign("BN02")
def mkldnn_off(parts: Parts) -> None:
    """Products come from another library."""
    setattr(torch.backends.mkldnn, "enabled", False)  # noqa: B010  torch types it as a property


@benign("BN02")
def one_thread(parts: Parts) -> None:
    """One thread instead of several."""
    torch.set_num_threads(1)


@benign("BN25")
def padded_vocabulary(parts: Parts) -> None:
    """Logits have columns beyond the vocabulary, which are masked."""
    widen_logits(parts, float("-inf"))


@benign("BN01")
def rows_in_blocks(parts: Parts) -> None:
    """Projections run over blocks of 16 rows."""

    def forward(part: Part, x: Any) -> Tensor:
        blocks = x.reshape(-1, x.shape[-1]).split(16)
        y = torch.cat([nn.functional.linear(b, part.weight, part.bias) for b in blocks])
        return y.reshape(*x.shape[:-1], -1)

    _linears(parts, forward)


@benign("BN04")
def sums_backwards(parts: Parts) -> None:
    """Projections add their products in the opposite order."""

    def forward(part: Part, x: Any) -> Tensor:
        return nn.functional.linear(x.flip(-1), part.weight.flip(-1), part.bias)

    _linears(parts, forward)


@benign("BN04")
def sums_in_four(parts: Parts) -> None:
    """Every projection adds four parts in float32 and rounds once, as a blocked kernel does."""

    def forward(part: Part, x: Any) -> Tensor:
        pairs = zip(x.float().chunk(4, -1), part.weight.float().chunk(4, -1), strict=True)
        y = torch.stack([nn.functional.linear(a, w) for a, w in pairs]).sum(0)
        return (y if part.bias is None else y + part.bias.float()).to(x.dtype)

    _linears(parts, forward)


@benign("BN02")
def columns_apart(parts: Parts) -> None:
    """Projections make the two halves of their columns one after the other."""

    def forward(part: Part, x: Any) -> Tensor:
        halves = [nn.functional.linear(x, w) for w in part.weight.chunk(2, 0)]
        y = torch.cat(halves, -1)
        return y if part.bias is None else y + part.bias

    _linears(parts, forward, OUTPUTS)


@benign("BN02")
def attention_by_another_kernel(parts: Parts) -> None:
    """Attention comes from another kernel (sdpa)."""
    config = getattr(parts.module, "config", None)
    if config is None or not hasattr(parts.module, "set_attn_implementation"):
        raise NoPlace("this module has no other kernel for attention")
    try:
        parts.module.set_attn_implementation("sdpa")
    except ValueError as error:
        raise NoPlace("attention has one kernel here") from error


@benign("BN02")
def experts_by_another_kernel(parts: Parts) -> None:
    """Experts run one after the other instead of in groups."""
    experts = parts.experts()
    config = getattr(experts, "config", None) or parts.module.config
    if not hasattr(config, "_experts_implementation"):
        raise NoPlace("these experts know one way only")
    for part in (parts.module, *parts.module.modules()):
        own = getattr(part, "config", None)
        if own is not None and hasattr(own, "_experts_implementation"):
            own._experts_implementation = "eager"


@benign("BN07")
def ties_in_another_order(parts: Parts) -> None:
    """The top-k of routers lists what it chose in another order."""

    def change(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, indices = torch.topk(x, k)
        return values.flip(-1), indices.flip(-1)

    parts.router()
    for layer in parts.layers:
        try:
            router = router_of(layer)
        except NoPlace:
            continue
        on_topk(router, change, lambda x: True)


@benign("BN06")
def choices_in_another_order(parts: Parts) -> None:
    """Routers hand on the chosen experts, and their weights, in another order."""
    parts.router()
    for layer in parts.layers:
        try:
            router = router_of(layer)
        except NoPlace:
            continue

        def hook(_: Part, args: Any, output: Any) -> Any:
            chosen = next(o for o in output if not o.is_floating_point())
            return tuple(o.flip(-1) if o.shape == chosen.shape and o is not output[0] else o for o in output)

        router.register_forward_hook(hook)


@benign("BN12")
def routed_factor_elsewhere(parts: Parts) -> None:
    """The scaling factor of routed experts is applied to what they give, once, instead of to their weights."""
    done = False
    for layer in parts.layers:
        try:
            router = router_of(layer)
        except NoPlace:
            continue
        factor = getattr(router, "routed_scaling_factor", None)
        experts = next((m for p, m in layer.named_modules() if p.endswith("experts") and "shared" not in p), None)
        if not isinstance(factor, (int, float)) or factor == 1 or experts is None:
            continue
        done = True
        router.routed_scaling_factor = 1.0
        on_output(experts, lambda y, _, f=factor: y * f)
    if not done:
        raise NoPlace("no router here has a scaling factor")


@benign("BN30")
def denormals_flushed(parts: Parts) -> None:
    """Denormal results of every matrix become zero, and zeros become negative zeros."""
    tiny = torch.finfo(torch.float32).tiny

    def change(y: Tensor, _: Any) -> Tensor:
        return torch.where(y.float().abs() < tiny, torch.full_like(y, -0.0), y)

    for layer in parts.layers:
        for part in layer.modules():
            if isinstance(part, nn.Linear):
                on_output(part, change)


@benign("BN18")
def norms_in_float64(parts: Parts) -> None:
    """Norms are computed in float64 and rounded once."""
    _norms_in(parts, torch.float64)


@benign("BN18")
def activations_in_float32(parts: Parts) -> None:
    """Activations are computed in float32 and rounded once."""
    done = False
    for layer in parts.layers:
        part: Part
        for part in layer.modules():
            inner = getattr(part, "act_fn", None)
            if isinstance(inner, nn.Module):
                inner.register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))
                inner.register_forward_hook(lambda _, args, y, dtype=parts.module.dtype: y.to(dtype))
                done = True
    if not done:
        raise NoPlace("no activation of its own here")


@benign("BN02")
def matrices_in_other_memory(parts: Parts) -> None:
    """Weights of matrices lie in memory column by column."""
    for layer in parts.layers:
        for part in layer.modules():
            if isinstance(part, nn.Linear):
                part.weight.data = part.weight.data.t().contiguous().t()


@benign()
def masked_scores_lower(parts: Parts) -> None:
    """Masks hold minus infinity where the model adds the lowest number."""
    attention = parts.softmax_attention()

    def hook(_: Part, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.is_floating_point():
            low = mask <= torch.finfo(mask.dtype).min / 2
            kwargs = {**kwargs, "attention_mask": mask.masked_fill(low, float("-inf"))}
        return args, kwargs

    attention.register_forward_pre_hook(hook, with_kwargs=True)


@benign()
def softmax_in_another_order(parts: Parts) -> None:
    """Softmax subtracts nothing and divides at the end, in float64."""

    def change(func: Any, args: Any, kwargs: Any) -> Any:
        if func not in (torch.softmax, Tensor.softmax, nn.functional.softmax):
            return NotImplemented
        dtype = kwargs.get("dtype") or args[0].dtype
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        return torch._softmax(args[0].double(), dim, False).to(dtype)

    within(parts.softmax_attention(), lambda: Calls(change))


@benign()
def nothing(parts: Parts) -> None:
    """The same port again."""
