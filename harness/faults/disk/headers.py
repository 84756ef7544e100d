"""Damages to one file's header and bytes. Knows the container; must not know formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.faults.disk.damage import a_matrix, damage
from harness.faults.disk.files import Files

Entries = dict[str, Any]


def _file(files: Files) -> str:
    return sorted(files.shards)[1]


def _header(files: Files, edit: Callable[[Entries], bytes | None]) -> list[str]:
    files.header_edits[_file(files)] = edit
    return [_file(files)]


def _entry(files: Files, edit: Callable[[Entries], Any]) -> list[str]:
    """Edit the entry of a matrix."""
    weight = a_matrix(files)
    name = weight.parts["weight"]

    def change(header: Entries) -> None:
        edit(header[name])

    file = files.file_of(name)
    files.header_edits[file] = change
    return [name, file]


def _bytes(files: Files, edit: Callable[[bytes], bytes]) -> list[str]:
    """Edit the finished file of a matrix."""
    file = files.file_of(a_matrix(files).parts["weight"])

    def act(folder: Path) -> None:
        (folder / file).write_bytes(edit((folder / file).read_bytes()))

    files.after.append(act)
    return [file, *files.shards[file]]


@damage("headers", "header.*bytes|bytes of header")
def length_absurd(files: Files) -> list[str]:
    """The length of a header is larger than any header may be."""
    return _bytes(files, lambda raw: (1 << 62).to_bytes(8, "little") + raw[8:])


@damage("headers", "header of")
def length_beyond_the_file(files: Files) -> list[str]:
    """The length of a header goes beyond the end of its file."""
    return _bytes(files, lambda raw: (len(raw) + 5).to_bytes(8, "little") + raw[8:])


@damage("headers", "header")
def cut_in_the_header(files: Files) -> list[str]:
    """A file ends within its header."""
    return _bytes(files, lambda raw: raw[:40])


@damage("headers", "header")
def empty_file(files: Files) -> list[str]:
    """A file is there and holds nothing."""
    return _bytes(files, lambda raw: b"")


@damage("headers", "JSON")
def header_overwritten(files: Files) -> list[str]:
    """Bytes in the middle of a header are other ones."""
    return _bytes(files, lambda raw: raw[:60] + b"\x00\xff\x07" + raw[63:])


@damage("headers", "truncat|data up to byte")
def cut_short(files: Files) -> list[str]:
    """A file ends 1000 bytes early, as an interrupted download leaves it."""
    return _bytes(files, lambda raw: raw[:-1000])


@damage("headers", "file of")
def trailing_bytes(files: Files) -> list[str]:
    """Bytes follow the last tensor."""
    return _bytes(files, lambda raw: raw + b"\0" * 64)


@damage("headers", "JSON|header|pointer|lfs")
def pointer_left(files: Files) -> list[str]:
    """A file is the few lines that stand for a large file which was not fetched."""
    text = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4096\n"
    return _bytes(files, lambda raw: text)


@damage("headers", "twice")
def key_twice(files: Files) -> list[str]:
    """A tensor's name stands twice in a header; readers keep one of the two."""
    name = a_matrix(files).parts["weight"]
    file = files.file_of(name)

    def twice(header: Entries) -> bytes:
        first = json.dumps({name: {**header[name], "shape": [1, *header[name]["shape"]]}})
        return (first[:-1] + ", " + json.dumps(header)[1:]).encode()

    files.header_edits[file] = twice
    return [name, file]


@damage("headers", "begin at byte")
def overlap(files: Files) -> list[str]:
    """Two tensors share bytes."""

    def edit(header: Entries) -> None:
        names = [n for n in header if n != "__metadata__"]
        a, b = next(
            (a, b) for a in names for b in names
            if a != b and header[a]["shape"] == header[b]["shape"] and header[a]["dtype"] == header[b]["dtype"]
        )  # fmt: skip
        header[b]["data_offsets"] = list(header[a]["data_offsets"])

    return [*_header(files, edit), "*"]


@damage("headers", "begin at byte")
def hole(files: Files) -> list[str]:
    """Bytes between two tensors belong to none: an entry was taken out of the header."""

    def edit(header: Entries) -> None:
        names = [n for n in header if n != "__metadata__"]
        del header[names[len(names) // 2]]

    return [*_header(files, edit), "*"]


@damage("headers", "dtype")
def dtype_unknown(files: Files) -> list[str]:
    """A dtype that no reader knows."""
    return _entry(files, lambda entry: entry.update(dtype="F12_E6M5"))


@damage("headers", "bytes for")
def dtype_of_another_width(files: Files) -> list[str]:
    """A dtype of another width over the same bytes."""
    return _entry(files, lambda entry: entry.update(dtype="F64"))


@damage("headers", "non-negative")
def offsets_negative(files: Files) -> list[str]:
    """An offset before the data."""
    return _entry(files, lambda entry: entry.update(data_offsets=[-8, entry["data_offsets"][1]]))


@damage("headers", "bytes for")
def offsets_backwards(files: Files) -> list[str]:
    """Offsets whose end lies before their beginning."""
    return _entry(files, lambda entry: entry.update(data_offsets=entry["data_offsets"][::-1]))


@damage("headers", "shape of non-negative")
def size_beyond_64_bits(files: Files) -> list[str]:
    """A size that wraps around in 64 bits."""
    return _entry(files, lambda entry: entry.update(shape=[2**64 + entry["shape"][0], *entry["shape"][1:]]))


@damage("headers", "object of dtype")
def entry_without_a_shape(files: Files) -> list[str]:
    """An entry has no shape."""
    return _entry(files, lambda entry: entry.pop("shape"))


@damage("headers", "strings|metadata")
def metadata_of_objects(files: Files) -> list[str]:
    """The metadata of a header holds something other than strings."""
    return _header(files, lambda header: header.update(__metadata__={"format": {"a": 1}}))
