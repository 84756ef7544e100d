"""Wrong numbers in text: each fault is refused at the text stage, at its own place, with a sensible cause."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODULE, BUILTIN = HERE / "module_ports.py", HERE / "builtin_numeric_ports.py"
SHORT = ("--set", "scope.max_length_tokens=73")
"""A claim of short prompts: what stands behind the text stage must be blocked, not measured."""


def refused(verify, reference: str, fault: str) -> dict:
    """Return the first finding of a transformers port with a fault, refused at the text stage."""
    outcome = verify(f"{MODULE}:port?fault={fault}", *SHORT, stage="all", reference=reference)
    return outcome.refused_at("text")


@pytest.mark.parametrize(
    ("fault", "tap", "cause"),
    [
        ("linear_scaled", "layers.1.attn.o_proj", "1.01 times the expected values"),
        ("router_raw_weights", "layers.1.moe.router.out.1", "renormalisation"),
        ("decode_position", "rotary_emb", "a shift by 1"),
        ("vocabulary_unmasked", "logits", "padded rows"),
    ],
)
def test_a_fault_in_a_transformers_port_is_named(verify, tiny_model, fault, tap, cause):
    """Attention, router and decode faults of a foreign module: the right tap leads, and its cause names the mistake."""
    finding = refused(verify, tiny_model("gpt_oss"), fault)
    assert finding["tap"] == tap, finding
    assert cause in finding["cause"], finding


@pytest.mark.parametrize(
    ("fault", "tap", "cause"),
    [
        ("sinks_dropped", "layers.2.attn.core", "sinks"),
        ("indexer_one_sided", "layers.2.attn.indexer.q", "rotary style"),
        ("keys_unscaled", "layers.2", "not in a plain prefill"),
    ],
)
def test_a_fault_in_the_built_in_port_is_named(verify, fault, tap, cause):
    """The same for the built-in pair, where the port records its own taps."""
    outcome = verify(f"{BUILTIN}:port?fault={fault}", *SHORT, stage="all")
    finding = outcome.refused_at("text")
    assert finding["tap"] == tap, finding
    assert cause in finding["cause"], finding
