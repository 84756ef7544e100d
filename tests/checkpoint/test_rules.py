"""Buffers that need no tensor: each rule explains what holds it, and nothing else."""

from __future__ import annotations

import pytest
import torch

from harness.adapter import Weight
from harness.checkpoint import audit_weights, open_checkpoint
from harness.checkpoint.rules import rule_of

POSITIONS = torch.arange(32).float()
FREQUENCIES = 10000.0 ** (-torch.arange(0, 16, 2).float() / 16)
ANGLES = POSITIONS[:, None] * FREQUENCIES
SCALED = torch.where(torch.arange(8) < 4, FREQUENCIES, FREQUENCIES / 8)
DRAW = torch.Generator().manual_seed(2)
THETA = {"text_config": {"rope_parameters": {"rope_theta": 500000.0}}}
YARN = {"rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 64}}

RULES = [
    (torch.zeros(4, 8), {}, "a constant (0)"),
    (torch.tensor(8.0), {}, "a constant (8)"),
    (torch.empty(0), {}, "no elements"),
    (torch.arange(32)[None], {}, "positions 0, 1, 2"),
    (torch.randint(0, 9, (4, 8), generator=DRAW), {}, "whole numbers"),
    (torch.ones(6, 6).tril().bool(), {}, "a causal mask"),
    (torch.full((1, 1, 6, 6), float("-inf")).triu(1), {}, "a causal mask"),
    (FREQUENCIES, {}, "base 10000"),
    (500000.0 ** (-torch.arange(0, 16, 2).float() / 16), THETA, "base 5e+05"),
    (SCALED, YARN, "scaled as the configuration says"),
    (ANGLES.cos(), {}, "cosines"),
    (ANGLES.sin(), {}, "sines"),
    (7000.0 ** (-torch.arange(0, 16, 2).float() / 16), THETA, ""),
    (SCALED, {}, ""),
    (torch.randn(8, 8, generator=DRAW), {}, ""),
    (torch.tensor([1.0, float("nan")]), {}, ""),
    (ANGLES.cos().roll(1, 0), {}, ""),
]


@pytest.mark.parametrize(("value", "config", "words"), RULES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_buffer_is_explained_by_what_it_holds(value, config, words):
    """Constants, masks, positions and rotary tables have a rule; another base, noise and NaN have none."""
    said = rule_of(value, config)
    assert words in said if words else said == ""


def test_a_buffer_that_nothing_explains_is_told(tmp_path):
    """A computed buffer is derived by its rule; one of noise is derived by none, and fills nothing either."""
    from checkpoint_files import write

    stored = torch.randn(4, 6, generator=DRAW)
    checkpoint = open_checkpoint(write(tmp_path, {"w": stored}))
    held = [
        Weight(name="w", tensor=stored),
        Weight(name="rotary.inv_freq", tensor=FREQUENCIES, computed=True),
        Weight(name="copy", tensor=stored.clone(), computed=True),
        Weight(name="noise", tensor=torch.randn(4, 6, generator=DRAW), computed=True),
    ]
    facts = audit_weights(checkpoint, held, tied=False, dtype="float32")
    assert [(f["match"], bool(f["rule"])) for f in facts["weights"]] == [
        ("named", False),
        ("derived", True),
        ("content", False),
        ("derived", False),
    ]
    assert facts["unfilled"] == []
