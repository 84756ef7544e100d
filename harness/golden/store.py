"""Knows how one trace lies on disk: a folder with a manifest and bounded safetensors parts. Must not know who made it.

    <folder>/manifest.json            setup, run, taps in execution order (file, dtype, shape, digest), facts, parts and
                                      their sizes, provenance (who, when, on what), a digest of the manifest itself
    <folder>/part-0001.safetensors    tensors; one that equals an earlier one is stored once
    <folder>/failure.json             instead of the above where the run did not end

A folder appears whole or not at all (written beside and renamed). Every tensor is checked against its digest when it is
read. Safetensors and JSON only, never pickle; activations only, never weights.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from harness.errors import TraceError
from harness.golden.digest import algorithm, tensor_digest
from harness.golden.part import Part
from harness.types import Failure, Run, Setup, Tap, Trace, as_json, digest_of, from_json

FORMAT = "day0.trace/2"
PART_BYTES = 512 * 2**20
_KEYS = ("setup", "run", "tensors", "parts", "facts", "provenance", "digests", "seal")


def save_trace(folder: Path, trace: Trace) -> None:
    """Write a trace to `folder`, replacing what was there."""
    scratch, digests = _scratch(folder), algorithm()
    rows: list[dict[str, Any]] = []
    seen: dict[str, tuple[str, str]] = {}
    parts = _Parts(scratch)
    for name, tensor in trace.tensors.items():
        tensor = tensor.detach().to("cpu").contiguous()
        digest = tensor_digest(tensor, digests)
        if digest not in seen:
            seen[digest] = (parts.add(name, tensor), name)
        file, key = seen[digest]
        rows.append(
            {
                "tap": as_json(trace.taps.get(name, Tap(name=name))),
                "file": file,
                "key": key,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "digest": digest,
            }
        )
    manifest = {
        "format": FORMAT,
        "digests": digests,
        "setup": as_json(trace.setup),
        "run": as_json(trace.run),
        "tensors": rows,
        "parts": parts.close(),
        "facts": as_json(trace.facts),
        "provenance": dict(trace.provenance),
    }
    plain = json.loads(json.dumps(manifest))
    (scratch / "manifest.json").write_text(_written({**plain, "seal": _seal(plain)}))
    publish(scratch, folder)


class _Parts:
    """Safetensors files of bounded size, written as they fill."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sizes = folder, dict[str, int]()
        self._part: dict[str, torch.Tensor] = {}
        self._bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> str:
        """Take a tensor; return the name of the file that it will lie in."""
        length = tensor.numel() * tensor.element_size()
        if self._part and self._bytes + length > PART_BYTES:
            self._write()
        self._part[name] = tensor
        self._bytes += length
        return self._file()

    def close(self) -> dict[str, int]:
        """Write what is left; return the size of each file in bytes."""
        if self._part:
            self._write()
        return self.sizes

    def _file(self) -> str:
        return f"part-{len(self.sizes) + 1:04d}.safetensors"

    def _write(self) -> None:
        path = self.folder / self._file()
        save_file(self._part, path)
        self.sizes[path.name] = path.stat().st_size
        self._part, self._bytes = {}, 0


def save_failure(folder: Path, failure: Failure) -> None:
    """Write what is known of a run that did not end, replacing what was there."""
    scratch = _scratch(folder)
    (scratch / "failure.json").write_text(json.dumps(as_json(failure), indent=1))
    publish(scratch, folder)


