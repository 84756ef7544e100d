"""Write checkpoints by hand, right or wrong. Knows bytes; imports nothing of the reader that it tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch

NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}


def raw(value: torch.Tensor) -> bytes:
    """Return a tensor's bytes, row-major."""
    return value.contiguous().flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b""


def shard(tensors: dict[str, torch.Tensor], *, edit=None, text: str | None = None) -> bytes:
    """Return the bytes of a safetensors file; `edit` changes its header first, `text` replaces it."""
    header, data = {}, b""
    for name, value in tensors.items():
        content = raw(value)
        span = [len(data), len(data) + len(content)]
        header[name] = {"dtype": NAMES[value.dtype], "shape": list(value.shape), "data_offsets": span}
        data += content
    if edit is not None:
        edit(header)
    words = (text if text is not None else json.dumps(header)).encode()
    return len(words).to_bytes(8, "little") + words + data


def write(folder: Path, *shards: dict[str, torch.Tensor], config: dict | None = None, total: int | None = None) -> Path:
    """Write a sharded checkpoint with its index."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map, size = {}, 0
    for i, tensors in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        (folder / file).write_bytes(shard(tensors))
        weight_map.update(dict.fromkeys(tensors, file))
        size += sum(len(raw(v)) for v in tensors.values())
    index = {"metadata": {"total_size": size if total is None else total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


def reindex(folder: Path, edit) -> None:
    """Change the index of a checkpoint."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))
