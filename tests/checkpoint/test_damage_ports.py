"""Every mistake of a loader on a right file: the load stage refuses it, names the weight, and says why in words."""

from __future__ import annotations

import pytest

from harness.faults.disk.mistakes import MISTAKES
from harness.faults.disk.ports import PortShelf

HELD = ("mxfp4_gpt_oss", "gptq_v1")
"""Formats of which a port is audited here; `day0 prove --checkpoints` takes them all."""


@pytest.fixture(scope="module")
def shelves(tmp_path_factory):
    made = {}

    def shelf(name: str) -> PortShelf:
        if name not in made:
            made[name] = PortShelf(name, tmp_path_factory.mktemp("ports"))
        return made[name]

    return shelf


@pytest.mark.parametrize("format", HELD)
def test_a_right_port_is_accepted(shelves, format):
    """What a loader that makes no mistake holds breaks no criterion."""
    assert shelves(format).row(None).outcome == "accepted"


@pytest.mark.parametrize("format", HELD)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(shelves, format, name):
    """One wrong step is refused at the weight that it was made with, with its cause in words."""
    row = shelves(format).row(MISTAKES[name])
    if row.outcome == "no place":
        pytest.skip(row.note)
    assert row.outcome == "detected", row
    assert row.place_right, row
    assert row.cause_right, row


def test_numbered_experts_are_not_all_alike(shelves):
    """Of merged experts, the one whose up lies before its gate is told, without any reference to hold them against."""
    row = shelves("bf16").row(MISTAKES["merged_gate_after_up"])
    assert (row.outcome, row.place_right, row.cause_right) == ("detected", True, True), row
