"""The maker of the built-in checkpoint's files. Knows the public sharded form and a cache folder; must not know the
model's code or how the checkpoint is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import CheckpointError
from reference_impl import tokenizer_files
from reference_impl.drawing import SEED, Stored
from reference_impl.recipe import CONFIG, make_tensors

SHARD_BYTES = 160 * 1024
STAMP = "day0-stamp.json"


def _shard(tensors: Stored) -> list[Stored]:
    """Deal the tensors in a fixed shuffled order into shards of at most SHARD_BYTES each, headers included.

    The shuffle spreads every layer over many shards, and often parts a weight from its scale.
    """
    names = sorted(tensors)
    shards: list[Stored] = [{}]
    for i in np.random.RandomState(SEED).permutation(len(names)):
        name = names[i]
        if shards[-1] and len(_safetensors({**shards[-1], name: tensors[name]})) > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensors[name]
    return shards


def _safetensors(tensors: Stored) -> bytes:
    """Write one safetensors file. Wider types come first, so that every tensor is aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, array) in sorted(tensors.items(), key=lambda t: (-t[1][1].itemsize, t[0])):
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def make_files() -> dict[str, bytes]:
    """Return every file of the checkpoint by name. Deterministic."""
    shards = _shard(make_tensors())
    files: dict[str, bytes] = {}
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        files[file] = _safetensors(shard)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(array.nbytes for shard in shards for _, array in shard.values())
    generation = {k: CONFIG[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")} | {"do_sample": False}
    texts: dict[str, Any] = {
        "model.safetensors.index.json": {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        },
        "config.json": CONFIG,
        "generation_config.json": generation,
        "tokenizer.json": tokenizer_files.tokenizer_json(),
        "tokenizer_config.json": tokenizer_files.tokenizer_config(),
    }
    for name, value in texts.items():
        files[name] = (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
    files["chat_template.jinja"] = tokenizer_files.CHAT_TEMPLATE.encode()
    return files


def version() -> str:
    """Return a digest of the recipe's own source: another recipe lives in another folder."""
    here = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=6)
    for name in ("recipe.py", "recipe_vision.py", "drawing.py", "encoders.py", "tokenizer_files.py", "maker.py"):
        digest.update((here / name).read_bytes())
    return digest.hexdigest()


def cache_folder() -> Path:
    """Return where the checkpoint is kept: `builtin-<version>` in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "day0" / f"builtin-{version()}"


def ensure(folder: Path | None = None) -> Path:
    """Return the folder of the built-in checkpoint, made first if it is not there or not as it was made.

    Raises CheckpointError if the folder cannot be written.
    """
    target = cache_folder() if folder is None else folder
    if _is_whole(target):
        return target
    files = make_files()
    files[STAMP] = json.dumps(_digests(files), indent=2, sort_keys=True).encode()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
        for name, content in files.items():
            (made / name).write_bytes(content)
        _swap_in(made, target)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the built-in checkpoint to {target}: {error}; make the folder writable or set XDG_CACHE_HOME"
        ) from error
    return target


def _digests(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.blake2b(content, digest_size=16).hexdigest() for name, content in files.items()}


def _is_whole(folder: Path) -> bool:
    """Say whether a folder holds exactly the files of its stamp, unchanged."""
    try:
        stamp = json.loads((folder / STAMP).read_text())
        found = {p.name: p.read_bytes() for p in folder.iterdir() if p.name != STAMP}
    except (OSError, ValueError):
        return False
    return bool(stamp == _digests(found))


def _swap_in(made: Path, target: Path) -> None:
    """Put a finished folder in place in one step; a process that was faster wins."""
    made.chmod(0o755)
    if target.exists() and not _is_whole(target):
        broken = Path(tempfile.mkdtemp(prefix=f"{target.name}.old.", dir=target.parent))
        os.replace(target, broken / "old")
        shutil.rmtree(broken, ignore_errors=True)
    try:
        os.replace(made, target)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not _is_whole(target):
            raise
