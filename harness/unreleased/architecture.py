"""What transformers works out of a configuration by itself. Knows transformers (lazily); must not know checkpoints.

Where transformers is not installed, or does not know the model, nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def configuration_of(config: Mapping[str, Any]) -> Any:
    """Return transformers' own record of a `config.json`; None where it knows no such model, or refuses it."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return None
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return None
    try:
        return CONFIG_MAPPING[kind].from_dict(dict(config))
    except (TypeError, ValueError, KeyError, AttributeError, IndexError):
        return None


def lists_of(config: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """Return every list of plain values in the text model's configuration, those that no file gives included."""
    found = configuration_of(config)
    if found is None:
        return {}
    words = found.get_text_config().to_dict()
    plain = (str, int, float, bool, type(None))
    return {k: v for k, v in words.items() if isinstance(v, list) and v and all(isinstance(i, plain) for i in v)}
