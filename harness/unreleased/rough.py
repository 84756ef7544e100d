"""Values for weights that nobody trained, such that faults stay visible. Knows names of parameters; no models.

Default initialisation hides faults: attention is uniform, norms are 1, biases, sinks and router biases are 0. Here
matrices are N(0, 1/fan_in) (gain 1.4 on the query and key side), norm weights 1 + 0.2 N with outlier channels, and
nothing is neutral.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_EMBEDDING = re.compile(r"embed_tokens|(^|\.)(wte|word_embeddings|tok_embeddings|embed|embed_in)\.weight$")
_SHARPER = re.compile(r"(^|[._])(q|k|wq|wk|qk)(_|\.|$)|\bq_|\bk_")


def rough(key: str, noise: Any, shape: Sequence[int] | None = None) -> Any:
    """Return values for a parameter from unit noise: of its whole shape, or of some rows where `shape` is the whole."""
    leaf = key.rsplit(".", 1)[-1]
    shape = tuple(noise.shape if shape is None else shape)
    if leaf.endswith("correction_bias"):
        return 7 + 0.25 * noise
    if leaf == "A_log":
        return -2 + 0.5 * noise
    if leaf == "dt_bias":
        return -3 + 0.5 * noise
    if "sinks" in leaf:
        return noise
    if leaf in ("base", "scale") and "_hc" in key:
        return 0.5 * noise if leaf == "base" else 1 + 0.2 * noise
    if len(shape) == 1 and (leaf == "weight" or leaf.startswith("lambda")):
        value = 1 + 0.2 * noise
        value[:: max(1, len(value) // 3)] *= 2.5
        return value
    if len(shape) == 1:
        return 0.1 * noise
    if _EMBEDDING.search(key):
        return noise
    fan_in = 1
    for size in shape[1:] if len(shape) != 3 or "conv" in key else shape[-1:]:
        fan_in *= size
    return (1.4 if _SHARPER.search(key) else 1.0) * noise / fan_in**0.5
