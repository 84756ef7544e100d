"""Open a checkpoint folder. Knows safetensors files and their index; must not know quantisation formats or models.

What is wrong is collected in `Checkpoint.problems`, so that a report can name all of it; what cannot be read is an
error at the moment it is read. Names in an index are hostile: no shard may leave the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from harness.checkpoint.bulk import many_records
from harness.checkpoint.folder import Contents, read_folder, read_json, read_single
from harness.checkpoint.header import Header, Problem, TensorRef, dtype_bits, torch_dtype
from harness.checkpoint.room import room
from harness.errors import CheckpointError, nearest

CONFIG = "config.json"
FULL_DIGEST_BYTES = 1 << 30
_SAMPLE_BYTES = 4096
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint at rest: where every tensor lies, and what is wrong. Nothing but headers was read."""

    path: Path
    tensors: Mapping[str, TensorRef]
    problems: tuple[Problem, ...]
    headers: Mapping[str, Header]
    config: Mapping[str, Any] = field(default_factory=dict)
    index: bytes = b""
    known: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What was worked out from headers once, by who worked it out."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(ref.nbytes for ref in self.tensors.values())

    def read(self, name: str) -> Tensor:
        """Read one tensor as stored (F4 and F6 as their packed bytes, uint8 [..., bytes]).

        Raises:
            CheckpointError: there is no such tensor, its bytes are not all there, or its file cannot be read any more.
        """
        ref = self.tensors.get(name)
        if ref is None:
            raise CheckpointError(
                f"expected a tensor {name!r} in {self.path}{nearest(name, list(self.tensors)[:2000])}"
            )
        buffer = room((ref.nbytes,), torch.uint8)
        try:
            with open_shard(self.path / ref.file) as stream:
                stream.seek(ref.begin)
                read = _fill(stream, buffer.numpy().data)
        except OSError as error:
            raise CheckpointError(
                f"expected {name!r} in {ref.file}, found: {error.strerror or error}: the file was there when its "
                "header was read; put it back"
            ) from None
        if read != ref.nbytes:
            raise CheckpointError(
                f"expected {ref.nbytes} bytes of {name!r} at byte {ref.begin} of {ref.file}, found {read}: the shard "
                "is truncated; fetch it again"
            )
        dtype, shape = torch_dtype(ref.dtype), ref.shape
        if dtype_bits(ref.dtype) < 8:
            shape = (*shape[:-1], ref.nbytes // max(1, _product(shape[:-1])))
        return buffer.view(dtype).reshape(shape) if ref.nbytes else torch.empty(shape, dtype=dtype)

    @property
    def digest(self) -> str:
        """Hex digest that changes with the content: of every byte up to 1 GiB, of headers and samples beyond."""
        total = sum(h.file_bytes for h in self.headers.values())
        return self.full_digest() if total <= FULL_DIGEST_BYTES else self.sampled_digest()

    def sampled_digest(self) -> str:
        """Hex digest of headers, sizes, index, configuration, and a sample at both ends of every tensor."""
        state = self._digest_start("sampled")
        for file, header in self.headers.items():
            with (self.path / file).open("rb") as stream:
                for ref in header.tensors.values():
                    for at in {ref.begin, max(ref.begin, ref.end - _SAMPLE_BYTES)}:
                        stream.seek(at)
                        state.update(stream.read(min(_SAMPLE_BYTES, ref.nbytes)))
        return state.hexdigest()

    def full_digest(self) -> str:
        """Hex digest (blake2b, 16 bytes) of every byte of every shard, the index and the configuration."""
        state = self._digest_start("full")
        for file in self.headers:
            with (self.path / file).open("rb") as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    state.update(chunk)
        return state.hexdigest()

    def _digest_start(self, kind: str) -> hashlib.blake2b:
        state = hashlib.blake2b(digest_size=16)
        state.update(kind.encode() + self.index)
        state.update(json.dumps(self.config, sort_keys=True).encode())
        for file, header in self.headers.items():
            state.update(f"\0{file}\0{header.file_bytes}\0".encode() + header.raw)
        return state


def open_shard(path: Path) -> BinaryIO:
    """Open a file of a checkpoint to be read without a buffer of its own.

    Raises:
        CheckpointError: it is no regular file (a pipe or a device that took its place would never end).
        OSError: it cannot be opened.
    """
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise CheckpointError(f"expected a regular file at {path}, found something else; put the shard back")
    return os.fdopen(number, "rb", buffering=0)


def _fill(stream: BinaryIO, view: memoryview) -> int:
    """Read until the memory is full or the file ends (one call reads 2 GiB at most); return how many bytes came."""
    done = 0
    while done < len(view):
        got = stream.readinto(view[done:])  # type: ignore[attr-defined]
        if not got:
            break
        done += got
    return done


def _product(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a checkpoint folder, or a single safetensors file. Reads headers only.

    Raises:
        CheckpointError: there is nothing there that could be a checkpoint.
    """
    path = Path(path).resolve()
    with many_records():
        if path.is_file() and path.suffix == ".safetensors":
            contents = read_single(path)
        elif path.is_dir():
            contents = read_folder(path)
        else:
            raise CheckpointError(f"expected a checkpoint folder, found nothing at {path}; check the path")
        config = _config(contents)
    return Checkpoint(
        path=contents.folder,
        tensors=contents.tensors,
        problems=tuple(contents.problems),
        headers=contents.headers,
        config=config,
        index=contents.index,
    )


def _config(contents: Contents) -> Mapping[str, Any]:
    """Read the configuration; an empty one where there is none, or where it is no JSON object."""
    path = contents.folder / CONFIG
    if not path.exists() and not path.is_symlink():
        return {}
    try:
        config, twice = read_json(path)
    except (OSError, ValueError) as error:
        contents.add("bad_config", "a JSON object", str(error)[:200], file=CONFIG)
        return {}
    for key in twice:
        contents.add("duplicate_key", f"the key {key!r} once", "twice", file=CONFIG, severity="warning")
    if not isinstance(config, dict):
        contents.add("bad_config", "a JSON object", type(config).__name__, file=CONFIG)
        return {}
    return config
