"""A reference made to compute as declared: which weights, which inputs, and what is written to a cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from harness.adapter import Inputs, silent
from harness.plugins import default_checkpoint, open_adapter, parse_spec
from harness.precision.declare import Rounds, declare
from harness.precision.rounding import quantised
from harness.precision.scheme import parse_precision, parse_scheme
from harness.runs import opened
from harness.types import Setup

INT8 = parse_scheme("activations", "int8:token")


class Experts(nn.Module):
    """Fused experts that multiply with a copy of the chosen ones' weights, as some engines gather them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.expand(2, -1, -1), self.up[[0, 2]].transpose(1, 2)).sum(0)


class Net(nn.Module):
    """A projection, a router that is kept, and fused experts."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.router, self.experts = nn.Linear(16, 16), nn.Linear(16, 3, bias=False), Experts()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.proj(x), self.router(x), self.experts(x)


def made(words: dict[str, str]) -> tuple[Net, Net, Rounds]:
    """Return a net, a copy of it that computes as declared, and its rounds."""
    torch.manual_seed(0)
    plain, net = Net().requires_grad_(False), Net().requires_grad_(False)
    net.load_state_dict(plain.state_dict())
    rounds = Rounds(parse_precision(words))
    declare(net, rounds)
    return plain, net, rounds


def test_weights_are_rounded_but_for_those_that_are_kept():
    """Linear and fused weights become their round trip, expert by expert; the router and biases stay."""
    plain, net, _ = made({"weights": "int4:tensor"})
    scheme = parse_scheme("weights", "int4:tensor")
    assert torch.equal(net.proj.weight, quantised(plain.proj.weight, scheme))
    assert torch.equal(net.proj.bias, plain.proj.bias)
    assert torch.equal(net.router.weight, plain.router.weight)
    assert not torch.equal(net.experts.up, plain.experts.up)
    _, bare, _ = made({"weights": "int4:tensor", "keep": "proj*"})
    assert torch.equal(bare.proj.weight, plain.proj.weight)
    assert not torch.equal(bare.router.weight, plain.router.weight)


def test_inputs_of_products_are_rounded_where_the_weight_is():
    """The projection and the experts see rounded inputs, the router does not; outside of a call nothing is."""
    plain, net, rounds = made({"activations": "int8:token"})
    x = torch.randn(5, 16)
    with rounds.inputs():
        proj, router, experts = net(x)
    rounded = quantised(x, INT8)
    torch.testing.assert_close(proj, plain.proj(rounded), rtol=0, atol=0)
    torch.testing.assert_close(router, plain.router(x), rtol=0, atol=0)
    torch.testing.assert_close(experts, plain.experts(rounded), rtol=0, atol=0)
    torch.testing.assert_close(net(x)[0], plain.proj(x), rtol=0, atol=0)


def test_a_scale_of_a_cache_is_that_of_all_written_so_far():
    """A quiet token after a loud one is rounded in the loud one's steps, by request and by name."""
    rounds = Rounds(parse_precision({"cache": "int8:tensor"}))
    write, other = rounds.writer(), rounds.writer()
    loud, quiet = torch.full((1, 2, 1, 4), 127.0), torch.full((1, 2, 1, 4), 0.4)
    assert torch.equal(write("layers.0.cache.k", loud), loud)
    assert not write("layers.0.cache.k", quiet).any()
    assert torch.equal(write("layers.1.cache.k", quiet), quiet)
    assert torch.equal(other("layers.0.cache.k", quiet), quiet)
    assert write("layers.2.cache.k", loud[:, :, :0]).shape == (1, 2, 0, 4)


def test_further_floors_round_elsewhere_by_as_much():
    """A jittered run draws the rounding anew and keeps the size of the error; the plain one is the format's own."""
    x = torch.randn(1, 2, 64, 32)
    for text in ("float8_e4m3fn:tensor", "int8:tensor"):
        rounds = Rounds(parse_precision({"cache": text}))
        errors = []
        for rounds.jitter in (0, 1, 12):
            errors.append(rounds.writer()("k", x) - x)
        assert torch.equal(errors[0], quantised(x, parse_scheme("cache", text)) - x)
        sizes = torch.stack([e.norm() for e in errors])
        assert float(sizes.max() / sizes[0]) < 1.25
        assert not torch.equal(errors[1], errors[2])


@pytest.fixture(scope="module")
def builtin() -> Path:
    found = default_checkpoint(parse_spec("builtin:reference"))
    assert found is not None
    return found


def test_the_built_in_reference_computes_as_declared(builtin):
    """It is no nn.Module and takes the same three functions: each declaration moves its logits, by little."""
    ids = Inputs(token_ids=torch.arange(5, 29)[None])

    def logits(**words: str) -> torch.Tensor:
        setup = Setup(side="reference", role="floor", adapter="builtin:reference", precision=words)
        adapter = open_adapter(parse_spec("builtin:reference"), builtin, setup)
        opened(adapter, builtin, setup)
        return adapter.forward(ids, silent).double()

    plain = logits()
    assert torch.equal(logits(weights="bfloat16"), plain)
    for words in ({"weights": "int8"}, {"activations": "int8"}, {"cache": "float8_e4m3fn"}):
        off = float((logits(**words) - plain).norm() / plain.norm())
        assert 1e-4 < off < 0.5, (words, off)
