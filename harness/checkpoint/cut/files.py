"""Write a checkpoint folder as a stream of tensors, in memory that does not grow. Knows files and headers; no models.

Shards are finished one by one under their own names in a folder that is renamed when all are there: what was broken off
goes on where it was. Bytes that lie in another file are copied inside the kernel where it can (and shared, where the
file system can).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from harness.checkpoint.folder import INDEX, SINGLE
from harness.errors import UsageError

SHARD_BYTES = 4 << 30
CHUNK_BYTES = 16 << 20
_HEADER_ALIGN = 8
_NOT_HERE = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.ETXTBSY}
"""What the kernel answers where it cannot copy between these two files; they are then read and written."""

Told = Callable[[int, int, str], None]
"""Told how far a writing is: bytes done, bytes in all, the tensor at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One tensor to write. Its bytes are `source` (file, offset), or what `make` yields, `nbytes` in all."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    source: tuple[Path, int] | None = None
    make: Callable[[], Iterable[memoryview | bytes]] | None = None


@contextmanager
def publish_folder(folder: Path) -> Iterator[Path]:
    """Give a folder to write in, and rename it to `folder` when all went well; one writer at a time.

    What an earlier writer left unfinished is still there. A folder that is there already is left as it is: check first.
    """
    part = folder.with_name(f".{folder.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    with (part.with_name(f".{folder.name}.lock")).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():  # another process was faster
            shutil.rmtree(part, ignore_errors=True)
            yield folder
            return
        part.mkdir(exist_ok=True)
        yield part
        part.rename(folder)
    with_lock = part.with_name(f".{folder.name}.lock")
    with_lock.unlink(missing_ok=True)


def write_tensors(folder: Path, pieces: Sequence[Piece], told: Told | None = None, *, hollow: bool = False) -> int:
    """Write shards and an index into a folder; return the bytes of all tensors.

    A shard that is there in its full size is kept. `hollow` writes headers alone and leaves holes for the tensors: what
    looks at headers sees the checkpoint, and no disk is used. Raises UsageError where the disk has no room.
    """
    shards = _shards(pieces)
    total = sum(p.nbytes for p in pieces)
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    headers = [_header(shard) for shard in shards]
    sizes = [len(h) + sum(p.nbytes for p in s) for h, s in zip(headers, shards, strict=True)]
    there = [
        (folder / n).is_file() and _is(folder / n, h, size) for n, h, size in zip(names, headers, sizes, strict=True)
    ]
    if not hollow:
        _room(folder, sum(size for size, kept in zip(sizes, there, strict=True) if not kept))
    done = 0
    for name, header, shard, kept, size in zip(names, headers, shards, there, sizes, strict=True):
        nbytes = sum(p.nbytes for p in shard)
        if not kept:
            _write_shard(folder / name, header, () if hollow else shard, size, done, total, told)
        done += nbytes
    if len(shards) > 1:
        weight_map = {p.name: name for name, shard in zip(names, shards, strict=True) for p in shard}
        words = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(words, indent=1) + "\n")
    return total


def _shards(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Put pieces into files of a few GiB, in their order; a larger tensor has a file of its own."""
    shards: list[list[Piece]] = [[]]
    held = 0
    for piece in pieces:
        if shards[-1] and held + piece.nbytes > SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(piece)
        held += piece.nbytes
    return shards


def _header(shard: Sequence[Piece]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for piece in shard:
        entries[piece.name] = {
            "dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": [at, at + piece.nbytes],
        }  # fmt: skip
        at += piece.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGN)
    return len(text).to_bytes(8, "little") + text


def _is(path: Path, header: bytes, size: int) -> bool:
    if path.stat().st_size != size:
        return False
    with path.open("rb") as stream:
        return stream.read(len(header)) == header


def _room(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise UsageError(
            f"expected room for {nbytes / 2**30:.1f} GiB in {folder.parent}, found {free / 2**30:.1f} GiB free; choose "
            "fewer layers, or set XDG_CACHE_HOME to a larger disk"
        )


def _write_shard(
    path: Path, header: bytes, shard: Sequence[Piece], size: int, done: int, total: int, told: Told | None
) -> None:
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as out:
            out.write(header)
            for piece in shard:
                if told is not None:
                    told(done, total, piece.name)
                _write_piece(out, piece)
                done += piece.nbytes
            out.truncate(size)
    except OSError as error:
        raise UsageError(
            f"{path.name} cannot be written in {path.parent}: {error}; it goes on there next time"
        ) from error
    part.replace(path)


def _write_piece(out: BinaryIO, piece: Piece) -> None:
    begin = out.tell()
    if piece.source is not None:
        path, at = piece.source
        with path.open("rb") as source:
            _copy(source, at, out, piece.nbytes)
    elif piece.make is not None:
        for chunk in piece.make():
            out.write(chunk)
    if out.tell() - begin != piece.nbytes:
        raise UsageError(
            f"expected {piece.nbytes} bytes of {piece.name}, found {out.tell() - begin}: the file is short"
        )


def _copy(source: BinaryIO, at: int, out: BinaryIO, nbytes: int) -> None:
    """Copy bytes from one file to the end of another, inside the kernel where it can."""
    out.flush()
    into, end = out.tell(), at + nbytes
    kernel = getattr(os, "copy_file_range", None)
    while kernel is not None and at < end:
        try:
            count = kernel(source.fileno(), out.fileno(), min(end - at, 1 << 30), at, into)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            break
        if count == 0:
            break
        at, into = at + count, into + count
    out.seek(into)
    source.seek(at)
    while at < end and (chunk := source.read(min(CHUNK_BYTES, end - at))):
        out.write(chunk)
        at += len(chunk)
