"""Checkpoints on disk: writers of every stored format, what damages their files, what must stay silent.

Importing this package fills `DAMAGES` and `HARMLESS`.
"""

from harness.faults.disk import absent, configs, harmless, headers, indexes, labels, order, values
from harness.faults.disk.damage import DAMAGES, HARMLESS, Damage

__all__ = [
    "DAMAGES", "HARMLESS", "Damage", "absent", "configs", "harmless", "headers", "indexes", "labels", "order", "values",
]  # fmt: skip
