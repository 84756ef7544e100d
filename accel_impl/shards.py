"""Sharded safetensors files. Knows the container only: header, index, offsets; must not know formats or models."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from harness.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor at rest. `begin` and `end` are absolute byte offsets in `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.end - self.begin


class Shards:
    """Every tensor of a checkpoint folder by name, headers checked before a byte of data is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        weight_map = _weight_map(folder)
        for file in sorted(set(weight_map.values())):
            header = read_header(_inside(folder, file))
            for name, entry in header.items():
                if weight_map.get(name) == file:
                    self.entries[name] = entry
        missing = sorted(set(weight_map) - set(self.entries))
        if missing:
            raise CheckpointError(
                f"expected the tensors of {INDEX} in the shards that it names, found {len(missing)} of "
                f"{len(weight_map)} absent, first {missing[0]!r} in {weight_map[missing[0]]!r}, in {folder}"
            )

    def read(self, name: str) -> Tensor:
        """Return one tensor as it lies on disk. Raises CheckpointError if it is unknown or short."""
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"expected tensor {name!r}, found none of that name in {self.folder}")
        with entry.file.open("rb") as handle:
            handle.seek(entry.begin)
            data = bytearray(handle.read(entry.nbytes))
        if len(data) != entry.nbytes:
            raise CheckpointError(f"expected {entry.nbytes} bytes of {name!r} in {entry.file}, found {len(data)}")
        if not data:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        raw = torch.frombuffer(data, dtype=torch.uint8)
        return raw.view(DTYPES[entry.dtype]).reshape(entry.shape)


def _weight_map(folder: Path) -> dict[str, str]:
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise CheckpointError(f"expected {INDEX} or {SINGLE} in {folder}, found neither; point at a checkpoint")
        return dict.fromkeys(read_header(folder / SINGLE), SINGLE)
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"expected a weight_map in {index}, found {error!r}") from error


def _inside(folder: Path, file: str) -> Path:
    if Path(file).name != file:
        raise CheckpointError(f"expected a plain shard name in {folder / INDEX}, found {file!r}: it leaves the folder")
    return folder / file


def read_header(path: Path) -> dict[str, Entry]:
    """Read and check one file's header: its size, dtypes, shapes, and that the offsets tile the data exactly."""
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(f"expected a header of at most {size - 8} bytes in {path}, found {length}")
            table = json.loads(handle.read(length), object_pairs_hook=_no_duplicates)
    except (OSError, ValueError, struct.error) as error:
        raise CheckpointError(f"expected a safetensors file at {path}, found: {error}") from error
    table.pop("__metadata__", None)
    entries, at = {}, 0
    for name, row in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = row["data_offsets"]
        if row["dtype"] not in DTYPES:
            raise CheckpointError(f"expected a dtype of {sorted(DTYPES)} for {name!r} in {path}, found {row['dtype']}")
        wanted = math.prod(row["shape"]) * DTYPES[row["dtype"]].itemsize
        if begin != at or end - begin != wanted:
            raise CheckpointError(f"expected {name!r} at bytes {at}..{at + wanted} of {path}, found {begin}..{end}")
        base = 8 + length
        entries[name] = Entry(
            file=path, dtype=row["dtype"], shape=tuple(row["shape"]), begin=base + begin, end=base + end
        )
        at = end
    if 8 + length + at != size:
        raise CheckpointError(f"expected {8 + length + at} bytes in {path}, found {size}; the file is cut or padded")
    return entries


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a tensor is named twice in the header")
    return table
