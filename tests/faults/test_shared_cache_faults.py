"""What requests of a cache do to each other: refused at the text stage, in the walk that shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

PORTS = Path(__file__).parent / "shared_cache_ports.py"
SHORT = ("--set", "scope.max_length_tokens=73", "--set", "scope.serves=false")
"""A claim of short prompts, and of no endpoint: that would answer with the same prefixes, and be refused at startup."""


@pytest.mark.parametrize(
    ("fault", "walk", "kind"),
    [
        ("states_not_rewound", "rewound", "recurrent"),
        ("states_not_taken_up", "prefix", "recurrent"),
        pytest.param("page_not_copied", "prefix", "sparse", marks=pytest.mark.slow),
        pytest.param("states_crossed", "together", "recurrent", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_in_what_requests_share_is_named(later, fault, walk, kind):
    """The first wrong tap is a layer of the kind that keeps it, and only the walk that shares it is wrong."""
    outcome = later(f"{PORTS}:port?fault={fault}", stage="text")
    finding = outcome.refused_at("text")
    layer = int(finding["tap"].split(".")[1])
    assert (layer in (3, 7)) == (kind == "sparse"), finding
    assert f"(run text/{walk}" in finding["message"], finding
    assert f"only in {walk}" in finding["cause"] or "not in a plain prefill" in finding["cause"], finding


def test_pages_that_move_and_shorter_prefixes_are_accepted(verify):
    """Pages that change places before every step, and prefixes of whole pages only, are no difference."""
    verify(f"{PORTS}:port?fault=moved_and_coarse", *SHORT, stage="text").accepted()