def load_failure(folder: Path) -> Failure | None:
    """Return the failure kept in `folder`, or None."""
    path = folder / "failure.json"
    return from_json(Failure, json.loads(path.read_text())) if path.is_file() else None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the checked manifest of a trace.

    Raises TraceError if it is missing, unreadable, of another format, was changed, or names files that are not there.
    """
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TraceError(f"expected a trace manifest at {path}, found: {error}; record it again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise TraceError(f"expected format {FORMAT!r} in {path}, found {found!r}; record it again with this version")
    missing = [key for key in _KEYS if key not in manifest]
    if missing:
        raise TraceError(f"expected {', '.join(missing)} in {path}, found none; record it again")
    if manifest["seal"] != _seal(manifest):
        raise TraceError(
            f"the manifest {path} was changed after it was written (expected seal {manifest['seal']}); do not use this "
            "trace, record it again"
        )
    for name, size in manifest["parts"].items():
        if Path(name).name != name:
            raise TraceError(f"expected plain file names in {path}, found {name!r}; do not use this trace")
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            what = "nothing" if found is None else f"{found} bytes"
            raise TraceError(f"expected {size} bytes at {folder / name}, found {what}; copy or record it again, whole")
    for row in manifest["tensors"]:
        if row["file"] not in manifest["parts"]:
            raise TraceError(f"expected plain file names in {path}, found {row['file']!r}; do not use this trace")
    return manifest


def _written(manifest: Mapping[str, Any]) -> str:
    """Return a manifest as JSON with a line for each entry and each tensor: indented JSON takes ten times as long."""
    lines = []
    for key, value in manifest.items():
        rows = ",\n  ".join(map(json.dumps, value)) if key == "tensors" else ""
        lines.append(f"{json.dumps(key)}: " + (f"[\n  {rows}\n]" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _seal(manifest: Mapping[str, Any]) -> str:
    """Return the digest of a manifest, as it was read from JSON, without its own seal."""
    plain = {k: v for k, v in manifest.items() if k != "seal"}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))  # facts may hold NaN, which digest_of refuses
    return digest_of(text)


def load_trace(folder: Path) -> Trace:
    """Open a trace; its tensors are read, and checked, when they are asked for. Raises TraceError."""
    manifest = read_manifest(folder)
    try:
        taps = {row["tap"]["name"]: _tap(row["tap"]) for row in manifest["tensors"]}
        setup, run = from_json(Setup, manifest["setup"]), from_json(Run, manifest["run"])
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"the manifest in {folder} does not describe a trace: {error!r}; record it again") from error
    rows = {row["tap"]["name"]: row for row in manifest["tensors"]}
    return Trace(
        setup=setup,
        run=run,
        taps=taps,
        tensors=LazyTensors(folder, rows, manifest["digests"]),
        facts=manifest["facts"],
        provenance=manifest["provenance"],
    )


def _tap(words: Mapping[str, Any]) -> Tap:
    return Tap(**{**words, "dims": tuple(words.get("dims", ()))})


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors of one trace by tap name, in execution order: views on its files, checked when first asked for.

    `cache` keeps what was read (for replay).
    """

    def __init__(
        self, folder: Path, rows: Mapping[str, Mapping[str, Any]], digests: str, *, cache: bool = False
    ) -> None:
        self.folder, self.rows, self.digests, self.cache = folder, rows, digests, cache
        self._kept: dict[str, torch.Tensor] = {}
        self._files: dict[str, Part] = {}
        self._checked: set[tuple[str, str, str]] = set()

    def __contains__(self, name: object) -> bool:
        return name in self.rows  # without reading the tensor, as a mapping's own way would

    def __getitem__(self, name: str) -> torch.Tensor:
        row = self.rows[name]
        if name in self._kept:
            return self._kept[name]
        path = self.folder / row["file"]
        try:
            if row["file"] not in self._files:
                self._files[row["file"]] = Part(path)
            tensor = self._files[row["file"]].tensor(row["key"], getattr(torch, row["dtype"]), row["shape"])
        except (OSError, ValueError) as error:
            raise TraceError(f"expected tensor {name!r} in {path}, found: {error}; record this trace again") from error
        same = (row["file"], row["key"], row["digest"])
        if same not in self._checked:
            self._check(tensor, name, row)
            self._checked.add(same)
        if self.cache:
            self._kept[name] = tensor
        return tensor

    def _check(self, tensor: torch.Tensor, name: str, row: Mapping[str, Any]) -> None:
        found = tensor_digest(tensor, self.digests)
        if found != row["digest"]:
            raise TraceError(
                f"expected digest {row['digest']} for {name!r} in {self.folder / row['file']}, found {found}: the file "
                "is damaged; record this trace again"
            )

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def reopened(self) -> LazyTensors:
        """Return the same tensors, none of them read or checked yet, and no file open."""
        return LazyTensors(self.folder, self.rows, self.digests, cache=self.cache)

    def cached(self) -> LazyTensors:
        """Return the same tensors, kept in memory once read."""
        return LazyTensors(self.folder, self.rows, self.digests, cache=True)


def _scratch(folder: Path) -> Path:
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    return scratch


def publish(scratch: Path, folder: Path) -> None:
    """Put a finished folder in the place of what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(scratch, folder)
