"""Attention: dense, causal, window, sinks, soft cap, shared heads, chosen keys, nothing to see. Must not know devices.

A score is a product of D terms, and may be rounded to the dtype once; probabilities too. A query that sees no key gives
0. Source: Vaswani et al. 2017; torch's scaled_dot_product_attention for the fully masked row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from harness.ops.arithmetic import Units
from harness.ops.case import Case, Given, Spec, Want
from harness.ops.families.matrix import times
from harness.ops.inputs import Maker, lay, one, values

SOURCE = "Vaswani et al. 2017; scores and probabilities rounded once; Higham 3.1 for the sums"
CAP = 5.0


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return attention over the keys that a mask shows. q [B, H, T, D], k and v [B, G, S, D], mask [T, S] bool."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def attention_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention of as many queries as keys."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    """Return attention with one more score for each head whose value is 0. sinks [H]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT).float() / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~mask, -math.inf)
    column = sinks.float()[None, :, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]
    return weights.to(v.dtype) @ v


def attention_capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cap: float) -> Tensor:
    """Return attention whose scores are cap * tanh(score / cap)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = cap * torch.tanh((q @ k.mT).float() / math.sqrt(q.shape[-1]) / cap)
    weights = torch.softmax(scores.masked_fill(~mask, -math.inf), -1).nan_to_num(0.0)
    return weights.to(v.dtype) @ v


def attention_chosen(q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> Tensor:
    """Return attention of each query over its chosen keys. q [H, T, D], k and v [S, D], keys [T, K] (-1: none)."""
    at = keys.clamp(min=0)
    scores = torch.einsum("htd,tkd->htk", q, k[at]).float() / math.sqrt(q.shape[-1])
    weights = torch.softmax(scores.masked_fill(keys < 0, -math.inf), -1).nan_to_num(0.0)
    return torch.einsum("htk,tkd->htd", weights.to(v.dtype), v[at])


def _qkv(
    gen: torch.Generator, dtype: torch.dtype, tokens: int, keys: int, form: str, heads: tuple[int, int], width: int = 16
) -> list[Tensor]:
    """Queries of heads[0], keys and values of heads[1]; otherwise than contiguous, heads lie inside of tokens."""
    found = []
    for count, length in ((heads[0], tokens), (heads[1], keys), (heads[1], keys)):
        x = values(gen, dtype, (2, count, length, width))
        found.append(x.transpose(1, 2).contiguous().transpose(1, 2) if form == "transposed" else lay(x, form))
    return found


def _mask(tokens: int, keys: int, content: str) -> Tensor:
    row, column = torch.arange(tokens)[:, None] + keys - tokens, torch.arange(keys)[None]
    mask = column <= row
    if content == "window":
        mask &= column > row - 5
    elif content in ("fully masked", "one key"):
        mask[::2] = False
        if content == "one key":
            mask[::2, 0] = True
    elif content == "dense":
        mask = torch.ones_like(mask)
    return mask


def _masked(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    tokens, keys = size, size + (4 if content in ("more keys", "fully masked") else 0)
    tokens = 1 if content == "one query" else tokens
    heads = {"shared heads": (4, 2), "one head of keys": (5, 1)}.get(content, (3, 3))
    wide = int(content.rpartition(" ")[2]) if content.startswith("heads of") else 16
    q, k, v = _qkv(gen, dtype, tokens, keys, form, heads, wide)
    q = q * 8 if content == "large" else q
    mask = _mask(tokens, keys, content)
    if content == "mask by head":  # another one for each sequence and head, each query sees itself
        mask = mask & ((torch.rand(2, heads[0], tokens, keys, generator=gen) < 0.5) | torch.eye(tokens, keys).bool())
    elif content == "bias":
        mask = torch.where(mask, values(gen, dtype, (tokens, keys)), torch.tensor(-math.inf, dtype=dtype))
    return Given(args=(q, k, v, mask))


def _with(*more: object) -> Maker:
    def make(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
        given = _masked(gen, dtype, size, form, content)
        heads = given.args[0].shape[1]
        extra = [values(gen, dtype, (heads,)) if word == "sinks" else word for word in more]
        return Given(args=(*given.args, *extra))

    return make


def _causal(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    return Given(args=tuple(_qkv(gen, dtype, size, size, form, (3, 3))))


def _chosen(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    q, k, v = (lay(values(gen, dtype, shape), form) for shape in ((3, size, 16), (size, 16), (size, 8)))
    keys = torch.full((size, 6), -1)
    for row in range(size):
        some = torch.randperm(row + 1, generator=gen)[:6]
        keys[row, : len(some)] = some
    if content == "fully masked":
        keys[::2] = -1
    return Given(args=(q, k, v, keys))


def _truth(
    u: Units, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, sinks: Tensor | None = None, cap: float = 0.0
) -> Sequence[Want]:
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    scores = times(q, k.mT) / math.sqrt(q.shape[-1])
    off = ((q.shape[-1] + 4) * u.acc + 2 * u.factor) * times(q.abs(), k.abs().mT) / math.sqrt(q.shape[-1])
    off = off + 2 * u.out * scores.abs()
    if cap:
        scores = cap * torch.tanh(scores / cap)
        off = off + (u.exp + 2 * u.out) * scores.abs()
    if mask.is_floating_point():
        off = off + 2 * u.out * (scores.abs() + mask.abs().nan_to_num(posinf=0.0))
        scores, mask = scores + mask, mask > -math.inf
    scores = torch.where(mask, scores, -math.inf)
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks[None, :, None, None])
    top = torch.where(top.isinf(), 0.0, top)
    e = (scores - top).exp()
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks[None, :, None, None] - top).exp()
    weights = torch.where(total > 0, e / total.clamp(min=1e-300), 0.0)
    return [_weighed(u, weights, off, scores - top, v)]


def _weighed(u: Units, weights: Tensor, off: Tensor, below: Tensor, v: Tensor) -> Want:
    """Return the weighted sum of values, with what errors of scores (`off`) make of it."""
    depth = torch.where(weights > 0, below.abs(), 0.0)
    relative = off + (weights * off).sum(-1, keepdim=True) + 2 * depth * u.inside + 4 * u.exp
    relative = relative + 2 * u.out + 2 * weights.shape[-1] * u.acc
    slack = times(weights * relative, v.abs()) + 2.0**-24 * weights.shape[-1] * u.out
    return Want(value=times(weights, v), slack=slack)


def _causal_truth(u: Units, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Want]:
    return _truth(u, q, k, v, _mask(q.shape[2], k.shape[2], ""))


def _chosen_truth(u: Units, q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> Sequence[Want]:
    mask = torch.zeros(keys.shape[0], k.shape[0], dtype=torch.bool)
    for row, some in enumerate(keys.tolist()):
        mask[row, [key for key in some if key >= 0]] = True
    found = _truth(u, q[None], k[None, None], v[None, None], mask)[0]
    assert found.slack is not None
    return [Want(value=found.value[0], slack=found.slack[0])]


def _cases(make: Maker, contents: Sequence[str]) -> Callable[[bool], Iterator[Case]]:
    def cases(full: bool) -> Iterator[Case]:
        for size in (1, 7, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257, 513) if full else (1, 32, 33, 65, 129):
            yield one(make, size, "contiguous", contents[0])
        for form in ("transposed", "strided", "sliced") if full else ("transposed",):
            yield one(make, 17, form, contents[0])
        for content in contents[1:]:
            yield one(make, 17, "contiguous", content)
        if "one query" in contents:  # a decode step: keys are divided among workers
            for keys in (64, 129, 512, 1025, 2049, 4097) if full else (129, 1025):
                yield one(make, keys, "contiguous", "one query")

    return cases


_KINDS = (
    "causal", "dense", "window", "shared heads", "one head of keys", "more keys", "one key", "fully masked", "large",
    "one query", "heads of 64", "heads of 72", "heads of 128", "heads of 192",
)  # fmt: skip
_MASKS = ("mask by head", "bias")
"""Masks of four axes, and such as are added to scores: an operator of its own, since not every kernel takes them."""
_FEW = ("causal", "window", "shared heads", "fully masked")


def _spec(
    name: str,
    call: Callable[..., Tensor],
    truth: Callable[..., Sequence[Want]],
    make: Maker,
    contents: Sequence[str],
    *,
    plain: bool = False,
) -> Spec:
    return Spec(
        name=name, family="attention", call=call, truth=truth, cases=_cases(make, contents), source=SOURCE, plain=plain
    )


SPECS = (
    _spec("attention", attention, _truth, _masked, _KINDS, plain=True),
    _spec("attention_masks", attention, _truth, _masked, _MASKS, plain=True),
    _spec("attention_causal", attention_causal, _causal_truth, _causal, ("causal",), plain=True),
    _spec(
        "attention_sinks", attention_sinks, lambda u, q, k, v, mask, sinks: _truth(u, q, k, v, mask, sinks=sinks),
        _with("sinks"), _FEW,
    ),
    _spec(
        "attention_capped", attention_capped, lambda u, q, k, v, mask, cap: _truth(u, q, k, v, mask, cap=cap),
        _with(CAP), _FEW,
    ),
    _spec("attention_chosen", attention_chosen, _chosen_truth, _chosen, ("causal", "fully masked")),
)  # fmt: skip
