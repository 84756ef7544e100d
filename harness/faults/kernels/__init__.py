"""Kernels exchanged for wrong ones, and for others that are right: what the operator suite must name, and what not.

Importing this package adds its rows to the catalogue.
"""

from harness.faults.kernels import otherwise, placed, rounded
from harness.faults.kernels.table import EXCHANGES, VIA

__all__ = ["EXCHANGES", "VIA", "otherwise", "placed", "rounded"]
