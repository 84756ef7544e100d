"""Stream every shard of a checkpoint once: digests, checks of stored codes, statistics of decoded values.

Knows bytes and formats; must not know models, ports or limits. Files are read, never mapped: a shard that shrinks or
vanishes meanwhile is a problem of that shard, and what was learned of the others is kept. Memory is bounded by a piece
of a tensor and its scales, by thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.formats import Logical, decode_parts, logical_tensors
from harness.checkpoint.header import Problem, TensorRef
from harness.checkpoint.scan.codes import Codes, code_problems
from harness.checkpoint.scan.convert import Conversion, Fp8Blocks
from harness.checkpoint.scan.pieces import MX_FOUR_BIT, Piece, Pieces
from harness.checkpoint.scan.statistics import Profile, Statistics
from harness.errors import CheckpointError
from harness.types import as_json, digest_of, from_json

UNLIKELY = frozenset({"all_zero", "zero_scale", "negative_scale", "wild_scale"})
"""Kinds that a right checkpoint may show: an unused gate, a block of zeros. They are warnings."""
SAMPLE_BYTES = 1 << 26
"""Bytes of the weight that a pass is timed on before it starts, at most."""

Progress = Callable[[int], None]
"""Told how many bytes were read since it was last called; from several threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardScan:
    """What one pass over one file has shown. `digests` by algorithm, hex; empty where the file could not be read whole.

    `key` is what the file must still be for this to stand: its size, time of change and header.
    """

    file: str
    key: str
    file_bytes: int
    digests: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    statistics: tuple[Statistics, ...] = ()
    conversions: tuple[Conversion, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What a pass over a shard needs: the weight and role of each stored tensor, and what to compute."""

    checkpoint: Checkpoint
    roles: Mapping[str, tuple[Logical, str]]
    algorithms: tuple[str, ...]
    values: bool
    progress: Progress


def scan(
    checkpoint: Checkpoint,
    *,
    algorithms: Sequence[str] = ("blake3",),
    values: bool = True,
    workers: int = 0,
    state: Path | None = None,
    progress: Progress = lambda _: None,
) -> Iterator[ShardScan]:
    """Yield what one pass over each shard shows, in the order of the shards.

    `values` False leaves out the decoded pass. `workers`: threads, one shard each (0: one for each processor).
    `state` is a file of finished shards (JSON lines): those that did not change since are taken from it, and each new
    one is added as soon as it is done.
    """
    roles = _roles(checkpoint)
    job = _Job(
        checkpoint=checkpoint, roles=roles, algorithms=tuple(algorithms), values=values, progress=progress
    )  # fmt: skip
    known = _finished(state)
    workers = min(len(checkpoint.headers), workers or os.cpu_count() or 1) or 1
    with ThreadPoolExecutor(workers, thread_name_prefix="scan") as pool:
        asked = [
            (file, pool.submit(partial(_shard, job, file, known.get(file), workers))) for file in checkpoint.headers
        ]
        try:
            for file, future in asked:
                found = future.result()
                if state is not None and found is not known.get(file):
                    _keep(state, found)
                yield found
        finally:
            for _, future in asked:
                future.cancel()


def scan_bytes(checkpoint: Checkpoint) -> int:
    """Return how many bytes a whole pass reads."""
    return sum(h.file_bytes for h in checkpoint.headers.values())


def _roles(checkpoint: Checkpoint) -> dict[str, tuple[Logical, str]]:
    """Return the weight and the role of each stored tensor."""
    return {part: (x, role) for x in logical_tensors(checkpoint) for role, part in x.parts.items()}


def expected_seconds(checkpoint: Checkpoint, *, values: bool = True) -> float:
    """Return how long a whole pass should take: the time of one weight, for all bytes, over all processors.

    The weight is the largest of a moderate size, stored as most of the bytes are.
    """
    roles = _roles(checkpoint)
    by_format: dict[str, list[TensorRef]] = {}
    for name, ref in checkpoint.tensors.items():
        logical, role = roles.get(name, (None, ""))
        if logical is not None and role == "weight" and 0 < ref.nbytes <= SAMPLE_BYTES:
            by_format.setdefault(logical.format, []).append(ref)
    if not by_format:
        return 0.0
    most = max(by_format.values(), key=lambda refs: sum(r.nbytes for r in refs))
    ref = max(most, key=lambda r: r.nbytes)
    job = _Job(checkpoint=checkpoint, roles=roles, algorithms=("blake2b",), values=values, progress=lambda _: None)
    try:
        with (checkpoint.path / ref.file).open("rb", buffering=0) as stream:
            stream.seek(ref.begin)
            begin = time.perf_counter()
            _tensor(job, ref, stream, _Digests(job.algorithms, 1), [], [], [])
            took = time.perf_counter() - begin
    except (OSError, _Short):
        return 0.0
    workers = min(len(checkpoint.headers), os.cpu_count() or 1)
    return took / ref.nbytes * scan_bytes(checkpoint) / workers


# --- what is already known ---


def _key(job: _Job, file: str) -> str:
    status = (job.checkpoint.path / file).stat()
    header = hashlib.blake2b(job.checkpoint.headers[file].raw, digest_size=16).hexdigest()
    return digest_of([status.st_size, status.st_mtime_ns, header, list(job.algorithms), job.values])


def _finished(state: Path | None) -> dict[str, ShardScan]:
    if state is None or not state.is_file():
        return {}
    found = {}
    for line in state.read_text().splitlines():
        try:
            shard = from_json(ShardScan, json.loads(line))
        except (ValueError, TypeError, AttributeError):
            continue  # a line cut off by a kill: that shard is read again
        found[shard.file] = shard
    return found


def _keep(state: Path, shard: ShardScan) -> None:
    state.parent.mkdir(parents=True, exist_ok=True)
    with state.open("a") as stream:
        stream.write(json.dumps(as_json(shard)) + "\n")


# --- one shard ---


class _Short(Exception):
    """A file that ends, or cannot be read, before its header says."""


def _shard(job: _Job, file: str, known: ShardScan | None, workers: int) -> ShardScan:
    size = job.checkpoint.headers[file].file_bytes
    try:
        key = _key(job, file)
        if known is not None and known.key == key:
            job.progress(size)
            return known
        with (job.checkpoint.path / file).open("rb", buffering=0) as stream:
            return _read_shard(job, file, key, stream, _Digests(job.algorithms, workers))
    except OSError as error:
        return _lost(file, size, f"{type(error).__name__}: {error.strerror or error}")


def _lost(file: str, size: int, found: str, name: str = "", kept: Sequence[Statistics] = ()) -> ShardScan:
    problem = Problem(kind="unreadable", name=name, file=file, expected=f"{size} readable bytes", found=found)
    return ShardScan(file=file, key="", file_bytes=size, problems=(problem,), statistics=tuple(kept))


def _read_shard(job: _Job, file: str, key: str, stream: BinaryIO, digests: _Digests) -> ShardScan:
    header = job.checkpoint.headers[file]
    problems: list[Problem] = []
    statistics: list[Statistics] = []
    conversions: list[Conversion] = []
    at = min((r.begin for r in header.tensors.values()), default=header.file_bytes)
    name = ""
    try:
        if bytes(digests.update(_read(stream, at)))[: 8 + len(header.raw)][8:] != header.raw:
            raise _Short("another header than when it was opened: the file was replaced")
        for ref in sorted(header.tensors.values(), key=lambda r: r.begin):
            name = ref.name
            _tensor(job, ref, stream, digests, problems, statistics, conversions)
        while rest := stream.read(1 << 22):
            digests.update(bytearray(rest))
    except (_Short, OSError) as error:
        lost = _lost(file, header.file_bytes, str(error), name, statistics)
        return ShardScan(
            file=file, key="", file_bytes=header.file_bytes, problems=(*problems, *lost.problems),
            statistics=tuple(statistics), conversions=tuple(conversions),
        )  # fmt: skip
    return ShardScan(
        file=file, key=key, file_bytes=header.file_bytes, digests=digests.hex(), problems=tuple(problems),
        statistics=tuple(statistics), conversions=tuple(conversions),
    )  # fmt: skip


def _tensor(
    job: _Job,
    ref: TensorRef,
    stream: BinaryIO,
    digests: _Digests,
    problems: list[Problem],
    statistics: list[Statistics],
    conversions: list[Conversion],
) -> None:
    """Read one tensor piece by piece: its digest, its codes, and the values of the weight that it is the body of."""
    logical, role = job.roles.get(ref.name, (None, ""))
    body = logical if role == "weight" and logical is not None and not logical.problem and job.values else None
    codes = Codes(dtype=ref.dtype, scale=role in ("scale", "global"))
    pieces = Pieces(ref, body)
    weight: _Body | None = None
    try:
        weight = _Body(job.checkpoint, body, pieces) if body is not None and ref.numel else None
    except (CheckpointError, OSError) as error:
        problems.append(_told(ref, "undecodable", "codes and scales that can be read", str(error)))
    for piece in pieces:
        view = digests.update(_read(stream, piece.nbytes))
        job.progress(len(view))
        codes.take(view)
        try:
            if weight is not None:
                weight.take(view, piece)
        except CheckpointError as error:
            problems.append(_told(ref, "undecodable", "codes and scales that fit", str(error)))
            weight = None
    problems += [_told(ref, kind, expected, found) for kind, expected, found in code_problems(codes, ref.shape)]
    if weight is not None:
        statistics += weight.statistics
        conversions += weight.conversions


class _Body:
    """The weight whose codes are read: what its pieces decode to, matrix by matrix."""

    def __init__(self, checkpoint: Checkpoint, logical: Logical, pieces: Pieces) -> None:
        self._logical, self._pieces = logical, pieces
        self._sides = {
            role: checkpoint.read(name) for role, name in logical.parts.items() if role != "weight"
        }  # scales are a small share of a weight; they are read once more where they lie
        self._profile = Profile(pieces.block, pieces.rows)
        self._fp8 = Fp8Blocks() if logical.format in MX_FOUR_BIT else None
        self.statistics: list[Statistics] = []
        self.conversions: list[Conversion] = []

    def take(self, view: bytearray, piece: Piece) -> None:
        """Decode one piece. Raises CheckpointError where its scales do not fit."""
        parts = self._pieces.parts(view, piece, self._sides)
        self._profile.take(decode_parts(self._logical, parts))
        if self._fp8 is not None:
            self._fp8.take(parts["weight"], parts["scale"])
        if piece.stop == self._pieces.rows:
            self._end(piece)

    def _end(self, piece: Piece) -> None:
        logical, pieces = self._logical, self._pieces
        name = f"{logical.name}[{piece.matrix}]" if pieces.matrices > 1 else logical.name
        at = pieces.ref.begin + piece.matrix * pieces.rows * pieces.row_bytes
        self.statistics.append(
            self._profile.result(name=name, format=logical.format, file=pieces.ref.file, offset=at)
        )  # fmt: skip
        self._profile = Profile(pieces.block, pieces.rows)
        if self._fp8 is not None:
            self.conversions.append(self._fp8.result(name))
            self._fp8 = Fp8Blocks()


def _told(ref: TensorRef, kind: str, expected: str, found: str) -> Problem:
    return Problem(
        kind=kind, name=ref.name, file=ref.file, expected=expected, found=found, offset=ref.begin,
        severity="warning" if kind in UNLIKELY else "error",
    )  # fmt: skip


def _read(stream: BinaryIO, count: int) -> bytearray:
    buffer = bytearray(count)
    view, done = memoryview(buffer), 0
    while done < count:
        got = stream.readinto(view[done:])  # type: ignore[attr-defined]
        if not got:
            raise _Short(f"the file ends {count - done} bytes early: it shrank, or is truncated; fetch it again")
        done += got
    return buffer


class _Digests:
    """The digests of one file, fed as it is read."""

    def __init__(self, algorithms: Sequence[str], workers: int) -> None:
        self._states = {name: _hasher(name, max(1, (os.cpu_count() or 1) // workers)) for name in algorithms}

    def update(self, data: bytearray) -> bytearray:
        """Add bytes, and hand them on."""
        for state in self._states.values():
            state.update(data)
        return data

    def hex(self) -> dict[str, str]:
        """Return the digests."""
        return {name: state.hexdigest() for name, state in self._states.items()}


def _hasher(name: str, threads: int) -> Any:
    if name == "blake3":
        from blake3 import blake3

        return blake3(max_threads=threads)
    return hashlib.new(name)
