"""Small inputs of every operator of the port, for tests that hold levels against each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accel_impl import fallback
from accel_impl.formats import Plain

B, T, S, H, D, R, L, V, K = 2, 5, 9, 3, 20, 8, 10, 7, 4
Given = tuple[tuple[Any, ...], dict[str, Any]]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def positions() -> Tensor:
    return torch.arange(S - T, S).repeat(B, 1)


def rows() -> Tensor:
    """Rows of a pool of 2 S that each query attends to, -1 unused; the second request's lie behind the first's."""
    one = torch.tensor([[0, 1, 3, -1], [0, 2, 5, -1], [1, 4, 5, 6], [0, 5, 6, 7], [2, 3, 7, 8]])
    return torch.stack((one, torch.where(one < 0, -1, one + S)))


def attend() -> Given:
    kv_b = Plain(tensor=rand(H * (D - R + V), L))
    return (rand(B, T, H, D), rand(2 * S, L), rand(2 * S, R), rows(), kv_b, rand(H), D**-0.5), {}


def experts() -> dict[int, tuple[Plain, Plain, Plain]]:
    def matrix(out: int, into: int, seed: int) -> Plain:
        return Plain(tensor=rand(out, into, seed=seed) * into**-0.5)

    return {e: (matrix(12, D, e), matrix(12, D, e + 50), matrix(D, 12, e + 90)) for e in (0, 2, 3)}


def routed() -> Given:
    ids = torch.tensor([[0, 1], [2, 3], [0, 3], [1, 2], [1, 4]]).repeat(B, 1, 1)
    return (rand(B, T, D), ids, rand(B, T, 2), experts(), fallback.swiglu), {}


def table() -> tuple[Tensor, Tensor]:
    angle = positions()[..., None] * 0.3 ** torch.arange(R // 2)
    return angle.cos(), angle.sin()


def scan(tokens: int) -> Given:
    q, k = (torch.nn.functional.normalize(rand(B, tokens, H, D, seed=s), dim=-1) for s in (1, 2))
    decay, beta = -5 * rand(B, tokens, H, D, seed=3).square(), rand(B, tokens, H, seed=4).sigmoid()
    memory = rand(4, H, D, V, seed=5)
    return (q, k, rand(B, tokens, H, V, seed=6), decay, beta, memory, torch.tensor([3, 1])), {}


def scores() -> Tensor:
    """Scores with ties, a tie of both zeros, and candidates that are none."""
    some = torch.tensor([[1.0, 2, 2, 2, 0, 0, 1, 2, 0], [0.0, -0.0, -1, 0, -2, -0.0, 0, -3, -3]])
    some = torch.cat((some, some.flip(0), rand(1, S))).masked_fill(
        torch.arange(S) > positions()[0, :, None], -torch.inf
    )
    return some.repeat(B, 1, 1)


def packed() -> Given:
    draw = torch.Generator().manual_seed(7)
    codes = torch.randint(0, 256, (70, 32), generator=draw).to(torch.uint8)
    scale = torch.randint(110, 140, (70, 2), generator=draw).to(torch.uint8)
    return (codes, scale, torch.empty(70, 64)), {}


ARGUMENTS: dict[str, Callable[[], Given]] = {
    "norm.rms": lambda: ((rand(4, D), rand(D, seed=1), 1e-5), {}),
    "norm.layer": lambda: ((rand(4, D), rand(D, seed=1), rand(D, seed=2), 1e-5), {}),
    "norm.gated": lambda: ((rand(4, D), rand(D, seed=1), 9 * rand(4, D, seed=2), 1e-5), {}),
    "norm.unit": lambda: ((rand(4, D), 1e-6, 0.2), {}),
    "rope.turn": lambda: ((rand(B, T, H, R), *table()), {"interleaved": True}),
    "linear": lambda: ((rand(4, D), Plain(tensor=rand(6, D)), rand(6)), {}),
    "act.swiglu": lambda: ((3 * rand(4, D), 3 * rand(4, D, seed=1)), {}),
    "act.swiglu_clamped": lambda: ((6 * rand(4, D), 6 * rand(4, D, seed=1)), {}),
    "act.gelu": lambda: ((3 * rand(4, D),), {"tanh": True}),
    "residual.mix": lambda: ((rand(3, B, T, D), 4 * rand(D), 1e-5), {}),
    "conv.causal": lambda: ((rand(B, T, D), rand(B, 3, D, seed=1), rand(D, 4)), {}),
    "recurrent.gate": lambda: ((30 * rand(B, T, H, D), rand(H), rand(H, D)), {}),
    "recurrent.prefill": lambda: scan(T),
    "recurrent.decode": lambda: scan(1),
    "index.scores": lambda: ((rand(B, T, H, D), rand(B, S, D), rand(B, T, H), positions(), 2), {}),
    "index.select": lambda: ((scores(), K), {}),
    "attn.sparse_prefill": attend,
    "attn.sparse_decode": attend,
    "attn.patches": lambda: ((rand(S, H, D), rand(S, H, D, seed=1), rand(S, H, D, seed=2), (4, 5)), {}),
    "moe.groups": lambda: ((rand(B, T, 12), 3), {}),
    "moe.select": lambda: ((rand(B, T, 12).round(decimals=0), 3), {}),
    "moe.experts": routed,
    "mxfp4.decode": packed,
}
"""Arguments of every operator by its dotted name."""
