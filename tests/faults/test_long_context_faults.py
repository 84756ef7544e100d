"""What goes wrong only at length: each fault passes the text stage and is refused at the long-context stage."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
BUILTIN = HERE / "builtin_numeric_ports.py"
LENGTH = 193
ONE_CARD = ("--set", 'scope.layouts=["single"]')
"""Long enough for what begins at 160 tokens, where text has ended; one card, so that no other stage stands between."""


@pytest.mark.parametrize(
    ("fault", "stages", "stage", "tap", "cause"),
    [
        ("beyond_160", "all", "long_context", "layers.3", "position"),
        ("indexer_rotates_when_long", "text,long_context", "text", "layers.3.attn.indexer.q", "rotary style"),
    ],
)
def test_a_fault_that_begins_at_length_is_named(verify, later, fault, stages, stage, tap, cause):
    """Positions beyond a limit; another path for requests that are longer than those that text alone would need."""
    spec, whole = f"{BUILTIN}:port?fault={fault}", ("--set", f"scope.max_length_tokens={LENGTH}", *ONE_CARD)
    alone = stages != "all"
    outcome = later(spec, *ONE_CARD, length=LENGTH, stage=stages) if alone else verify(spec, *whole, stage=stages)
    finding = outcome.refused_at(stage)
    assert finding["tap"] == tap, finding
    assert cause in finding["cause"], finding


def test_memory_that_grows_with_every_token_is_refused(later):
    """A port that keeps what it computed exceeds the plan at the longest length."""
    outcome = later(f"{BUILTIN}:port?fault=memory_kept", *ONE_CARD, length=LENGTH, stage="long_context")
    assert outcome.code == 1, outcome
    broken = {name for stage in outcome.stages for name in outcome.broken(stage)}
    assert "long_context.memory" in broken, outcome
