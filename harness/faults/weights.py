"""Faults of weights in memory: what a loader leaves wrong. Knows parameters by build; must not know files."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from harness.faults.catalogue import NoPlace, fault
from harness.faults.parts import Part, Parts, find, out_projection, router_of

Places = list[str]


def _draw(value: Tensor, seed: int = 5) -> Tensor:
    """Return what an initialiser leaves: normal with a deviation of 0.02."""
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def _experts_matrix(parts: Parts) -> tuple[str, Any]:
    """Return name and value of the matrices that hold gate and up of all experts."""
    experts = parts.experts()
    for name, value in experts.named_parameters():
        if re.search(r"gate_up|w13|w1$", name) and value.dim() == 3:
            return parts.weight(experts, name), value.data
    raise NoPlace("these experts keep gate and up apart")


@fault("LD01", stage="load", cause="tied|first random|another|off|values|constant|order", needs="a head of its own")
def head_left_random(parts: Parts) -> Places:
    """The head keeps its first random values: it was neither in the file nor tied."""
    head = parts.head()
    head.weight.data.copy_(_draw(head.weight))
    return [parts.weight(head)]


@fault("LD03", stage="load", cause="zero|never written")
def shard_dropped(parts: Parts) -> Places:
    """The matrices of one layer's attention lie in a shard that was not read: they are zero."""
    attention = parts.attention()
    names = []
    for name, value in attention.named_parameters():
        if value.dim() >= 2:
            value.data.zero_()
            names.append(parts.weight(attention, name))
    return names


@fault("LD04", stage="load", cause="zero|never written|rows|only part|block|off")
def shard_cut_off(parts: Parts) -> Places:
    """The last rows of a matrix were never written."""
    part = out_projection(parts.attention())
    weight = _matrix(part)
    weight.data[-weight.shape[0] // 4 :] = 0
    return [name for name, value in parts.module.named_parameters() if value is weight]


def _matrix(part: Part) -> Any:
    """Return the largest matrix of a part."""
    found = [p for p in part.parameters() if p.dim() == 2]
    if not found:
        raise NoPlace("no matrix here")
    return max(found, key=lambda p: p.numel())


def _name(parts: Parts, weight: Tensor) -> str:
    return next(str(name) for name, value in parts.module.named_parameters() if value is weight)


@fault("LD07", stage="load", cause="random")
def initialised_again(parts: Parts) -> Places:
    """A matrix is initialised again after it was loaded."""
    weight = _matrix(out_projection(parts.attention()))
    weight.data.copy_(_draw(weight))
    return [_name(parts, weight)]


@fault("LD09", stage="load", cause="constant|1|never|unfilled")
def key_passed_over(parts: Parts) -> Places:
    """The weight of a norm has a key that the loader does not know, and stays 1."""
    norm = find(parts.layer(), r"post_attention_layernorm$")
    norm.weight.data.fill_(1.0)
    return [parts.weight(norm)]


@fault("LD17", stage="load", cause="times|scale|times|ratio")
def scales_halved(parts: Parts) -> Places:
    """A matrix is half of what it should be: its scales are those of another dialect."""
    weight = _matrix(out_projection(parts.attention()))
    weight.data.mul_(0.5)
    return [_name(parts, weight)]


@fault(stage="load", cause="block|scale|times|channel|off")
def one_block_scale(parts: Parts) -> Places:
    """One block of 16 rows of a matrix has another scale."""
    weight = _matrix(out_projection(parts.attention()))
    weight.data[:16].mul_(1.25)
    return [_name(parts, weight)]


@fault(stage="load", cause="another|order|swapped|tensor's")
def layers_exchanged(parts: Parts) -> Places:
    """The output projections of two layers lie in each other's place."""
    first = _matrix(out_projection(parts.attention()))
    same = [p for _, p in parts.module.named_parameters() if p.shape == first.shape and p is not first]
    other = next((p for p in same if _name(parts, p).split(".")[-2:] == _name(parts, first).split(".")[-2:]), None)
    if other is None:
        raise NoPlace("no other layer has such a matrix")
    kept = first.data.clone()
    first.data.copy_(other.data)
    other.data.copy_(kept)
    return [_name(parts, first), _name(parts, other)]


@fault(stage="load", cause="transpose|axes|otherwise|another")
def matrix_transposed(parts: Parts) -> Places:
    """A square matrix is loaded with its axes exchanged."""
    square = [m.weight for m in parts.attention().modules() if isinstance(m, nn.Linear)
              and m.weight.shape[0] == m.weight.shape[1]]  # fmt: skip
    if not square:
        raise NoPlace("this attention has no square matrix")
    square[0].data.copy_(square[0].data.t().clone())
    return [_name(parts, square[0])]


@fault("LD23", stage="load", cause="order|permut|interleaved|halves|rows|head", needs="a projection of queries")
def query_rows_permuted(parts: Parts) -> Places:
    """The rows of a head's queries are in the order of the other rotary style."""
    attention = parts.softmax_attention()
    part = find(attention, r"^(q_proj|q_b_proj)(\.linear)?$")
    weight = _matrix(part)
    heads = parts.module.config.get_text_config().num_attention_heads
    if weight.shape[0] % (2 * heads):
        raise NoPlace("rows of queries that are no pairs")
    rows = weight.data.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).clone()
    weight.data.copy_(rows)
    return [_name(parts, weight)]


