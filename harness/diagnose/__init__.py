"""Failed verdicts -> findings: the first wrong places, then what is wrong there. Must not know what may pass."""

from harness.diagnose.explain import explain
from harness.diagnose.structure import structured

__all__ = ["explain", "structured"]
