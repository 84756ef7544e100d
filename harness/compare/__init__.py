"""Traces of oracle, floors and accel -> measurements. Knows taps and metrics; must not know limits, files or stages."""

from harness.compare.coverage import coverage, exercise, idle_experts, unexercised
from harness.compare.run import compare_run, execution_order, is_mandatory

__all__ = [
    "compare_run", "coverage", "execution_order", "exercise", "idle_experts", "is_mandatory", "unexercised",
]  # fmt: skip
