"""Knows how one trace lies on disk: a folder with a manifest and bounded safetensors parts. Must not know who made it.

    <folder>/manifest.json            setup, run, taps in execution order (file, dtype, shape, digest), facts
    <folder>/part-0001.safetensors    tensors; one that equals an earlier one is stored once
    <folder>/failure.json             instead of the above where the run did not end

A folder appears whole or not at all (written beside and renamed). Every tensor is checked against its digest when it is
read. Safetensors and JSON only, never pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from harness.errors import TraceError
from harness.types import Failure, Run, Setup, Tap, Trace, as_json, from_json

FORMAT = "day0.trace/1"
PART_BYTES = 512 * 2**20


def save_trace(folder: Path, trace: Trace) -> None:
    """Write a trace to `folder`, replacing what was there."""
    scratch = _scratch(folder)
    rows: list[dict[str, Any]] = []
    seen: dict[str, tuple[str, str]] = {}
    part: dict[str, torch.Tensor] = {}
    size, number = 0, 1
    for name, tensor in trace.tensors.items():
        tensor = tensor.detach().to("cpu").contiguous()
        digest = tensor_digest(tensor)
        if digest not in seen:
            length = tensor.numel() * tensor.element_size()
            if part and size + length > PART_BYTES:
                save_file(part, scratch / f"part-{number:04d}.safetensors")
                part, size, number = {}, 0, number + 1
            seen[digest] = (f"part-{number:04d}.safetensors", name)
            part[name] = tensor
            size += length
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
    if part:
        save_file(part, scratch / f"part-{number:04d}.safetensors")
    manifest = {
        "format": FORMAT,
        "setup": as_json(trace.setup),
        "run": as_json(trace.run),
        "tensors": rows,
        "facts": as_json(trace.facts),
        "provenance": dict(trace.provenance),
    }
    (scratch / "manifest.json").write_text(json.dumps(manifest, indent=1))
    _publish(scratch, folder)


def save_failure(folder: Path, failure: Failure) -> None:
    """Write what is known of a run that did not end, replacing what was there."""
    scratch = _scratch(folder)
    (scratch / "failure.json").write_text(json.dumps(as_json(failure), indent=1))
    _publish(scratch, folder)


def load_failure(folder: Path) -> Failure | None:
    """Return the failure kept in `folder`, or None."""
    path = folder / "failure.json"
    return from_json(Failure, json.loads(path.read_text())) if path.is_file() else None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the checked manifest of a trace. Raises TraceError if it is missing, unreadable or of another format."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TraceError(f"expected a trace manifest at {path}, found: {error}; record it again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise TraceError(f"expected format {FORMAT!r} in {path}, found {found!r}; record it again with this version")
    for row in manifest["tensors"]:
        if Path(row["file"]).name != row["file"]:
            raise TraceError(f"expected plain file names in {path}, found {row['file']!r}; do not use this trace")
    return manifest


def load_trace(folder: Path) -> Trace:
    """Open a trace; its tensors are read, and checked, when they are asked for. Raises TraceError."""
    manifest = read_manifest(folder)
    try:
        taps = {row["tap"]["name"]: from_json(Tap, row["tap"]) for row in manifest["tensors"]}
        setup, run = from_json(Setup, manifest["setup"]), from_json(Run, manifest["run"])
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"the manifest in {folder} does not describe a trace: {error!r}; record it again") from error
    rows = {row["tap"]["name"]: row for row in manifest["tensors"]}
    return Trace(
        setup=setup,
        run=run,
        taps=taps,
        tensors=LazyTensors(folder, rows),
        facts=manifest["facts"],
        provenance=manifest["provenance"],
    )


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors of one trace by tap name, in execution order. `cache` keeps what was read (for replay)."""

    def __init__(self, folder: Path, rows: Mapping[str, Mapping[str, Any]], *, cache: bool = False) -> None:
        self.folder, self.rows, self.cache = folder, rows, cache
        self._kept: dict[str, torch.Tensor] = {}
        self._files: dict[str, Any] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        row = self.rows[name]
        if name in self._kept:
            return self._kept[name]
        path = self.folder / row["file"]
        try:
            if row["file"] not in self._files:
                self._files[row["file"]] = safe_open(path, framework="pt")
            tensor: torch.Tensor = self._files[row["file"]].get_tensor(row["key"])
        except (OSError, SafetensorError) as error:
            raise TraceError(f"expected tensor {name!r} in {path}, found: {error}; record this trace again") from error
        found = tensor_digest(tensor)
        if found != row["digest"]:
            raise TraceError(
                f"expected digest {row['digest']} for {name!r} in {path}, found {found}: the file is damaged; "
                "record this trace again"
            )
        if self.cache:
            self._kept[name] = tensor
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def cached(self) -> LazyTensors:
        """Return the same tensors, kept in memory once read."""
        return LazyTensors(self.folder, self.rows, cache=True)


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the hex digest (blake2b, 16 bytes) of dtype, shape and bytes."""
    head = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    flat = tensor.contiguous().reshape(-1)
    data: Any = flat.view(torch.uint8).numpy() if tensor.numel() else b""
    return hashlib.blake2b(memoryview(data), digest_size=16, key=head[:64]).hexdigest()


def _scratch(folder: Path) -> Path:
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    return scratch


def _publish(scratch: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(scratch, folder)
