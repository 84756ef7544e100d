"""Read the header of one safetensors file. Knows the container's bytes; must not know indexes, formats or models.

The file is hostile input: nothing is mapped or allocated before lengths, offsets and shapes were checked against the
size of the file. Source of the layout: the safetensors format description (u64 little-endian header length, JSON, then
data).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

MAX_HEADER_BYTES = 100_000_000
MAX_AXES = 32
_POINTER = b"version https://git-lfs.github.com/spec/"
_BYTES_A_MARK = {b"{": 24, b"[": 12, b",": 6}
"""Fewest bytes of a true header for each of these, on average: denser text is built to fill memory when parsed."""

_DTYPES: dict[str, tuple[int, torch.dtype]] = {
    "BOOL": (8, torch.bool),
    "U8": (8, torch.uint8),
    "I8": (8, torch.int8),
    "I16": (16, torch.int16),
    "I32": (32, torch.int32),
    "I64": (64, torch.int64),
    "F16": (16, torch.float16),
    "BF16": (16, torch.bfloat16),
    "F32": (32, torch.float32),
    "F64": (64, torch.float64),
    "C64": (64, torch.complex64),
    # No arithmetic exists on packed small floats: they are read as the bytes they are.
    "F4": (4, torch.uint8),
    "F6_E2M3": (6, torch.uint8),
    "F6_E3M2": (6, torch.uint8),
}
for _name, _bits, _attribute in (
    ("U16", 16, "uint16"),
    ("U32", 32, "uint32"),
    ("U64", 64, "uint64"),
    ("F8_E4M3", 8, "float8_e4m3fn"),
    ("F8_E5M2", 8, "float8_e5m2"),
    ("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
    ("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
    ("F8_E8M0", 8, "float8_e8m0fnu"),
):
    # Older torch builds lack some of them; their bytes are then read as unsigned or signed integers of that width.
    _fallback = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[_bits]
    _DTYPES[_name] = (_bits, getattr(torch, _attribute, _fallback))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """Where one tensor lies. `begin` and `end` are byte offsets from the start of `file`; `dtype` is as stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.end - self.begin

    @property
    def numel(self) -> int:
        """Number of elements as the header counts them (a packed U8 tensor counts its bytes)."""
        return _product(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing in which a checkpoint is not what it says. `name` is a tensor, a file or empty.

    `severity`: error (it is wrong), warning (nobody makes it so on purpose), note (worth knowing, and why it is right).
    `offset` is the byte of `file` where the tensor begins, where one is known.
    """

    kind: str
    name: str
    file: str
    expected: str
    found: str
    severity: str = "error"
    offset: int | None = None

    @property
    def message(self) -> str:
        """The two halves as one sentence."""
        return f"expected {self.expected}, found {self.found}"


class HeaderError(Exception):
    """A header that must not be trusted, as the problems found in it."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{p.kind}: expected {p.expected}, found {p.found}" for p in problems))
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The tensors of one file, its metadata, and problems that leave the other tensors usable (a truncated tail)."""

    tensors: Mapping[str, TensorRef]
    metadata: Mapping[str, str]
    problems: tuple[Problem, ...]
    raw: bytes
    file_bytes: int


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype that the bytes of a container dtype are read as."""
    return _DTYPES[name][1]


def dtype_bits(name: str) -> int:
    """Return the bits of one element of a container dtype."""
    return _DTYPES[name][0]


def read_header(path: Path, file: str) -> Header:
    """Read and check the header of `path`, which its folder calls `file`.

    Raises:
        HeaderError: the header cannot be trusted at all.
    """

    def refuse(kind: str, expected: str, found: str, name: str = "") -> HeaderError:
        return HeaderError([Problem(kind=kind, name=name, file=file, expected=expected, found=found)])

    file_bytes = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        if prefix == _POINTER[:8] and file_bytes < 1024 and stream.read(len(_POINTER) - 8) == _POINTER[8:]:
            raise refuse("not_fetched", "a safetensors file", "the pointer of a large file: fetch it (git lfs pull)")
        if len(prefix) < 8:
            raise refuse("truncated_header", "8 bytes of header length", f"a file of {file_bytes} bytes")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise refuse("header_too_large", f"a header of at most {MAX_HEADER_BYTES} bytes", f"{length} bytes")
        if length > file_bytes - 8:
            raise refuse("truncated_header", f"a header of {length} bytes", f"{file_bytes - 8} bytes after its length")
        raw = stream.read(length)
    if reason := crowded(raw):
        raise refuse("bad_header", "the text of a header", reason)
    try:
        entries = _parsed(raw)
    except (ValueError, RecursionError) as error:
        kind = "duplicate_key" if isinstance(error, _DuplicateKey) else "bad_header"
        raise refuse(kind, "a JSON object with unique keys", str(error)[:200]) from None
    if not isinstance(entries, dict):
        raise refuse("bad_header", "a JSON object", type(entries).__name__)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise refuse("bad_header", "__metadata__ of strings", type(metadata).__name__)
    tensors = _entries(entries, file=file, data_start=8 + length)
    problems = _tiling_problems(tensors, file=file, data_start=8 + length, file_bytes=file_bytes)
    return Header(tensors=tensors, metadata=metadata, problems=problems, raw=raw, file_bytes=file_bytes)


