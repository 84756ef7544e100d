"""A port that is right on one card and wrong when it is split: refused by multi_card, at the place of the cut."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("fault", "layout", "criterion", "place", "cause"),
    [
        ("shared_expert_not_reduced", "tp2", "simulated", "layers.2.moe.shared_expert", "only when split as tp2"),
        ("sinks_of_rank_0", "tp2", "simulated.tails", "layers.3.attn.core", "only when split as tp2"),
        ("expert_map_permuted", "ep2", "simulated", "layers.3.moe.experts", "only when split as ep2"),
        ("row_sum_missing", "tp2", "agreement", "layers.1.attn", "only when split as tp2"),
        ("bias_on_every_rank", "tp2", "simulated", "vision.blocks.1", "only when split as tp2"),
        ("send_buffer_reused", "pp2", "decisions.margin", "layers.4", "only when split as pp2"),
        ("all_reduce_drops_tail", "tp2", "collectives", "collectives.all_reduce", "wrong sums"),
    ],
)
def test_a_wrong_split_is_refused_where_it_is_cut(later, fault, layout, criterion, place, cause):
    """The run ends at multi_card, and the first divergent tap is the one that the split broke."""
    outcome = later(fault, "--set", f"scope.layouts=single,{layout}", stage="multi_card,long_context")
    first = outcome.refused_at("multi_card")
    assert first["tap"] == place or first["tap"].startswith(place + "."), outcome
    assert cause in first["cause"]
    assert f"multi_card.{criterion}" in outcome.broken("multi_card")


def test_a_padded_vocabulary_that_can_be_sampled_is_refused(later):
    """Columns that a split added to the logits, and did not mask, are told as such; the others are compared."""
    outcome = later("vocabulary_padded", "--set", "scope.layouts=single,tp2", stage="multi_card,long_context")
    first = outcome.refused_at("multi_card")
    assert outcome.broken("multi_card") == {"multi_card.padding": "FAILED"}
    assert first["tap"] == "logits"
    assert "padded rows" in first["cause"]


@pytest.mark.parametrize(("fault", "kind"), [("rank_hangs", "hang"), ("rank_dies", "SIGSEGV")])
def test_a_rank_that_does_not_go_on_is_named(later, fault, kind):
    """One rank hangs or dies in layer 3: the run ends in time, and the finding names rank 1 and its last tap."""
    words = ("--set", "scope.layouts=single,tp2", "--set", "watchdog.run_s=10")
    outcome = later(fault, *words, stage="multi_card,long_context")
    first = outcome.refused_at("multi_card", status="ERROR")
    assert first["tap"] == "layers.2"
    assert "rank 1" in first["message"]
    assert kind in first["message"]
