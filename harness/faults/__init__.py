"""The catalogue of known mistakes and harmless differences, as code. Knows how they get in; must not know limits.

`TABLE` holds them by name; importing this package fills it.
"""

from harness.faults import (
    attention,
    caches,
    experts,
    harmless,
    kernels,
    numbers,
    pictures,
    selection,
    states,
    taps,
    taps_beyond,
    weights,
)
from harness.faults.catalogue import TABLE, Injection, NoPlace
from harness.faults.parts import Parts

__all__ = [
    "TABLE", "Injection", "NoPlace", "Parts", "attention", "caches", "experts", "harmless", "kernels", "numbers",
    "pictures", "selection", "states", "taps", "taps_beyond", "weights",
]  # fmt: skip