def crowded(raw: bytes) -> str:
    """Return why a text must not be parsed: so many values in so few bytes that they would fill memory; else empty."""
    for mark, each in _BYTES_A_MARK.items():
        count = raw.count(mark)
        if count * each > len(raw) + (1 << 16):
            return f"{count} of {mark.decode()!r} in {len(raw)} bytes"
    return ""


def _parsed(raw: bytes) -> Any:
    """Parse a header whose keys are unique.

    Each entry of a right header has five strings. Where the quotes of the text are as many, no key was lost on another
    of its name; else the text is parsed again, slowly, with an eye on every object.

    Raises:
        ValueError: it is no JSON, or a key stands twice.
    """
    text = raw.decode("utf-8")
    entries = json.loads(text, parse_constant=_no_constant)
    if isinstance(entries, dict) and b"\\" not in raw:
        metadata = entries.get("__metadata__")
        quotes = 10 * len(entries) + (4 * len(metadata) - 8 if isinstance(metadata, dict) else 0)
        if raw.count(b'"') == quotes:
            return entries
    return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)


class _DuplicateKey(ValueError):
    pass


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        again = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise _DuplicateKey(f"the key {again!r} twice")
    return result


def _no_constant(word: str) -> Any:
    raise ValueError(f"the constant {word}")


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


_UNKNOWN: tuple[tuple[int, ...], int] = ((), -1)


def _entries(entries: Mapping[str, Any], *, file: str, data_start: int) -> dict[str, TensorRef]:
    """Check every entry. Shapes come in few kinds, so that each is checked, counted and kept once."""
    tensors: dict[str, TensorRef] = {}
    sizes: dict[tuple[Any, ...], tuple[tuple[int, ...], int]] = {}
    for name, entry in entries.items():
        try:
            dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
            begin, end = offsets
            key = (dtype, *shape)
            kept, size = sizes.get(key, _UNKNOWN)
            # True and 1.0 are equal to 1 as keys: the types are checked each time.
            known = size == end - begin and len(entry) == 3 and {int}.issuperset(map(type, (begin, end, *shape)))
        except (TypeError, ValueError, KeyError):
            known = False
        if not known or begin < 0 or end >= 2**63:
            kept, begin, end = _checked(name, entry, file=file)
            sizes[(entry["dtype"], *kept)] = (kept, end - begin)
        tensors[name] = TensorRef(
            name=name, dtype=entry["dtype"], shape=kept, file=file, begin=data_start + begin, end=data_start + end
        )
    return tensors


def _checked(name: str, entry: Any, *, file: str) -> tuple[tuple[int, ...], int, int]:
    """Return the shape and offsets of one entry.

    Raises:
        HeaderError: it is no entry, or its offsets are not those of its shape.
    """

    def refuse(expected: str, found: str, kind: str = "bad_entry") -> HeaderError:
        return HeaderError([Problem(kind=kind, name=name, file=file, expected=expected, found=found[:200])])

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise refuse("an object of dtype, shape and data_offsets", _told(entry))
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise refuse(f"a dtype among {' '.join(sorted(_DTYPES))}", _told(dtype), "unknown_dtype")
    if not isinstance(shape, list) or len(shape) > MAX_AXES or not all(_is_size(s) for s in shape):
        raise refuse("a shape of non-negative integers", _told(shape))
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(o) for o in offsets):
        raise refuse("two non-negative data offsets", _told(offsets))
    begin, end = offsets
    bits = _product(tuple(shape)) * dtype_bits(dtype)
    if bits % 8 or end - begin != bits // 8:
        expected = f"{bits // 8} bytes for {dtype} {shape}"
        raise refuse(expected, f"data_offsets of {end - begin} bytes", "size_mismatch")
    return tuple(shape), begin, end


def _told(value: Any) -> str:
    """Show a value from outside; a number of thousands of digits cannot be shown."""
    try:
        return repr(value)[:200]
    except ValueError:
        return f"a {type(value).__name__} too long to show"


def _tiling_problems(
    tensors: Mapping[str, TensorRef], *, file: str, data_start: int, file_bytes: int
) -> tuple[Problem, ...]:
    """Check that the tensors tile the data section. A short file leaves the tensors before its end usable."""
    problems, position, refs = [], data_start, list(tensors.values())
    if any(a.end != b.begin for a, b in pairwise(refs)):
        refs.sort(key=lambda r: (r.begin, r.end))
    for ref in refs:
        if ref.begin != position:
            kind = "overlap" if ref.begin < position else "hole"
            expected, found = f"begin at byte {position}", f"begin at byte {ref.begin}"
            raise HeaderError(
                [Problem(kind=kind, name=ref.name, file=file, expected=expected, found=found, offset=ref.begin)]
            )
        position = ref.end
        if ref.end > file_bytes:
            expected, found = f"data up to byte {ref.end}", f"a file of {file_bytes} bytes"
            problems.append(
                Problem(
                    kind="truncated", name=ref.name, file=file, expected=expected, found=found, offset=ref.begin
                )
            )  # fmt: skip
    if position < file_bytes:
        expected, found = f"a file of {position} bytes", f"{file_bytes} bytes"
        problems.append(
            Problem(kind="trailing_bytes", name="", file=file, expected=expected, found=found, offset=position)
        )
    return tuple(problems)
