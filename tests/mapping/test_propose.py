"""Correspondences found by content."""

from __future__ import annotations

import pytest
import torch

from harness.errors import MappingError
from harness.mapping import apply_mapping, parse_mapping, proposal_text, propose
from harness.types import Case, Run, Setup, Tap, Trace

TOKENS, WIDTH, HEADS = 61, 32, 4


def trace(tensors: dict[str, torch.Tensor], tokens: int = TOKENS) -> Trace:
    return Trace(
        setup=Setup(side="accel", role="accel", adapter="x"),
        run=Run(id="r", stage="text", kind="forward", case=Case(id="c", token_ids=tuple(range(tokens)))),
        taps={name: Tap(name=name) for name in tensors},
        tensors=tensors,
        facts={},
    )


def noisy(tensor: torch.Tensor, share: float = 0.02) -> torch.Tensor:
    """Return a tensor as another machine computes it in bfloat16 after some layers."""
    draw = torch.Generator().manual_seed(tensor.numel())
    noise = torch.randn(tensor.shape, generator=draw) * share * tensor.std()
    return (tensor + noise).to(torch.bfloat16)


@pytest.fixture
def expected() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    names = [f"layers.{i}.{part}" for i in range(2) for part in ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp")]
    return {name: torch.randn(1, TOKENS, WIDTH, generator=draw) for name in names}


def halves(rows: torch.Tensor) -> torch.Tensor:
    return rows.unflatten(-1, (HEADS, -1, 2)).transpose(-1, -2).reshape(rows.shape)


def found(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[str, Trace]:
    """Return the proposal, and what it makes of the recorded tensors."""
    recorded = trace(actual)
    placed, lost = propose(recorded, trace(expected))
    text = proposal_text(placed, lost, recorded)
    return text, apply_mapping(recorded, parse_mapping(text))


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ("renamed", "from = \"h.{n}.q\""),
        ("no batch", "from = \"h.{n}.q\""),
        ("fused", "expr = 'out[..., 0:32]'"),
        ("halves", "expr = 'interleave(out, heads=4)'"),
        ("blocks", "expr = 'blocks(out, [1, 2, 3, 0])'"),
        ("transposed", "expr = 'permute(out, 1, 0)'"),
        ("heads", "expr = 'flatten(out, 1, -1)'"),
        ("cut", "expr = 'cat(out, tap(\"h.0.q.right\"), axis=-1)'"),
        ("residual", "expr = 'out[0] + out[1]'"),
    ],
)  # fmt: skip
def test_a_layout_is_found_and_undone(expected, change, row):
    """Renamed, fused, permuted, transposed, cut or summed: the file that is printed gives the expected values back."""
    q, k, v = (noisy(expected[f"layers.0.attn.{n}_proj"]) for n in "qkv")
    rows = q[0]
    made = {
        "renamed": {"h.0.q": q},
        "no batch": {"h.0.q": rows},
        "fused": {"h.0.qkv": torch.cat([q, k, v], -1)},
        "halves": {"h.0.q": halves(rows)},
        "blocks": {"h.0.q": torch.cat([rows[:, 24:], rows[:, :24]], -1)},
        "transposed": {"h.0.q": rows.T.contiguous()},
        "heads": {"h.0.q": rows.reshape(TOKENS, HEADS, -1)},
        "cut": {"h.0.q.left": rows[:, :12], "h.0.q.right": rows[:, 12:]},
        "residual": {"h.0.q": rows - k[0], "h.0.q.out.1": k[0]},
    }[change]
    others = {"h.1.q": noisy(expected["layers.1.attn.q_proj"]), "h.0.mlp": noisy(expected["layers.0.mlp"])}
    text, mapped = found({**made, **others}, {n: t for n, t in expected.items() if "q_proj" in n or "mlp" in n})
    assert row in text, text
    value = mapped.tensors["layers.0.attn.q_proj"].float().reshape(TOKENS, WIDTH)
    assert float((value - expected["layers.0.attn.q_proj"][0]).norm() / value.norm()) < 0.05
    assert "# not placed: layers.1.mlp" in text


def test_layers_that_are_alike_share_a_row(expected):
    """What holds for every layer is printed once, with {n}."""
    actual = {
        f"model.h.{i}.qkv": torch.cat([noisy(expected[f"layers.{i}.attn.{n}_proj"][0]) for n in "qkv"], -1)
        for i in range(2)
    }
    text, mapped = found(actual, expected)
    assert text.count("[[taps]]") == 3
    assert 'tap = "layers.{n}.attn.k_proj"\nfrom = "model.h.{n}.qkv"\nexpr = \'out[..., 32:64]\'' in text
    assert {n for n in mapped.tensors if "attn" in n} == {n for n in expected if "attn" in n}


def test_a_wrong_value_is_not_mapped_away(expected):
    """A scale, a sign or other values are the port's mistakes: nothing is proposed for them."""
    q = noisy(expected["layers.0.attn.q_proj"])
    draw = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(9))
    placed, lost = propose(
        trace({"a": q * 1.3, "b": -q, "c": draw}), trace({"layers.0.attn.q_proj": expected["layers.0.attn.q_proj"]})
    )
    assert placed == []
    assert "nearest is a" in lost["layers.0.attn.q_proj"]


def test_what_says_nothing_is_not_placed(expected):
    """A tap of zeros and one without a token axis are named as such."""
    extra = {"zero": torch.zeros(1, TOKENS, WIDTH), "table": torch.ones(3, 3)}
    _, lost = propose(trace(expected), trace({**expected, **extra}))
    assert lost == {"zero": "the expected value is zero everywhere", "table": "it has no axis of 61 tokens"}


def test_requests_of_other_lengths_are_refused(expected):
    """Rows are compared token by token, so both sides must hold one request."""
    with pytest.raises(MappingError, match="the same token ids on both sides"):
        propose(trace(expected, tokens=60), trace(expected))
    with pytest.raises(MappingError, match="none of the 1 recorded tensors"):
        propose(trace({"a": torch.ones(2, 2)}), trace(expected))
