"""Inputs, as data. Knows a model's `config.json` and its edges; must not know adapters, torch or limits."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import CheckpointError
from harness.types import Case, Image

_EDGE_KEYS = (
    "index_topk", "index_window", "sliding_window", "attention_chunk_size", "chunk_size", "page_tokens", "block_size",
    "index_block",
)  # fmt: skip

_EXPERT_KEYS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the checkpoint's configuration says, without any model code. Lengths in tokens."""

    path: str
    config: Mapping[str, Any]
    vocab_size: int
    layers: int
    max_length_tokens: int
    heads: int = 0
    experts: int = 0
    edges: Mapping[str, int] = field(default_factory=dict)
    vision: bool = False
    image_token_id: int | None = None
    special_ids: tuple[int, ...] = ()
    patch_size: int = 14
    merge_size: int = 2
    tokenizer: bool = False
    chat_template: bool = False


def read_model_info(checkpoint: Path) -> ModelInfo:
    """Read `config.json` of a checkpoint folder. Raises CheckpointError if there is none or it is no JSON object."""
    path = checkpoint / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"expected a model configuration at {path}, found: {error}; point the SPEC at a checkpoint folder"
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"expected a JSON object in {path}, found {type(config).__name__}")
    text, vision = _part(config, "text_config", config), _part(config, "vision_config", {})
    rope = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    edges = {k: int(text[k]) for k in _EDGE_KEYS if isinstance(text.get(k), int) and text[k] > 0}
    if isinstance(rope.get("original_max_position_embeddings"), (int, float)):
        edges["original_max_position_embeddings"] = int(rope["original_max_position_embeddings"])
    ids = [
        v for k, v in {**text, **config}.items() if k.endswith("_token_id") for v in (v if isinstance(v, list) else [v])
    ]
    return ModelInfo(
        path=str(checkpoint),
        config=config,
        vocab_size=int(text.get("vocab_size", 0)),
        layers=int(text.get("num_hidden_layers", 0)),
        max_length_tokens=int(text.get("max_position_embeddings", 2048)),
        heads=int(text.get("num_attention_heads") or 0),
        experts=next((int(text[k]) for k in _EXPERT_KEYS if isinstance(text.get(k), int)), 0),
        edges=edges,
        vision=bool(vision),
        image_token_id=next(
            (config[k] for k in ("image_token_id", "image_token_index") if isinstance(config.get(k), int)), None
        ),
        special_ids=tuple(sorted({i for i in ids if isinstance(i, int)})),
        patch_size=int(vision.get("patch_size", 14)),
        merge_size=int(vision.get("spatial_merge_size", vision.get("merge_size", 2)) or 1)
        if isinstance(vision.get("spatial_merge_size", vision.get("merge_size", 2)), int)
        else 2,
        tokenizer=(checkpoint / "tokenizer.json").is_file(),
        chat_template=(checkpoint / "chat_template.jinja").is_file()
        or "chat_template" in _tokenizer_config(checkpoint),
    )


def _part(config: dict[str, Any], key: str, default: dict[str, Any]) -> dict[str, Any]:
    part = config.get(key)
    return part if isinstance(part, dict) else default


def _tokenizer_config(checkpoint: Path) -> Mapping[str, Any]:
    try:
        return dict(json.loads((checkpoint / "tokenizer_config.json").read_text()))
    except (OSError, ValueError):
        return {}


def special_strings(info: ModelInfo) -> tuple[str, ...]:
    """Return the texts of the tokens that `tokenizer.json` marks as special; none without a readable tokenizer."""
    try:
        added = json.loads((Path(info.path) / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens", [])
        return tuple(str(t["content"]) for t in added if t.get("special"))
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return ()


def seeded_ids(info: ModelInfo, length: int, *, seed: int) -> tuple[int, ...]:
    """Return `length` token ids drawn without the special ones. Deterministic in `seed`."""
    draw = random.Random(f"day0-{seed}-{length}")
    special = set(info.special_ids)
    ids: list[int] = []
    while len(ids) < length:
        token = draw.randrange(info.vocab_size)
        if token not in special:
            ids.append(token)
    return tuple(ids)


def seeded_image(height: int, width: int, *, seed: int) -> Image:
    """Return a picture with a gradient, coloured bars and noise: no symmetry that could hide a flip or a swap."""
    draw = random.Random(f"day0-image-{seed}-{height}x{width}")
    data = bytearray()
    for y in range(height):
        for x in range(width):
            noise = draw.randrange(32)
            data += bytes(
                (
                    (200 * y // height + noise) % 256,
                    (220 * x // width + noise) % 256,
                    (37 * ((x * 5) // width) + 90 * ((y * 3) // height) + noise) % 256,
                )
            )
    return Image(height=height, width=width, rgb=base64.b64encode(bytes(data)).decode())


def text_case(info: ModelInfo, length: int, *, seed: int = 0, kind: str = "text", max_new_tokens: int = 16) -> Case:
    """Return a case of seeded token ids."""
    return Case(
        id=f"{kind}-{length}-s{seed}",
        kind=kind,
        token_ids=seeded_ids(info, length, seed=seed),
        seed=seed,
        max_new_tokens=max_new_tokens,
    )


def image_case(info: ModelInfo, sizes: Sequence[tuple[int, int]], *, length: int = 23, seed: int = 0) -> Case:
    """Return a case with pictures of `sizes` (height, width in pixels) set between seeded tokens."""
    ids = seeded_ids(info, length, seed=seed)
    at = tuple((i + 1) * length // (len(sizes) + 1) for i in range(len(sizes)))
    images = tuple(seeded_image(h, w, seed=seed + i) for i, (h, w) in enumerate(sizes))
    name = "-".join(f"{h}x{w}" for h, w in sizes)
    return Case(id=f"image-{name}-s{seed}", kind="image", token_ids=ids, images=images, image_at=at, seed=seed)
