"""Models before their weights: what transformers knows of a configuration, and random weights for it.

Knows transformers, lazily; must not know stages, ports or limits.
"""

from harness.unreleased.architecture import lists_of
from harness.unreleased.tensors import plan_random

__all__ = ["lists_of", "plan_random"]
