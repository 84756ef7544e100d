"""Layouts that no name tells: slices over ranks, heads by turns, split latents, padding; each right and wrong."""

from __future__ import annotations

import pytest
import torch
from checkpoint_files import write

from harness.adapter import Weight
from harness.checkpoint import audit_weights, open_checkpoint

DRAW = torch.Generator().manual_seed(5)
HEADS, HEAD, HIDDEN, INNER, EXPERTS = 4, 8, 16, 24, 4


def randn(*shape):
    return torch.randn(*shape, generator=DRAW).bfloat16()


SHAPES = {
    **{f"self_attn.{p}_proj": (HEADS * HEAD, HIDDEN) for p in "qkv"},
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "self_attn.kv_b_proj": (HEADS * 14, HIDDEN),
    **{
        f"mlp.experts.{e}.{p}_proj": (HIDDEN, INNER) if p == "down" else (INNER, HIDDEN)
        for e in range(EXPERTS)
        for p in ("gate", "up", "down")
    },
}
STORED = {f"layers.0.{n}.weight": randn(*s) for n, s in SHAPES.items()}


def w(name):
    return STORED[f"layers.0.{name}.weight"]


def experts(p):
    return torch.stack([w(f"mlp.experts.{e}.{p}_proj") for e in range(EXPERTS)])


def padded(value, rows, columns):
    return torch.nn.functional.pad(value, (0, columns, 0, rows))


def heads_by_turns():
    return torch.stack([w(f"self_attn.{p}_proj").view(HEADS, HEAD, HIDDEN) for p in "qkv"], 1).flatten(0, 2)


def latents(turned):
    both = w("self_attn.kv_b_proj").view(HEADS, 14, HIDDEN)
    return {"k_b": both[:, :6].transpose(1, 2) if turned else both[:, :6], "v_b": both[:, 6:]}


def interleaved():
    pairs = torch.stack((experts("gate"), experts("up")), 2).flatten(1, 2)
    return pairs.transpose(1, 2)


def ranks(value, axis, name):
    return {f"{name}.{i}": part.contiguous() for i, part in enumerate(value.chunk(2, axis))}


LAYOUTS = {
    "rows of two ranks": lambda: ranks(w("self_attn.q_proj"), 0, "q"),
    "columns of two ranks": lambda: ranks(w("self_attn.o_proj"), 1, "o"),
    "columns of two ranks, transposed": lambda: ranks(w("self_attn.o_proj").t(), 0, "o"),
    "columns of experts over two ranks": lambda: ranks(experts("down"), 2, "down"),
    "columns of experts over two ranks, transposed": lambda: ranks(experts("down").transpose(1, 2), 1, "down"),
    "q, k and v by turns of heads": lambda: {"qkv": heads_by_turns()},
    "keys and values of a latent": lambda: latents(False),
    "keys of a latent, transposed": lambda: latents(True),
    "gate and up interleaved, [E, in, 2 out]": lambda: {"w13": interleaved()},
    "experts padded on both axes": lambda: {"w2": padded(experts("down"), 4, 8)},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return open_checkpoint(write(tmp_path_factory.mktemp("layouts"), STORED))


def audited(checkpoint, held):
    told = [Weight(name=n, tensor=t) for n, t in held.items()]
    return audit_weights(checkpoint, told, tied=False, dtype="bfloat16")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_recognised_by_content(checkpoint, layout):
    """Every element of memory is a checkpoint tensor's, and no tensor is there in part only."""
    facts = audited(checkpoint, LAYOUTS[layout]())
    assert [(f["match"], f["unmatched"]) for f in facts["weights"]] == [("content", 0)] * len(facts["weights"])
    assert facts["partial"] == {}
    assert facts["unfilled"] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_wrong_element_is_found_in_any_layout(checkpoint, layout):
    """Twin: one element off by one is one mismatch, with the tensor that it belongs to and its place on disk."""
    held = LAYOUTS[layout]()
    name, value = list(held.items())[-1]
    wrong = value.clone()
    index = tuple(size // 2 - 1 for size in wrong.shape)
    wrong[index] += 1
    facts = audited(checkpoint, {**held, name: wrong})
    (bad,) = [f for f in facts["weights"] if f["unmatched"]]
    assert (bad["name"], bad["unmatched"], bad["first"]) == (name, 1, list(index))
    ref = checkpoint.tensors[bad["source"].split("[")[0]]
    stored = STORED[ref.name].flatten()[(bad["offset"] - ref.begin) // 2]
    assert float(stored) == float(value[index])


def test_another_ranks_slice(checkpoint):
    """Both ranks hold the first slice of columns: the other is nowhere, and that is told of its tensor."""
    first = ranks(w("self_attn.o_proj"), 1, "o")["o.0"]
    facts = audited(checkpoint, {"o.0": first, "o.1": first})
    assert facts["partial"] == {"layers.0.self_attn.o_proj.weight": [HIDDEN, 2 * HIDDEN]}
    assert facts["weights"][0]["order"] == facts["weights"][1]["order"]


def test_a_slice_under_its_tensors_own_name_is_no_mismatch(checkpoint):
    """Ranks that show their slices under the tensor's name are whole together, and one alone leaves rows nowhere."""
    name = "layers.0.self_attn.o_proj.weight"
    slices = [Weight(name=name, tensor=t) for t in ranks(STORED[name], 1, "o").values()]
    facts = audit_weights(checkpoint, slices, tied=False, dtype="bfloat16")
    assert [(f["mismatches"], f["unmatched"]) for f in facts["weights"]] == [(0, 0)] * 2
    assert facts["partial"] == {}
    facts = audit_weights(checkpoint, slices[:1], tied=False, dtype="bfloat16")
    assert facts["partial"] == {name: [HIDDEN, 2 * HIDDEN]}


def test_padding_within_a_tensor_is_named(checkpoint):
    """Zeros after each slice of the rows, not after the last row: padded after it was cut."""
    gate = w("mlp.experts.0.gate_proj")
    held = torch.cat((padded(gate[:12], 4, 0), padded(gate[12:], 4, 0)))
    (fact,) = audited(checkpoint, {"w1": held})["weights"]
    assert fact["unmatched"] == 4 * HIDDEN
    assert "padded after it was cut" in fact["pattern"]
