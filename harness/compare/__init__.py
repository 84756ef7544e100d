"""Traces of oracle, floors and accel -> measurements. Knows taps and metrics; must not know limits, files or stages."""

from harness.compare.coverage import coverage, idle_experts
from harness.compare.run import compare_run, execution_order, is_mandatory

__all__ = ["compare_run", "coverage", "execution_order", "idle_experts", "is_mandatory"]
