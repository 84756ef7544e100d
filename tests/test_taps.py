"""The grammar of tap names."""

import pytest

from harness import taps


@pytest.mark.parametrize(
    ("tap", "level", "unit", "kind"),
    [
        ("layers.3", 1, "layers.3", "hidden"),
        ("layers.3.attn.in", 2, "layers.3.attn", "hidden"),
        ("layers.3.attn.in.hidden_states", 2, "layers.3.attn", "hidden"),
        ("layers.3.moe.router.topk", 3, "layers.3.moe.router.topk", "routing"),
        ("layers.3.attn.indexer.topk", 3, "layers.3.attn.indexer.topk", "selection"),
        ("layers.3.attn.indexer.topk.scores", 3, "layers.3.attn.indexer.topk.scores", "scores"),
        ("vision.blocks.1", 1, "vision.blocks.1", "hidden"),
        ("vision.blocks.1.attn.qkv", 3, "vision.blocks.1.attn.qkv", "hidden"),
        ("vision.patch_embed", 1, "vision.patch_embed", "hidden"),
        ("mtp", 1, "mtp", "hidden"),
        ("mtp.moe.router.topk", 3, "mtp.moe.router.topk", "routing"),
        ("mtp.layers.0.attn", 2, "mtp.layers.0.attn", "hidden"),
        ("mtp.logits", 2, "mtp.logits", "logits"),
        ("layers.1.moe.router.logits", 3, "layers.1.moe.router.logits", "hidden"),
        ("embed", 1, "embed", "hidden"),
        ("logits", 1, "logits", "logits"),
        ("inputs.token_ids", 2, "inputs.token_ids", "input"),
    ],
)
def test_a_name_says_level_unit_and_kind(tap, level, unit, kind):
    """Level, unit and kind follow from the name alone."""
    assert (taps.level_of(tap), taps.unit_of(tap), taps.kind_of(tap)) == (level, unit, kind)


def test_decisions_of_a_unit_are_its_own_and_its_parts():
    """A layer's decisions are all below it; another layer's are not."""
    names = [
        "layers.1.moe.router.topk",
        "layers.1.moe.router.topk.scores",
        "layers.10.moe.router.topk",
        "layers.1.attn",
    ]
    assert taps.decisions_under("layers.1", names) == ["layers.1.moe.router.topk"]


@pytest.mark.parametrize(
    ("tap", "layer", "child"),
    [
        ("layers.3.moe.router.topk", "layers.3", "layers.3.moe"),
        ("mtp.moe.router.topk", "mtp", "mtp.moe"),
        ("mtp.1.attn.core", "mtp.1", "mtp.1.attn"),
        ("mtp.layers.0.attn.core", "mtp.layers.0", "mtp.layers.0.attn"),
        ("mtpx.attn", "mtpx.attn", "mtpx.attn"),
    ],
)
def test_a_layer_that_predicts_one_more_token_is_a_layer(tap, layer, child):
    """Its parts lie in it as those of a decoder layer do, numbered or not."""
    assert (taps.layer_of(tap), taps.child_of(tap)) == (layer, child)
