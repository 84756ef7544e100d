"""Which tensor a parameter should have come from, learnt from those that were filled."""

from __future__ import annotations

from harness.checkpoint.paired import pairs

KNOWN = [
    ("model.layers.0.attn.q.weight", "llm.blk.0.q_proj"),
    ("model.layers.2.attn.q.weight", "llm.blk.2.q_proj"),
    ("model.layers.0.moe.experts.3.up.weight", "llm.blk.0.up.3"),
]


def test_a_sibling_in_another_layer_names_the_tensor():
    """The numbers of a parameter stand in the tensor's name where its siblings have theirs."""
    unused = {"llm.blk.1.q_proj": (8, 6), "llm.blk.2.up.5": (4, 8), "llm.blk.1.k_proj": (8, 6)}
    unfilled = {"model.layers.1.attn.q.weight": (8, 6), "model.layers.2.moe.experts.5.up.weight": (8, 4)}
    assert pairs(unfilled, KNOWN, unused) == {
        "model.layers.1.attn.q.weight": "llm.blk.1.q_proj",
        "model.layers.2.moe.experts.5.up.weight": "llm.blk.2.up.5",
    }


def test_what_is_one_of_its_kind_is_paired_by_shape():
    """A head without siblings goes with the only tensor of its shape that is left; two candidates are none."""
    assert pairs({"unembed.weight": (50, 6)}, KNOWN, {"output": (50, 6), "norm": (6,)}) == {"unembed.weight": "output"}
    assert pairs({"unembed.weight": (50, 6)}, KNOWN, {"output": (50, 6), "embed": (50, 6)}) == {}


def test_another_shape_is_not_paired():
    """A tensor of the right name and another size stays unused, and the parameter unfilled."""
    assert pairs({"model.layers.1.attn.q.weight": (8, 7)}, KNOWN, {"llm.blk.1.q_proj": (8, 6)}) == {}


def test_no_tensor_is_given_twice():
    """Two parameters of one kind and number do not share a tensor."""
    unfilled = {"a.layers.1.q": (4,), "b.layers.1.q": (4,)}
    known = [("a.layers.0.q", "x.0.q"), ("b.layers.0.q", "x.0.q")]
    assert list(pairs(unfilled, known, {"x.1.q": (4,)}).values()) == ["x.1.q"]
