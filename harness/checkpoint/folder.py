"""Hold the files of a checkpoint folder against its index. Knows names, links and headers; no formats, no models.

Everything in the folder is hostile: no shard may leave it, nothing but regular files is opened, nothing large is read
before its size is known.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.checkpoint.header import Header, HeaderError, Problem, TensorRef, crowded, read_header
from harness.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_INDEX_BYTES = 300_000_000
MAX_CONFIG_BYTES = 30_000_000
MAX_ALL_HEADERS = 1_000_000_000
MAX_NAME_BYTES = 255
_NUMBERED = re.compile(r"^(.*?)-?(\d{1,9})-of-(\d{1,9})\.safetensors$")
_DERIVED = re.compile(r"(^|[._])(inv_freq|position_ids|masked_bias|attn\.bias|cos_cached|sin_cached)$")
"""Buffers that are computed: old indexes name them, and nothing is lost without them."""


@dataclass(slots=True)
class Contents:
    """What a folder holds, while it is being read."""

    folder: Path
    problems: list[Problem] = field(default_factory=list)
    headers: dict[str, Header] = field(default_factory=dict)
    tensors: dict[str, TensorRef] = field(default_factory=dict)
    index: bytes = b""

    def add(self, kind: str, expected: str, found: str, *, name: str = "", file: str = "", **more: Any) -> None:
        """Note a problem; a tensor of a known place brings its file and offset."""
        ref = self.tensors.get(name)
        if ref is not None and ref.file == file:
            more.setdefault("offset", ref.begin)
        self.problems.append(Problem(kind=kind, name=name, file=file, expected=expected, found=found, **more))


def read_single(path: Path) -> Contents:
    """Read one file as a whole checkpoint."""
    contents = Contents(path.parent)
    _merge(contents, [path.name])
    return contents


def read_folder(path: Path) -> Contents:
    """Read the headers of a folder, and its index where there is one.

    Raises:
        CheckpointError: there is nothing that could be a checkpoint, or the index is none.
    """
    contents = Contents(path)
    present = sorted(p.name for p in path.glob("*.safetensors"))
    if (path / INDEX).is_file():
        _from_index(contents, _read_index(contents, path / INDEX), present)
    elif not present:
        raise CheckpointError(f"expected {SINGLE} or {INDEX} in {path}, found neither; only safetensors are read")
    else:
        shards = [SINGLE] if SINGLE in present else present
        if len(shards) > 1:
            contents.add("missing_index", INDEX, f"{len(present)} files without an index", file=INDEX)
        _merge(contents, shards)
        _strays(contents, [f for f in present if f not in shards])
    _names(contents, present)
    return contents


def read_json(path: Path, limit: int = MAX_CONFIG_BYTES) -> tuple[Any, list[str]]:
    """Read a JSON file of at most `limit` bytes. Returns its value, and the keys that some object names twice.

    Raises:
        ValueError: it is too large, too crowded, or no JSON.
        OSError: it is no regular file, or cannot be read.
    """
    if not path.is_file():
        raise OSError("no regular file")
    with path.open("rb") as stream:
        raw = stream.read(limit + 1)
    if len(raw) > limit:
        raise ValueError(f"more than {limit} bytes")
    return parse_json(raw)


def parse_json(raw: bytes) -> tuple[Any, list[str]]:
    """Parse JSON from outside. Returns its value, and the keys that some object names twice.

    Raises:
        ValueError: it is no JSON, nests too deep, or holds so many values that they would fill memory.
    """
    if len(raw) > 1 << 20 and (reason := crowded(raw)):
        raise ValueError(reason)
    twice: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice.extend(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        return result

    try:
        text = raw.decode("utf-8")
        if len(raw) > 1 << 20 and b"\\" not in raw and raw.count(b'"') == _quotes(value := json.loads(text)):
            return value, []  # as many strings as the text has: no key was lost on another of its name
        return json.loads(text, object_pairs_hook=unique), twice
    except RecursionError:
        raise ValueError("objects nested too deep") from None


def _quotes(value: Any, depth: int = 0) -> int:
    """Count the quotes that a value takes in JSON; -1 for what nests deeper than an index does."""
    if isinstance(value, str):
        return 2
    if not isinstance(value, dict):
        return 0
    if depth > 3:
        return -1
    return 2 * len(value) + sum(2 if type(v) is str else _quotes(v, depth + 1) for v in value.values())


def _read_index(contents: Contents, path: Path) -> dict[str, Any]:
    """Read the index. One that is no index at all is an error; entries that are wrong become problems."""
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise CheckpointError(f"expected an index of at most {MAX_INDEX_BYTES} bytes, found more at {path}")
    contents.index = path.read_bytes()
    try:
        index, twice = parse_json(contents.index)
    except ValueError as error:
        raise CheckpointError(f"expected a JSON index at {path}, found: {str(error)[:200]}; fetch it again") from None
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        raise CheckpointError(f"expected an object with a weight_map at {path}, found none; fetch it again")
    for key in twice:
        contents.add("duplicate_key", "the key once", "twice", name=key, file=path.name)
    return index


def _unsafe(folder: Path, name: Any) -> str:
    """Return why a shard name must not be opened, or an empty string."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return "a plain file name"
    if not name.isprintable() or len(name.encode("utf-8", "replace")) > MAX_NAME_BYTES:
        return "a name that a file can have"
    target = folder / name
    if Path(name).is_absolute() or Path(name).name != name:
        return "a file name without folders"
    if target.is_symlink():
        # A download cache keeps `snapshots/<revision>/<name>` as links into its own `blobs`; nothing else may leave.
        try:
            resolved = target.resolve()
        except (OSError, RuntimeError):
            return "a link that ends somewhere"
        if resolved.parent not in (folder, folder.parent.parent / "blobs"):
            return "a link that stays inside the folder"
    if target.exists() and not target.is_file():
        return "a regular file"
    return ""


