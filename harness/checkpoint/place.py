"""Where an element of a weight lies on disk: the file, and the byte of its code. Knows layouts and headers; no values.

Offsets count from the start of the file, as `dd skip=` takes them; the byte is that of the code, or of the first of the
codes that share it.
"""

from __future__ import annotations

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.integers import AWQ_ORDER
from harness.checkpoint.recognise import Logical


def place_of(checkpoint: Checkpoint, logical: Logical, flat: int = 0) -> tuple[str, int]:
    """Return file and offset of element number `flat` of a weight, in the row-major order of its decoded shape."""
    ref = checkpoint.tensors[logical.parts["weight"]]
    return ref.file, ref.begin + min(_byte(logical, flat, ref.nbytes), max(0, ref.nbytes - 1))


def _byte(logical: Logical, flat: int, nbytes: int) -> int:
    """Return the byte of an element within the stored tensor of codes."""
    kind = logical.format
    if kind not in ("int4_packed", "gptq_v1", "gptq_v2", "awq"):
        return flat * nbytes // max(1, logical.numel)  # whole bytes an element, or two elements a byte
    rows, columns = logical.shape
    row, column = divmod(flat, max(1, columns))
    bits = int(logical.options.get("bits", 4))
    each = 32 // bits
    if kind == "int4_packed":
        words = -(-columns // each)
        return 4 * (row * words + column // each) + column % each * bits // 8
    if kind == "awq":
        return 4 * (column * (rows // each) + row // each) + AWQ_ORDER.index(row % each) * bits // 8
    return 4 * (column // each * rows + row) + column % each * bits // 8
