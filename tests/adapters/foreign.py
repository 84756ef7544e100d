"""A decoder that nobody else would write so: own names, positional calls, a list of experts, no cache, tuples."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn


class Scale(nn.Module):
    """RMS norm under a name that does not say so."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(1 + 0.2 * torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain


class Mixing(nn.Module):
    """Causal attention with one fused projection."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(size, 3 * size)
        self.out_proj = nn.Linear(size, size)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(y.transpose(1, 2).flatten(2)), None


class Expert(nn.Module):
    """A gated feed-forward."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, -1)
        return self.down(nn.functional.silu(a) * b)


class Crowd(nn.Module):
    """Top-2 of four experts, chosen in the module itself."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.choose = nn.Linear(size, 4, bias=False)
        self.members = nn.ModuleList(Expert(size) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.choose(flat).softmax(-1).topk(2, dim=-1)
        y = torch.zeros_like(flat)
        for i, member in enumerate(self.members):
            token, place = (chosen == i).nonzero(as_tuple=True)
            if len(token):
                y.index_add_(0, token, member(flat[token]) * weights[token, place, None])
        return y.view_as(x)


class Stage(nn.Module):
    """One layer; `in_place` adds the attention into the residual without a new tensor."""

    def __init__(self, size: int, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.a = Scale(size)
        self.mix = Mixing(size, 4)
        self.b = Scale(size)
        self.crowd = Crowd(size)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(self.a(x))[0]
        x = x.add_(mixed) if self.in_place else x + mixed
        return x + self.crowd(self.b(x))


class Decoder(nn.Module):
    """Token ids to logits, nothing else."""

    def __init__(self, size: int = 32, vocab: int = 101, *, in_place: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, size)
        self.stack = nn.ModuleList(Stage(size, in_place=in_place) for _ in range(3))
        self.last = Scale(size)
        self.head = nn.Linear(size, vocab, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        for stage in self.stack:
            x = stage(x)
        return self.head(self.last(x))


def decoder(*, in_place: bool = False) -> Decoder:
    """Return the same weights every time."""
    state = torch.random.get_rng_state()
    torch.manual_seed(3)
    try:
        return Decoder(in_place=in_place)
    finally:
        torch.random.set_rng_state(state)


def folder(path: Path) -> Path:
    """Write the configuration that names the model's size."""
    path.mkdir(parents=True, exist_ok=True)
    config = {"vocab_size": 101, "num_hidden_layers": 3, "max_position_embeddings": 64, "model_type": "foreign"}
    (path / "config.json").write_text(json.dumps(config))
    return path