def _open(contents: Contents, file: str) -> Mapping[str, TensorRef]:
    """Read the header of one shard; what is wrong with it becomes problems."""
    unsafe = _unsafe(contents.folder, file)
    if unsafe:
        contents.add("unsafe_name", unsafe, repr(file)[:200], file=str(file)[:200])
        return {}
    path = contents.folder / file
    if not path.is_file():
        contents.add("missing_shard", "the shard on disk", "no file", file=file)
        return {}
    read = sum(len(h.raw) for h in contents.headers.values())
    if read > MAX_ALL_HEADERS:
        contents.add("header_too_large", f"headers of at most {MAX_ALL_HEADERS} bytes", f"{read} so far", file=file)
        return {}
    try:
        header = read_header(path, file)
    except HeaderError as error:
        contents.problems.extend(error.problems)
        return {}
    except OSError as error:
        contents.add("unreadable_shard", "a file that can be read", str(error.strerror or error), file=file)
        return {}
    contents.headers[file] = header
    contents.problems.extend(header.problems)
    return header.tensors


def _merge(contents: Contents, files: Iterable[str]) -> None:
    """Take the tensors of files that no index orders."""
    for file in files:
        for name, ref in _open(contents, file).items():
            if name in contents.tensors:
                contents.add(
                    "duplicate_tensor", f"only in {contents.tensors[name].file}", f"in {file} too", name=name,
                    file=file, offset=ref.begin,
                )  # fmt: skip
            contents.tensors.setdefault(name, ref)


def _from_index(contents: Contents, index: dict[str, Any], present: list[str]) -> None:
    weight_map: dict[str, Any] = index["weight_map"]
    named = sorted({file if isinstance(file, str) else repr(file)[:200] for file in weight_map.values()})
    shards = {file: _open(contents, file) for file in named}
    _indexed(contents, weight_map, shards)
    _total_size(contents, index.get("metadata"), whole=all(f in contents.headers for f in shards))
    _strays(contents, [f for f in present if f not in shards])


