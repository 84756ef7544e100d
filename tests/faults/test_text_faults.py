"""Wrong numbers in text: each fault is refused at the text stage, at its own place, with a sensible cause.

The first goes through all stages: load and startup, which must not see it, and those that it blocks.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODULE, BUILTIN = HERE / "module_ports.py", HERE / "builtin_numeric_ports.py"
SHORT = ("--set", "scope.max_length_tokens=73")
"""A claim of short prompts: what stands behind the text stage must be blocked, not measured."""


@pytest.mark.parametrize(
    ("fault", "stages", "tap", "cause"),
    [
        ("linear_scaled", "all", "layers.1.attn.o_proj", "1.01 times the expected values"),
        ("router_raw_weights", "text,image", "layers.1.moe.router.out.1", "renormalisation"),
        ("decode_position", "text,image", "rotary_emb", "only in decode"),
        ("vocabulary_unmasked", "text,image", "logits", "padded rows"),
    ],
)
def test_a_fault_in_a_transformers_port_is_named(verify, later, tiny_model, fault, stages, tap, cause):
    """Attention, router and decode faults of a foreign module: the right tap leads, and its cause names the mistake."""
    run = verify if stages == "all" else later
    outcome = run(f"{MODULE}:port?fault={fault}", *SHORT, stage=stages, reference=tiny_model("gpt_oss"))
    finding = outcome.refused_at("text")
    assert finding["tap"] == tap, finding
    assert cause in finding["cause"], finding


def test_an_expert_off_by_little_is_a_slope(later, tiny_model):
    """One expert scaled is found by its signed slope, and named by number with its factor."""
    outcome = later(f"{MODULE}:port?fault=expert_scaled", stage="text", reference=tiny_model("qwen3_moe"))
    finding = outcome.refused_at("text")
    assert outcome.broken("text")["text.slopes"] == "FAILED"
    assert finding["tap"] == "layers.1.moe.experts", finding
    assert re.search(r"the share of expert \d+ 1\.0\d+ times its own: scaled", finding["cause"]), finding["cause"]


def test_what_bfloat16_hides_is_found_in_float32(verify, later, tiny_model):
    """A norm's epsilon is far outside in a port that claims float32 as well; what rounds otherwise stays accepted."""
    claims = ("--set", 'scope.precisions=["float32"]')
    reference = tiny_model("qwen3_next")
    outcome = later(f"{MODULE}:port?fault=norm_eps", *claims, stage="text", reference=reference)
    finding = outcome.refused_at("text")
    assert outcome.broken("text")["text.float32"] == "FAILED"
    assert finding["tap"] == "layers.1.post_attn_norm", finding
    verify(f"{MODULE}:port?benign=sums_split", *SHORT, *claims, stage="text", reference=reference).accepted()


@pytest.mark.parametrize(
    ("fault", "tap", "cause"),
    [
        ("sinks_dropped", "layers.3.attn.core", "sinks"),
        ("indexer_one_sided", "layers.3.attn.indexer.q", "rotary style"),
        ("keys_unscaled", "layers.3", "not in a plain prefill"),
    ],
)
def test_a_fault_in_the_built_in_port_is_named(later, fault, tap, cause):
    """The same for the built-in pair, where the port records its own taps."""
    finding = later(f"{BUILTIN}:port?fault={fault}", stage="text,image").refused_at("text")
    assert finding["tap"] == tap, finding
    assert cause in finding["cause"], finding