@fault("LD22", stage="load", cause="order|swapped|gate|another|rows|permut", needs="gate and up of experts in one")
def gate_and_up_exchanged(parts: Parts) -> Places:
    """Gate and up of all experts lie in each other's place."""
    name, value = _experts_matrix(parts)
    axis = 1 if value.shape[1] == 2 * min(value.shape[1:]) or value.shape[1] >= value.shape[2] else 2
    value.copy_(torch.cat(value.chunk(2, axis)[::-1], axis).clone())
    return [name]


@fault(
    "LD22",
    stage="load",
    cause="order|interleaved|halves|rows|permut|together|another",
    needs="gate and up of experts in one",
)
def gate_and_up_interleaved(parts: Parts) -> Places:
    """Gate and up of all experts are woven into each other where the model keeps them apart (or the reverse)."""
    name, value = _experts_matrix(parts)
    half = value.shape[1] // 2
    value.copy_(value.unflatten(1, (2, half)).transpose(1, 2).flatten(1, 2).clone())
    return [name]


@fault(stage="load", cause="times|scale|times|ratio|expert", needs="experts")
def one_idle_expert(parts: Parts) -> Places:
    """One expert's matrices are four times too large, whether or not a token reaches it."""
    name, value = _experts_matrix(parts)
    value[-1].mul_(4.0)
    return [name]


@fault(stage="load", cause="constant|zero|bias|0", needs="a router with a correction bias")
def router_bias_not_loaded(parts: Parts) -> Places:
    """The correction bias of a router is a buffer that the loader forgets: it is zero."""
    router = router_of(parts.layer(lambda m: hasattr(router_of(m), "e_score_correction_bias")))
    router.e_score_correction_bias.data.zero_()
    name = parts.weight(router, "e_score_correction_bias")
    layer = name.split(".layers.")[1].split(".")[0]
    return [name, f"*.layers.{layer}.*.e_score_correction_bias"]  # a checkpoint may call it otherwise


@fault(stage="load", cause="finite")
def one_weight_not_finite(parts: Parts) -> Places:
    """One element of a matrix is not a number."""
    weight = _matrix(out_projection(parts.attention()))
    weight.data.view(-1)[7] = float("nan")
    return [_name(parts, weight)]


@fault(stage="load", cause="round|precision|values|off|lossy|narrow")
def rounded_to_fp8(parts: Parts) -> Places:
    """A matrix was converted to fp8 and back, which the checkpoint does not ask for."""
    weight = _matrix(out_projection(parts.attention()))
    weight.data.copy_(weight.data.to(torch.float8_e4m3fn).to(weight.dtype))
    return [_name(parts, weight)]