def _indexed(contents: Contents, weight_map: Mapping[str, Any], shards: Mapping[str, Mapping[str, TensorRef]]) -> None:
    """Take the tensors where the index says, and name those that are elsewhere, nowhere or not in the index."""
    tensors, lost = contents.tensors, []
    for name, file in weight_map.items():
        ref = shards[file].get(name) if isinstance(file, str) else None
        if ref is not None:
            tensors[ref.name] = ref  # one string for a name: the index's own copies go with it
        else:
            lost.append((name, file if isinstance(file, str) else repr(file)[:200]))
    owner = {name: file for file, refs in shards.items() for name in refs} if lost else {}
    for name, file in lost:
        expected = f"in {file}, as the index says"
        if file not in contents.headers:
            contents.add("unreadable", expected, "no header", name=name, file=file)
        elif name in owner:
            at = shards[owner[name]][name].begin
            contents.add("not_in_shard", expected, f"in {owner[name]} at byte {at}", name=name, file=file)
        elif _DERIVED.search(name):
            found = "in no shard; it is computed, old indexes name it"
            contents.add("legacy_key", expected, found, name=name, file=file, severity="note")
        else:
            contents.add("not_in_shard", expected, "in no shard", name=name, file=file)
    for file, refs in shards.items():
        for name, ref in refs.items():
            place = weight_map.get(name)
            if place == file:
                continue
            if name not in weight_map:
                contents.add("not_in_index", "an entry", "no entry", name=name, file=file, offset=ref.begin)
            elif name in tensors:
                contents.add(
                    "duplicate_tensor", f"only in {place}", f"in {file} too", name=name, file=file, offset=ref.begin
                )


def _total_size(contents: Contents, metadata: Any, *, whole: bool) -> None:
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    size = sum(ref.nbytes for ref in contents.tensors.values())
    if total is not None and total != size and whole:
        words = repr(total)[:40] if not isinstance(total, int) or abs(total) < 1 << 200 else "an absurd number of"
        contents.add("total_size", f"{words} bytes", f"{size} bytes in the headers", file=INDEX)


def _strays(contents: Contents, names: list[str]) -> None:
    """Name the files that nothing refers to; one that repeats tensors can be loaded instead of the indexed ones."""
    for file in names:
        aside = Contents(contents.folder)
        found_there = _open(aside, file)
        again = next((name for name in found_there if name in contents.tensors), "")
        if again:
            count = sum(name in contents.tensors for name in found_there)
            found, more = f"a file with {count} tensors of the checkpoint again", {"offset": found_there[again].begin}
            contents.add("shadowing_shard", "only the shards of the index", found, name=again, file=file, **more)
        else:
            found = "a file that nothing names"
            contents.add("stray_shard", "only the shards of the index", found, file=file, severity="warning")


def _names(contents: Contents, present: list[str]) -> None:
    """Look at the file names alone: numbers that are left out, names that differ by case only."""
    counts: dict[tuple[str, int], set[int]] = defaultdict(set)
    for file in contents.headers:
        if match := _NUMBERED.match(file):
            counts[match[1], int(match[3])].add(int(match[2]))
    for (stem, total), numbers in counts.items():
        if total <= 100_000 and not {p.file for p in contents.problems if p.kind == "missing_shard"}:
            gone = sorted(set(range(1, total + 1)) - numbers)
            if gone and 0 not in numbers:
                found = f"{len(gone)} that nothing names, the first number {gone[0]}"
                contents.add("shard_numbers", f"{total} files {stem}-*", found, severity="warning")
    seen: dict[str, str] = {}
    for file in dict.fromkeys((*present, *contents.headers)):
        other = seen.setdefault(file.casefold(), file)
        if other != file:
            found = f"{other} too, the same name on some systems"
            contents.add("case_collision", "file names that differ by more than case", found, file=file)
