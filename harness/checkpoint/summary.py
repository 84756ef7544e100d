"""Sum an audit up: what was never used or never filled, and the rules by which that may be. Knows names, no tensors."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import torch

from harness.checkpoint.fact import order_runs
from harness.checkpoint.formats import Logical
from harness.checkpoint.ledger import Ledger

_DERIVED = re.compile(r"(^|[._])(inv_freq|position_ids|cos_cached|sin_cached|num_batches_tracked|causal_mask)\b")
_VISION = re.compile(r"(^|\.)(visual|vision\w*|image\w*|multi_modal_projector|mm_projector|patch_embed\w*)(\.|$)")
_LAYER = re.compile(r"(^|\.)(?:layers|blocks|h)\.(\d+)\.")


def summary(audit: Ledger, partial: dict[str, tuple[int, int]], *, tied: bool, dtype: str) -> dict[str, Any]:
    """Return an audit as plain JSON; `partial` are the tensors of which memory holds some rows: those, and all."""
    unused, outside = [], {}
    for logical in audit.logicals.values():
        if logical.name in audit.used or (logical.quantised and set(logical.parts.values()) <= audit.raw_used):
            continue
        reason = _outside(audit, logical, tied=tied)
        if reason:
            outside[logical.name] = reason
        elif not logical.problem:
            unused.append(logical.name)
    trimmed = {
        n: f"{rows - hit} rows beyond the vocabulary" for n, (hit, rows) in partial.items() if _trimmed(audit, n, hit)
    }
    outside.update(trimmed)
    errors = dict(audit.errors)
    errors.update({x.name: x.problem for x in audit.logicals.values() if x.problem})
    named = {f.source for f in audit.facts if f.match == "named"}  # what differs there is told by `mismatches`
    return {
        "dtype": dtype,
        "weights": [json.loads(json.dumps(dataclasses.asdict(f), allow_nan=False)) for f in audit.facts],
        "logical": len(audit.logicals),
        "elements": sum(torch.Size(f.shape).numel() for f in audit.facts),
        "unused": unused,
        "partial": {n: list(rows) for n, rows in partial.items() if n not in named | trimmed.keys()},
        "outside": outside,
        "unfilled": [f.name for f in audit.facts if f.match == "none" and not f.source],
        "untied": _untied(audit, tied=tied),
        "tied": tied,
        "errors": errors,
    }


def _trimmed(audit: Ledger, name: str, rows: int) -> bool:
    """Say whether memory holds the first rows of a tensor, as many as the configuration calls a vocabulary size."""
    config = audit.checkpoint.config
    text = config.get("text_config")
    sizes = {
        v
        for c in (config, text if isinstance(text, dict) else {})
        for k, v in c.items()
        if "vocab_size" in k and isinstance(v, int)
    }
    return rows in sizes and any(order_runs(f.order) == [[name, 0, rows]] for f in audit.facts)


def _outside(audit: Ledger, logical: Logical, *, tied: bool) -> str:
    """Say why a checkpoint tensor may rest unused, or return an empty string."""
    if _DERIVED.search(logical.name):
        return "a buffer that is computed"
    config = audit.checkpoint.config
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    layers = text.get("num_hidden_layers") if isinstance(text, dict) else None
    layer = _LAYER.search(logical.name)
    if re.search(r"(^|\.)mtp(\.|_|$)", logical.name):
        return "multi-token prediction"
    if is_vision(logical.name):
        return "vision"
    if layer and isinstance(layers, int) and int(layer.group(2)) >= layers:
        return f"layer {layer.group(2)} is beyond the model's {layers} (multi-token prediction)"
    if tied and len(logical.shape) == 2 and is_head(logical.name):
        return "an output head that the configuration ties to the embedding"
    return ""


def is_derived(name: str) -> bool:
    """Say whether a buffer is one that models compute for themselves, by its name."""
    return _DERIVED.search(name) is not None


def is_head(name: str) -> bool:
    """Say whether a tensor is the output head, by its name."""
    return re.search(r"(^|\.)(lm_head|output|head)\.weight$", name) is not None


def is_vision(name: str) -> bool:
    """Say whether a checkpoint tensor belongs to a vision tower or its projector, by its name."""
    return _VISION.search(name) is not None


def _untied(audit: Ledger, *, tied: bool) -> list[str]:
    """Name the parameters that look like an output head without a source: shaped as the only [vocab, hidden] tensor."""
    vocabulary = [x.shape for x in audit.logicals.values() if len(x.shape) == 2 and "embed" in x.name]
    if not tied and any(is_head(n) for n in audit.logicals):
        return []
    bad = [f for f in audit.facts if f.match == "none" and not f.source and f.shape in vocabulary]
    return [f.name for f in bad]
