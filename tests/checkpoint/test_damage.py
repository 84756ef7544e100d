"""Every damage to files in every format: seen by the check that promises it, at its place, with its cause in words."""

from __future__ import annotations

import pytest

from harness.faults.disk import DAMAGES, HARMLESS
from harness.faults.disk.judge import Shelf
from harness.faults.disk.writers import FORMATS

ALIKE = ("f16", "f32", "fp8_block_scale", "fp8_qscale", "fp8_e5m2", "mxfp4_quark", "nvfp4_modelopt", "gptq_v2")
"""Formats that differ from another one in a name or a dtype; `day0 prove --checkpoints` takes them all."""
READ = ("fp8_block", "mxfp4_gpt_oss", "nvfp4_packed")
"""Formats whose content is read here too."""
RECORDED = ("fp8_block", "mxfp4_gpt_oss")
TELLING = {name: d for name, d in DAMAGES.items() if d.seen == "headers"}
READING = {name: d for name, d in DAMAGES.items() if d.seen in ("content", "suspicion")}
REMEMBERING = {name: d for name, d in DAMAGES.items() if d.seen == "manifest"}


@pytest.fixture(scope="module")
def shelves(tmp_path_factory):
    scratch, made = tmp_path_factory.mktemp("shelves"), {}

    def shelf(name: str) -> Shelf:
        if name not in made:
            made[name] = Shelf(name, scratch)
        return made[name]

    return shelf


def found(shelf: Shelf, name: str) -> None:
    """Assert that a damage is seen where it has a place."""
    row = shelf.row(DAMAGES[name])
    if row.outcome == "no place":
        pytest.skip(row.note)
    assert row.outcome == "detected", row
    assert row.place_right, row
    assert row.cause_right, row


@pytest.mark.parametrize("format", [name for name in FORMATS if name not in ALIKE])
@pytest.mark.parametrize("name", TELLING)
def test_headers_tell(shelves, format, name):
    """Headers, index and configuration show it before any weight is read, with its place and cause."""
    found(shelves(format), name)


@pytest.mark.parametrize("format", READ)
@pytest.mark.parametrize("name", READING)
def test_content_tells(shelves, format, name):
    """One pass over the bytes shows it, as a problem or a suspicion."""
    found(shelves(format), name)


@pytest.mark.parametrize("format", RECORDED)
@pytest.mark.parametrize("name", REMEMBERING)
def test_a_digest_tells(shelves, format, name):
    """What leaves every number a plausible one is found by the digest that was recorded before, if not earlier."""
    found(shelves(format), name)


@pytest.mark.parametrize("format", RECORDED)
@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_right_is_silent(shelves, format, name):
    """A harmless difference is no problem; where it is worth a note, that gives the reason."""
    row = shelves(format).row(HARMLESS[name])
    if row.outcome == "no place":
        pytest.skip(row.note)
    assert row.outcome == "accepted", row
    assert row.cause_right, row


def test_there_is_much_that_can_go_wrong():
    """More than a hundred kinds of damage, of which each has a place in some format and each check has its own."""
    assert len(DAMAGES) > 100
    assert {d.seen for d in DAMAGES.values()} == {"headers", "content", "suspicion", "manifest"}
