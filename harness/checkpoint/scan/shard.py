"""Read one shard from its first byte to its last: digests, stored codes, decoded values. Must not know other shards.

Files are read, never mapped: one that shrinks, vanishes, is replaced or written to meanwhile is a problem of that
shard, and what was learned until then is kept.
"""

from __future__ import annotations

import datetime
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from harness.checkpoint.container import Checkpoint, open_shard
from harness.checkpoint.formats import Logical
from harness.checkpoint.header import Problem, TensorRef
from harness.checkpoint.scan.body import Body, Helpers
from harness.checkpoint.scan.codes import Codes, code_problems
from harness.checkpoint.scan.convert import Conversion
from harness.checkpoint.scan.manifest import hasher
from harness.checkpoint.scan.pieces import PIECE_BYTES, Piece, Pieces
from harness.checkpoint.scan.statistics import Statistics
from harness.errors import CheckpointError
from harness.types import digest_of

VERSION = 4
"""Of what a pass looks at: results of another version are not reused."""
UNLIKELY = frozenset({"all_zero", "zero_scale", "negative_scale", "wild_scale"})
"""Kinds that a right checkpoint may show: an unused gate, a block of zeros. They are warnings."""

_MEMORY_BYTES = 1 << 22
"""Memory that is used again for piece after piece."""

Progress = Callable[[int], None]
"""Told how many bytes were read since it was last called; from several threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardScan:
    """What one pass over one file has shown. `digests` by algorithm, hex; empty where the file could not be read whole.

    `key` is what the file must still be for this to stand: its size, times of change and header. `read_at`: when it was
    read, UTC; `reused`: by an earlier pass.
    """

    file: str
    key: str
    file_bytes: int
    read_at: str = ""
    reused: bool = False
    digests: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    statistics: tuple[Statistics, ...] = ()
    conversions: tuple[Conversion, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a pass over a shard needs: the weight and role of each stored tensor, and what to compute."""

    checkpoint: Checkpoint
    roles: Mapping[str, tuple[Logical, str]]
    algorithms: tuple[str, ...]
    values: bool
    progress: Progress = lambda _: None
    helpers: Helpers = field(default_factory=Helpers)


class Short(Exception):
    """A file that ends, or is no longer the one that was opened, before its header says."""


def read_shard(job: Job, file: str, known: ShardScan | None = None) -> ShardScan:
    """Return what a pass over one file shows; `known`, from an earlier pass, where the file did not change since."""
    size = job.checkpoint.headers[file].file_bytes
    try:
        with open_shard(job.checkpoint.path / file) as stream:
            key = _key(job, file, stream)
            if known is not None and known.key == key:
                return replace(known, reused=True)
            return Reading(job, file, stream).all(key)
    except (OSError, CheckpointError) as error:
        found = f"{type(error).__name__}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        return ShardScan(file=file, key="", file_bytes=size, problems=(_unreadable(file, size, found),))


def stands(job: Job, file: str, known: ShardScan) -> bool:
    """Say whether what is known of a file is of the file as it is now."""
    try:
        with open_shard(job.checkpoint.path / file) as stream:
            return known.key == _key(job, file, stream)
    except (OSError, CheckpointError):
        return False


def _key(job: Job, file: str, stream: BinaryIO) -> str:
    header = hashlib.blake2b(job.checkpoint.headers[file].raw, digest_size=16).hexdigest()
    return digest_of([VERSION, *_identity(stream), header, list(job.algorithms), job.values])


def _identity(stream: BinaryIO) -> list[int]:
    status = os.fstat(stream.fileno())
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _unreadable(file: str, size: int, found: str, name: str = "") -> Problem:
    return Problem(kind="unreadable", name=name, file=file, expected=f"{size} readable bytes", found=found)


