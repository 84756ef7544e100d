"""Why a weight in memory differs from the checkpoint, in words. Knows tensors and stored parts; no files, no models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from harness.checkpoint.causes.likeness import UNRELATED
from harness.checkpoint.causes.misread import Mistake
from harness.checkpoint.causes.pair import Pair, pair_of
from harness.checkpoint.causes.search import Cause, cause_of
from harness.checkpoint.causes.stored import Stored, stored_weight
from harness.checkpoint.causes.unwritten import unwritten_words
from harness.checkpoint.recognise import Logical

__all__ = [
    "UNRELATED",
    "Cause",
    "Mistake",
    "Pair",
    "Stored",
    "cause_of",
    "causes_of",
    "pair_of",
    "stored_weight",
    "unwritten_words",
]


def causes_of(
    *,
    held: Tensor,
    expected: Tensor,
    logical: Logical | None = None,
    parts: Mapping[str, Tensor] | None = None,
    beside: Iterable[Mistake] = (),
) -> Cause | None:
    """Return what explains that a whole weight differs from its decoded value; None if nothing differs or is known.

    `logical` and `parts` are the quantised weight as it is stored, by role: it is then decoded again under each known
    mistake. Shapes: held and expected alike.
    """
    stored = stored_weight(logical, parts) if logical is not None and parts is not None else None
    return cause_of(pair_of(held, expected), stored=stored, beside=beside)
