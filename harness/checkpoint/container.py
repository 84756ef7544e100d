"""Open a checkpoint folder. Knows safetensors files and their index; must not know quantisation formats or models.

What is wrong is collected in `Checkpoint.problems`, so that a report can name all of it; what cannot be read is an
error at the moment it is read. Names in an index are hostile: no shard may leave the folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.checkpoint.header import Header, HeaderError, Problem, TensorRef, dtype_bits, read_header, torch_dtype
from harness.errors import CheckpointError, nearest

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_INDEX_BYTES = 1_000_000_000
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

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(ref.nbytes for ref in self.tensors.values())

    def read(self, name: str) -> Tensor:
        """Read one tensor as stored (F4 and F6 as their packed bytes, uint8 [..., bytes]).

        Raises:
            CheckpointError: there is no such tensor, or its bytes are not all there.
        """
        ref = self.tensors.get(name)
        if ref is None:
            raise CheckpointError(
                f"expected a tensor {name!r} in {self.path}{nearest(name, list(self.tensors)[:2000])}"
            )
        buffer = bytearray(ref.nbytes)
        with (self.path / ref.file).open("rb") as stream:
            stream.seek(ref.begin)
            read = stream.readinto(buffer)
        if read != ref.nbytes:
            raise CheckpointError(
                f"expected {ref.nbytes} bytes of {name!r} at byte {ref.begin} of {ref.file}, found {read}: the shard "
                "is truncated; fetch it again"
            )
        dtype, shape = torch_dtype(ref.dtype), ref.shape
        if dtype_bits(ref.dtype) < 8:
            shape = (*shape[:-1], ref.nbytes // max(1, _product(shape[:-1])))
        if not buffer:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).reshape(shape)

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


def _product(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a checkpoint folder, or a single safetensors file. Reads headers only.

    Raises:
        CheckpointError: there is nothing there that could be a checkpoint.
    """
    path = Path(path).resolve()
    if path.is_file() and path.suffix == ".safetensors":
        return _assemble(path.parent, [path.name], None, b"", [])
    if not path.is_dir():
        raise CheckpointError(f"expected a checkpoint folder, found nothing at {path}; check the path")
    present = sorted(p.name for p in path.glob("*.safetensors"))
    problems: list[Problem] = []
    if (path / INDEX).is_file():
        index, raw = _read_index(path / INDEX, problems)
        return _assemble(path, present, index, raw, problems)
    if not present:
        raise CheckpointError(f"expected {SINGLE} or {INDEX} in {path}, found neither; only safetensors are read")
    shards = [SINGLE] if SINGLE in present else present
    if len(shards) > 1:
        found = f"{len(present)} files without an index"
        problems.append(Problem(kind="missing_index", name="", file=INDEX, expected=INDEX, found=found))
    checkpoint = _assemble(path, shards, None, b"", problems)
    strays = list(checkpoint.problems)
    _find_strays(path, [f for f in present if f not in shards], checkpoint.tensors, strays)
    return dataclasses.replace(checkpoint, problems=tuple(strays))


def _read_index(path: Path, problems: list[Problem]) -> tuple[dict[str, Any], bytes]:
    """Read the index. One that is no index at all is an error; entries that are wrong become problems."""
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise CheckpointError(f"expected an index of at most {MAX_INDEX_BYTES} bytes, found more at {path}")
    raw = path.read_bytes()
    duplicates: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                duplicates.append(key)
            result[key] = value
        return result

    try:
        index = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"expected a JSON index at {path}, found: {str(error)[:200]}; fetch it again") from None
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        raise CheckpointError(f"expected an object with a weight_map at {path}, found none; fetch it again")
    for key in duplicates:
        problems.append(Problem(kind="duplicate_key", name=key, file=path.name, expected="the key once", found="twice"))
    return index, raw