class Reading:
    """One file under way."""

    def __init__(self, job: Job, file: str, stream: BinaryIO) -> None:
        self._job, self._file, self._stream = job, file, stream
        self._header = job.checkpoint.headers[file]
        self._digests = Digests(job.algorithms)
        self._free: list[bytearray] = []
        self._problems: list[Problem] = []
        self._statistics: list[Statistics] = []
        self._conversions: list[Conversion] = []

    def all(self, key: str) -> ShardScan:
        """Read everything."""
        name, opened = "", _identity(self._stream)
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        digests: dict[str, str] = {}
        try:
            self._read_header()
            for ref in sorted(self._header.tensors.values(), key=lambda r: r.begin):
                name = ref.name
                self.tensor(ref)
            name = ""
            while rest := self._stream.read(PIECE_BYTES):
                self._digests.update(memoryview(rest))
            if _identity(self._stream) != opened:
                raise Short("it was written to while it was read; stop the writer, or copy it, and read it again")
            digests = self._digests.hex()
        except (Short, OSError) as error:
            key, found = "", f"{type(error).__name__}: {error}" if isinstance(error, OSError) else str(error)
            self._problems.append(_unreadable(self._file, self._header.file_bytes, found, name))
        return ShardScan(
            file=self._file, key=key, file_bytes=self._header.file_bytes, read_at=now, digests=digests,
            problems=tuple(self._problems), statistics=tuple(self._statistics), conversions=tuple(self._conversions),
        )  # fmt: skip

    def _read_header(self) -> None:
        """Read up to the first tensor; the header must be the one that was opened."""
        raw, refs = self._header.raw, self._header.tensors.values()
        view = self._next(min((r.begin for r in refs), default=self._header.file_bytes))
        if bytes(view[8 : 8 + len(raw)]) != raw:
            raise Short("another header than when it was opened: the file was replaced")
        self._give(view)

    def tensor(self, ref: TensorRef) -> None:
        """Read one tensor piece by piece: its digest, its codes, and the values of the weight whose body it is."""
        logical, role = self._job.roles.get(ref.name, (None, ""))
        decoded = role == "weight" and logical is not None and not logical.problem and self._job.values
        pieces = Pieces(ref, logical if decoded else None)
        codes = Codes(dtype=ref.dtype, scale=role in ("scale", "global"))
        body = self._body(logical, pieces) if decoded and logical is not None and ref.numel else None
        whole = False
        try:
            for piece in pieces:
                view = self._next(piece.nbytes)
                self._job.progress(len(view))
                codes.take(view)
                if body is None:
                    self._give(view)
                elif not self._seen(body, ref, view, piece):
                    body = None
            whole = True
        finally:  # what was learned before a file went bad stands
            self._conclude(ref, codes, body, whole=whole)

    def _conclude(self, ref: TensorRef, codes: Codes, body: Body | None, *, whole: bool) -> None:
        for kind, expected, found in code_problems(codes, ref.shape, ref.name):
            if whole or kind not in UNLIKELY:
                self._problems.append(told(ref, kind, expected, found))
        if body is not None:
            self._statistics += body.statistics
            self._conversions += body.conversions
            self._problems += _empty_matrices(ref, body.statistics) if whole else []

    def _body(self, logical: Logical, pieces: Pieces) -> Body | None:
        try:
            return Body(self._job.checkpoint, logical, pieces, self._job.helpers, self._give)
        except (CheckpointError, OSError) as error:
            self._problems.append(told(pieces.ref, "undecodable", "codes and scales that can be read", str(error)))
            return None

    def _seen(self, body: Body, ref: TensorRef, view: memoryview, piece: Piece) -> bool:
        try:
            body.take(view, piece)
        except CheckpointError as error:
            body.drop()
            self._problems.append(told(ref, "undecodable", "codes and scales that fit", str(error)))
            return False
        return True

    def _next(self, count: int) -> memoryview:
        """Read the next bytes into memory that is used again, and add them to the digests."""
        fits = next((i for i, memory in enumerate(self._free) if len(memory) >= count), None)
        memory = self._free.pop(fits) if fits is not None else bytearray(max(count, _MEMORY_BYTES))
        view = memoryview(memory)[:count]
        done = 0
        while done < count:
            got = self._stream.readinto(view[done:])  # type: ignore[attr-defined]
            if not got:
                raise Short(f"the file ends {count - done} bytes early: it shrank, or is truncated; fetch it again")
            done += got
        self._digests.update(view)
        return view

    def _give(self, view: memoryview) -> None:
        """Take memory back, if it is no giant's."""
        if isinstance(view.obj, bytearray) and len(view.obj) <= _MEMORY_BYTES:
            self._free.append(view.obj)


def _empty_matrices(ref: TensorRef, statistics: Sequence[Statistics]) -> list[Problem]:
    """Name the matrices of a stack that hold zeros alone, where others do not."""
    empty = [s for s in statistics if not s.largest and not s.nonfinite and s.rows > 1]
    if len(statistics) < 2 or len(empty) == len(statistics):
        return []
    found = "zero in all of its elements"
    return [replace(told(ref, "all_zero", "a matrix with values", found), name=s.name, offset=s.offset) for s in empty]


def told(ref: TensorRef, kind: str, expected: str, found: str) -> Problem:
    """Return a problem of a tensor."""
    return Problem(
        kind=kind, name=ref.name, file=ref.file, expected=expected, found=found, offset=ref.begin,
        severity="warning" if kind in UNLIKELY else "error",
    )  # fmt: skip


class Digests:
    """The digests of one file, fed as it is read."""

    def __init__(self, algorithms: Sequence[str]) -> None:
        self._states = {name: hasher(name) for name in algorithms}

    def update(self, data: memoryview) -> None:
        """Add bytes."""
        for state in self._states.values():
            state.update(data)

    def hex(self) -> dict[str, str]:
        """Return the digests."""
        return {name: state.hexdigest() for name, state in self._states.items()}
