"""A checkpoint in memory, to be broken and written to a folder. Knows the container's bytes; nothing of its reader."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

INDEX = "model.safetensors.index.json"
BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
        "F16": 16, "BF16": 16, "I16": 16, "I32": 32, "F32": 32, "I64": 64, "F64": 64}  # fmt: skip

Bytes = NDArray[np.uint8]
Values = NDArray[np.float32]
HeaderEdit = Callable[[dict[str, Any]], bytes | None]
"""Changes a header's entries in place, or returns the bytes of another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One tensor as the file holds it: a dtype, a shape, bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes

    def array(self, kind: str) -> NDArray[Any]:
        """Return a copy as numbers of a numpy kind."""
        return self.data.copy().view(kind).reshape(self.shape)

    def holding(self, array: NDArray[Any]) -> Stored:
        """Return the same tensor with other content; its shape follows."""
        return stored(self.dtype, array)

    def labelled(self, *, dtype: str = "", shape: tuple[int, ...] | None = None) -> Stored:
        """Return the same bytes under another dtype or shape."""
        return Stored(dtype=dtype or self.dtype, shape=self.shape if shape is None else shape, data=self.data)


def stored(dtype: str, array: NDArray[Any]) -> Stored:
    """Return a tensor whose bytes are those of an array, row-major."""
    shape = array.shape
    return Stored(dtype=dtype, shape=shape, data=np.ascontiguousarray(array).reshape(-1).view(np.uint8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """One weight as a model sees it: its stored parts by role, and what its values really are."""

    name: str
    kind: str
    parts: Mapping[str, str]
    truth: Values


@dataclass(slots=True, kw_only=True)
class Files:
    """Everything that goes into a folder. Copies share tensors, which are never changed in place.

    `weights` by their name in the model; `shards` by file and stored name. `beside` are further files. The edits act on
    what is about to be written: an index, the header of a shard; `after` acts on the finished folder.
    """

    format: str
    config: dict[str, Any]
    shards: dict[str, dict[str, Stored]]
    weights: dict[str, Coded]
    beside: dict[str, bytes] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    index_edits: list[Callable[[dict[str, Any]], Any]] = field(default_factory=list)
    header_edits: dict[str, HeaderEdit] = field(default_factory=dict)
    after: list[Callable[[Path], Any]] = field(default_factory=list)

    def copy(self) -> Files:
        """Return a copy that can be broken without touching this one."""
        return Files(
            format=self.format,
            config=json.loads(json.dumps(self.config)),
            shards={file: dict(tensors) for file, tensors in self.shards.items()},
            weights=dict(self.weights),
            beside=dict(self.beside),
            metadata=dict(self.metadata),
        )

    def file_of(self, name: str) -> str:
        """Return the shard that holds a stored tensor."""
        return next(file for file, tensors in self.shards.items() if name in tensors)

    def get(self, name: str) -> Stored:
        """Return a stored tensor."""
        return self.shards[self.file_of(name)][name]

    def put(self, name: str, value: Stored) -> None:
        """Replace a stored tensor where it lies."""
        self.shards[self.file_of(name)][name] = value

    def drop(self, *names: str) -> None:
        """Take stored tensors away, from the index too."""
        for name in names:
            del self.shards[self.file_of(name)][name]

    def rename(self, old: str, new: str) -> None:
        """Give a stored tensor another name at the same place."""
        file = self.file_of(old)
        self.shards[file] = {new if n == old else n: t for n, t in self.shards[file].items()}

    # --- writing ---

    def write(self, folder: Path, *, clean: Files | None = None, beside: Path | None = None) -> Path:
        """Write the folder. Shards that are those of `clean`, written at `beside`, are linked from there."""
        folder.mkdir(parents=True, exist_ok=True)
        for file, tensors in self.shards.items():
            same = clean is not None and file not in self.header_edits and _same(tensors, clean.shards.get(file, {}))
            if same and beside is not None and not self.after:
                os.link(beside / file, folder / file)
            else:
                (folder / file).write_bytes(shard_bytes(tensors, self.header_edits.get(file)))
        (folder / INDEX).write_text(self._index())
        (folder / "config.json").write_text(json.dumps(self.config, indent=2))
        for name, content in self.beside.items():
            (folder / name).write_bytes(content)
        for act in self.after:
            act(folder)
        return folder

    def _index(self) -> str:
        total = sum(len(t.data) for tensors in self.shards.values() for t in tensors.values())
        weight_map = {name: file for file, tensors in self.shards.items() for name in tensors}
        index: dict[str, Any] = {
            "metadata": {"total_size": total, **self.metadata},
            "weight_map": dict(sorted(weight_map.items())),
        }
        for edit in self.index_edits:
            text = edit(index)
            if isinstance(text, str):
                return text
        return json.dumps(index, indent=2)


def _same(a: Mapping[str, Stored], b: Mapping[str, Stored]) -> bool:
    return list(a) == list(b) and all(a[n] is b[n] for n in a)


def shard_bytes(tensors: Mapping[str, Stored], edit: HeaderEdit | None = None) -> bytes:
    """Return a safetensors file: length of the header, header, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    pieces, at = [], 0
    for name, tensor in tensors.items():
        span = [at, at + len(tensor.data)]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": span}
        pieces.append(tensor.data.tobytes())
        at = span[1]
    text = edit(header) if edit is not None else None
    if text is None:
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(pieces)


def bits_of(dtype: str) -> int:
    """Return the bits of one element."""
    return BITS[dtype]


def fits(tensor: Stored) -> bool:
    """Say whether a tensor has as many bytes as its dtype and shape need."""
    return prod(tensor.shape) * bits_of(tensor.dtype) == 8 * len(tensor.data)
