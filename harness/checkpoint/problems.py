"""Gather everything that headers, index and configuration show to be wrong with a checkpoint. Must not know its use."""

from __future__ import annotations

from harness.checkpoint.agreement import agreement_problems
from harness.checkpoint.container import Checkpoint
from harness.checkpoint.expected import expected_problems
from harness.checkpoint.formats import format_problems
from harness.checkpoint.header import Problem
from harness.checkpoint.siblings import sibling_problems
from harness.checkpoint.sizes import size_problems
from harness.checkpoint.whole import whole_problems

SEVERITIES = ("error", "warning", "note")


def checkpoint_problems(checkpoint: Checkpoint) -> list[Problem]:
    """Return everything that is wrong, the worst first."""
    found = [*checkpoint.problems, *format_problems(checkpoint), *promise_problems(checkpoint)]
    return sorted(found, key=lambda p: SEVERITIES.index(p.severity))


def promise_problems(checkpoint: Checkpoint) -> list[Problem]:
    """Return what structure and configuration promise and the tensors do not keep."""
    return [
        *expected_problems(checkpoint),
        *whole_problems(checkpoint),
        *agreement_problems(checkpoint),
        *sibling_problems(checkpoint),
        *size_problems(checkpoint),
    ]
