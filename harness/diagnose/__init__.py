"""Failed verdicts -> findings. Knows measurements, the criteria they failed, and tap names; must not know traces."""

from harness.diagnose.explain import explain

__all__ = ["explain"]
