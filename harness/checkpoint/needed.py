"""What a port needs on its device, part by part, in words: weights, cache, logits. From headers; knows no port.

Beside the word that memory ran out, this says what there should have been room for.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from harness.checkpoint.cache import layer_caches
from harness.checkpoint.container import Checkpoint
from harness.checkpoint.names import number, text_config
from harness.checkpoint.parts import PARTS, dtypes, slices


def size(nbytes: float) -> str:
    """Return bytes as a person reads them, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"


def weight_bytes(checkpoint: Checkpoint, dtype: str) -> dict[str, int]:
    """Return what the weights of each part of the model take once they are loaded in a dtype.

    A float32 weight beside narrower ones is an exception that ports keep; quantised ones are taken as decoded.
    """
    width = getattr(torch, dtype).itemsize
    exceptions = next(iter(dtypes(checkpoint)), "") != "F32"
    found = dict.fromkeys(PARTS, 0)
    for piece in slices(checkpoint):
        kept = piece.format == "plain" and exceptions and piece.nbytes == 4 * piece.parameters
        found[piece.part] += piece.parameters * (max(4, width) if kept else width)
    return {part: count for part, count in found.items() if count}


def needed_words(checkpoint: Checkpoint, dtype: str, tokens: int) -> str:
    """Return the plan of a port's memory on one card for a request of so many tokens."""
    weights = weight_bytes(checkpoint, dtype)
    caches, unknown = layer_caches(checkpoint)
    each = sum(cache.bytes_per_token for cache in caches if not cache.window)
    request = sum(cache.bytes(tokens) for cache in caches)
    vocabulary = number(text_config(checkpoint.config), "vocab_size", "padded_vocab_size", "n_vocab") or 0
    logits = tokens * vocabulary * getattr(torch, dtype).itemsize
    words = [f"weights in {dtype} {size(sum(weights.values()))} ({_listed(weights)})"]
    if request or each:
        words.append(f"cache {size(each)} a token, {size(request)} for a request of {tokens} tokens")
    if unknown:
        words.append(f"not known from the configuration: {', '.join(unknown)}")
    if logits:
        words.append(f"logits of {tokens} tokens {size(logits)}")
    whole = size(sum(weights.values()) + request + logits)
    return f"planned are {whole} on the card: {'; '.join(words)}; activations and what a library holds come on top"


def _listed(weights: Mapping[str, int]) -> str:
    most = sorted(weights.items(), key=lambda item: -item[1])
    return ", ".join(f"{part} {size(count)}" for part, count in most)