def _safe_file(folder: Path, name: Any) -> str:
    """Return why a shard name must not be opened, or an empty string."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return "a plain file name"
    target = folder / name
    if Path(name).is_absolute() or Path(name).name != name:
        return "a file name without folders"
    if target.is_symlink():
        # A download cache keeps `snapshots/<revision>/<name>` as links into its own `blobs`; nothing else may leave.
        resolved = target.resolve()
        blobs = folder.parent.parent / "blobs"
        if resolved.parent not in (folder, blobs):
            return "a link that stays inside the folder"
    if target.exists() and not target.is_file():
        return "a regular file"
    return ""


def _try_header(
    folder: Path, file: str, problems: list[Problem], headers: dict[str, Header]
) -> Mapping[str, TensorRef]:
    unsafe = _safe_file(folder, file)
    if unsafe:
        problems.append(
            Problem(kind="unsafe_name", name="", file=str(file)[:200], expected=unsafe, found=repr(file)[:200])
        )
        return {}
    if not (folder / file).is_file():
        problems.append(
            Problem(kind="missing_shard", name="", file=file, expected="the shard on disk", found="no file")
        )
        return {}
    try:
        headers[file] = read_header(folder / file, file)
    except HeaderError as error:
        problems.extend(error.problems)
        return {}
    problems.extend(headers[file].problems)
    return headers[file].tensors


def _assemble(
    folder: Path,
    present: list[str],
    index: dict[str, Any] | None,
    raw: bytes,
    problems: list[Problem],
) -> Checkpoint:
    headers: dict[str, Header] = {}
    tensors: dict[str, TensorRef] = {}
    if index is None:
        for file in present:
            for name, ref in _try_header(folder, file, problems, headers).items():
                if name in tensors:
                    expected, found = f"only in {tensors[name].file}", f"in {file} too"
                    problems.append(
                        Problem(kind="duplicate_tensor", name=name, file=file, expected=expected, found=found)
                    )
                tensors.setdefault(name, ref)
    else:
        tensors = _indexed(folder, index, problems, headers)
        named = {str(f) for f in index["weight_map"].values()}
        _find_strays(folder, [f for f in present if f not in named], tensors, problems)
    return Checkpoint(
        path=folder, tensors=tensors, problems=tuple(problems), headers=headers, config=_config(folder), index=raw
    )


def _indexed(
    folder: Path, index: dict[str, Any], problems: list[Problem], headers: dict[str, Header]
) -> dict[str, TensorRef]:
    """Hold the index against the headers of the shards that it names."""
    weight_map: dict[str, Any] = index["weight_map"]
    shards = {f: _try_header(folder, f, problems, headers) for f in sorted({str(f) for f in weight_map.values()})}
    owner = {name: file for file, refs in shards.items() for name in refs}
    tensors = {}
    for name, file in weight_map.items():
        ref = shards[str(file)].get(name)
        if ref is not None:
            tensors[name] = ref
        elif str(file) in headers:
            found = f"in {owner[name]}" if name in owner else "in no shard"
            expected = f"in {file}, as the index says"
            problems.append(Problem(kind="not_in_shard", name=name, file=str(file), expected=expected, found=found))
        else:
            expected = f"in {file}, as the index says"
            problems.append(Problem(kind="unreadable", name=name, file=str(file), expected=expected, found="no header"))
    for file, refs in shards.items():
        for name in refs:
            if name not in weight_map:
                found = "no entry"
                problems.append(Problem(kind="not_in_index", name=name, file=file, expected="an entry", found=found))
            elif weight_map[name] != file and name in tensors:
                expected, found = f"only in {weight_map[name]}", f"in {file} too"
                problems.append(Problem(kind="duplicate_tensor", name=name, file=file, expected=expected, found=found))
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    size = sum(ref.nbytes for ref in tensors.values())
    if total is not None and total != size and all(f in headers for f in shards):
        found = f"{size} bytes in the headers"
        problems.append(
            Problem(kind="total_size", name="", file=INDEX, expected=f"{str(total)[:40]} bytes", found=found)
        )
    return tensors


def _find_strays(folder: Path, names: list[str], tensors: Mapping[str, TensorRef], problems: list[Problem]) -> None:
    """Name the files that nothing refers to; one that repeats tensors can be loaded instead of the indexed ones."""
    for file in names:
        found_there: Mapping[str, TensorRef] = _try_header(folder, file, [], {})
        again = sorted(set(found_there) & set(tensors))
        kind = "shadowing_shard" if again else "stray_shard"
        found = f"a file with {len(again)} tensors of the checkpoint again" if again else "a file that nothing names"
        name = again[0] if again else ""
        problems.append(Problem(kind=kind, name=name, file=file, expected="only the shards of the index", found=found))


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
