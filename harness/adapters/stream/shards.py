"""Shards of a checkpoint, mapped: stored tensors as views on their files. Knows files; must not know modules.

A view is memory of the file, which the system takes back when it wants to, not of the process. Files are looked at
before each use: one that vanished, shrank or was replaced would end the process, or mix two checkpoints.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from harness.checkpoint import Checkpoint, Logical, TensorRef
from harness.checkpoint.formats import decode_parts
from harness.checkpoint.header import dtype_bits, torch_dtype
from harness.errors import CheckpointError

_State = tuple[int, int, int, int]


class Shards:
    """The files of one checkpoint. `read_bytes` counts what was asked for so far."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.read_bytes = 0
        self._maps: dict[str, mmap.mmap] = {}
        self._states: dict[str, _State] = {}

    def stored(self, name: str) -> Tensor:
        """Return a stored tensor (F4 and F6 as their packed bytes), where it can be as a view on its file.

        Raises:
            CheckpointError: the shard is no longer what it was when the checkpoint was opened.
        """
        ref = self.checkpoint.tensors[name]
        dtype, shape = torch_dtype(ref.dtype), ref.shape
        if dtype_bits(ref.dtype) < 8:
            shape = (*shape[:-1], ref.nbytes // max(1, torch.Size(shape[:-1]).numel()))
        if not ref.nbytes:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._mapped(ref.file), dtype=torch.uint8, count=ref.nbytes, offset=ref.begin)
        if ref.begin % dtype.itemsize:
            flat = flat.clone()  # no element lies where its kind must
        return flat.view(dtype).reshape(shape)

    def decoded(self, logical: Logical) -> Tensor:
        """Return a weight: as stored where it is stored plainly, else decoded to float32. Raises CheckpointError."""
        if logical.problem:
            raise CheckpointError(f"expected {logical.name!r} to decode as {logical.format}, found: {logical.problem}")
        return decode_parts(logical, {role: self.stored(name) for role, name in logical.parts.items()}, widen=False)

    def check(self, names: Iterable[str]) -> None:
        """Raise CheckpointError where a file that holds one of these is no longer as it was."""
        for file in {self.checkpoint.tensors[name].file for name in names}:
            self._mapped(file)

    def announce(self, names: Iterable[str]) -> None:
        """Say that tensors will be read soon, and count them as read. Raises CheckpointError for a changed shard."""
        for ref in (self.checkpoint.tensors[name] for name in names):
            self._mapped(ref.file)
            self.read_bytes += ref.nbytes
            self._advise(ref, mmap.MADV_WILLNEED)

    def drop(self, names: Iterable[str]) -> None:
        """Give back the pages of tensors; a view that is still held reads them again."""
        for ref in (self.checkpoint.tensors[name] for name in names):
            self._advise(ref, mmap.MADV_DONTNEED)

    def _advise(self, ref: TensorRef, advice: int) -> None:
        mapped = self._maps.get(ref.file)
        if mapped is None or not ref.nbytes:
            return
        start = ref.begin - ref.begin % mmap.PAGESIZE
        mapped.madvise(advice, start, ref.end - start)

    def _mapped(self, file: str) -> mmap.mmap:
        path = self.checkpoint.path / file
        state = self._look(path, file)
        if file not in self._maps:
            with path.open("rb") as stream:
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            self._states[file] = state
        elif self._states[file] != state:
            raise CheckpointError(
                f"expected shard {file} of {self.checkpoint.path} as it was when it was opened, found it changed while "
                "it was read; start again once nothing writes to it"
            )
        return self._maps[file]

    def _look(self, path: Path, file: str) -> _State:
        size = self.checkpoint.headers[file].file_bytes
        try:
            found = os.stat(path)
        except OSError as error:
            raise CheckpointError(
                f"expected shard {file} of {self.checkpoint.path} while the model streams from it, found: "
                f"{error.strerror}; bring it back and go on with --resume"
            ) from error
        if found.st_size != size:
            raise CheckpointError(
                f"expected {size} bytes of shard {file} of {self.checkpoint.path}, found {found.st_size}: it changed "
                "while it was read; fetch it again"
            )
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
