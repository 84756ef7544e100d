"""The shipped checklists are complete."""

from __future__ import annotations

import pytest

from harness.checklist import load_checklists
from harness.metrics.names import METRICS
from harness.types import STAGES

PRACTICES = [
    "baseline_saved",
    "layers_in_order",
    "upstream_reused",
    "sparse_path_alone",
    "communication_first",
    "long_context_stress",
    "fallback_retained",
]


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_makes_promises(stage):
    """A stage has at least four blocking criteria, one of them core, each with a reason and a source, and questions."""
    checklists = load_checklists()
    criteria = checklists.by_stage[stage]
    assert len([c for c in criteria if c.blocking]) >= 4
    assert any(c.core and c.blocking for c in criteria)
    assert all(len(c.why) > 20 and len(c.source) > 3 for c in criteria)
    assert checklists.questions[stage]


def test_criteria_use_known_metrics_in_their_unit():
    """Each criterion's metric is known and its unit is the metric's."""
    for criteria in load_checklists().by_stage.values():
        for c in criteria:
            assert METRICS.get(c.metric) == c.unit, c.id


def test_the_seven_practices_are_promised():
    """The seven practices are there by name, and each criterion that one asks for exists."""
    checklists = load_checklists()
    assert [p.id for p in checklists.practices] == PRACTICES
    for practice in checklists.practices:
        assert practice.criteria or practice.facts
        assert [c for c in practice.criteria if checklists.criterion(c) is None] == []
