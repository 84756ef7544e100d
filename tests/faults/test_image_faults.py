"""Wrong pictures: each fault is refused at the image stage, at its own place."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
BUILTIN = HERE / "builtin_numeric_ports.py"
SHORT = ("--set", "scope.max_length_tokens=73")


@pytest.mark.parametrize(
    ("fault", "stages", "tap", "cause"),
    [
        ("channels_reversed", "image,multi_card", "inputs.pixel_values", "channel"),
        ("pictures_attend_across", "all", "vision.blocks.0", "wrong in the whole unit"),
        ("pictures_swapped", "image,multi_card", "merged", "order of the image rows"),
    ],
)
def test_a_fault_in_the_tower_is_named(verify, later, fault, stages, tap, cause):
    """Pixels, positions, attention and placement: text is accepted (one shows it), images are not, the rest waits."""
    run = verify if stages == "all" else later
    outcome = run(f"{BUILTIN}:port?fault={fault}", *SHORT, stage=stages)
    finding = outcome.refused_at("image")
    assert finding["tap"] == tap, finding
    assert cause in finding["cause"], finding
