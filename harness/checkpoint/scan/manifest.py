"""Digests that somebody published or recorded for the files of a checkpoint. Knows files; must not know tensors.

Looked for beside the shards: a manifest of ours, lists of `sha256sum`, and what downloading left: a link into a store
whose names are digests, or the metadata of a local download. Names in lists are only ever compared, never opened.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.checkpoint.header import Problem
from harness.errors import CheckpointError

MANIFEST = "day0-manifest.json"
FORMAT = "day0.manifest/1"
LISTS = ("SHA256SUMS", "sha256sums.txt", "SHA256SUMS.txt", "checksums.sha256")
MAX_BYTES = 64 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")

BESIDE = (
    "config.json", "model.safetensors.index.json", "generation_config.json", "hf_quant_config.json",
    "quantize_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""Files beside the shards that decide what a model computes: one word of them changes every answer."""

Digests = Mapping[str, Mapping[str, str]]
"""Hex digests by file and algorithm."""


def published(folder: Path, files: Iterable[str], manifest: Path | None = None) -> dict[str, dict[str, str]]:
    """Return the digests that are known of some files of a folder; `manifest` is a further file that lists them.

    Raises:
        CheckpointError: a manifest that was named, or one of ours, cannot be read.
    """
    wanted = set(files)
    found: dict[str, dict[str, str]] = {}
    for file in sorted(wanted):
        found[file] = _left_by_download(folder, file)
    own = [path for path in (folder / MANIFEST, manifest) if path is not None and (path == manifest or path.is_file())]
    for path in own:
        _add(found, _manifest(path), wanted)
    for path in [folder / name for name in LISTS] + [folder / f"{file}.sha256" for file in sorted(wanted)]:
        if path.is_file() and path.stat().st_size <= MAX_BYTES:
            _add(found, _list(path.read_text(errors="replace")), wanted)
    return {file: digests for file, digests in found.items() if digests}


def beside_digests(folder: Path, algorithms: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the digests of the small files that lie beside the shards and decide what is computed."""
    found = {}
    for name in BESIDE:
        path = folder / name
        if path.is_file() and path.stat().st_size <= MAX_BYTES:
            states = {algorithm: hasher(algorithm) for algorithm in algorithms}
            content = path.read_bytes()
            for state in states.values():
                state.update(content)
            found[name] = {algorithm: state.hexdigest() for algorithm, state in states.items()}
    return found


def hasher(algorithm: str) -> Any:
    """Return a state to be fed with bytes; BLAKE3 needs its own package."""
    if algorithm == "blake3":
        from blake3 import blake3

        return blake3()
    return hashlib.new(algorithm)


def _add(found: dict[str, dict[str, str]], more: Digests, wanted: set[str]) -> None:
    for file, digests in more.items():
        if file in wanted:
            found[file].update(digests)


def _left_by_download(folder: Path, file: str) -> dict[str, str]:
    """Return the digest that a download cache keeps: in the name of the blob, or as the etag of its metadata."""
    path = folder / file
    if path.is_symlink() and _SHA256.fullmatch(path.resolve().name):
        return {"sha256": path.resolve().name}
    metadata = folder / ".cache" / "huggingface" / "download" / f"{file}.metadata"
    if metadata.is_file() and metadata.stat().st_size < 4096:
        lines = metadata.read_text(errors="replace").splitlines()
        if len(lines) > 1 and _SHA256.fullmatch(lines[1].strip()):
            return {"sha256": lines[1].strip()}
    return {}


def _list(text: str) -> dict[str, dict[str, str]]:
    matches = (_LINE.fullmatch(line.strip()) for line in text.splitlines())
    return {m.group(2): {"sha256": m.group(1).lower()} for m in matches if m}


def _manifest(path: Path) -> dict[str, dict[str, str]]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"expected a manifest of digests at {path}, found: {error}; check the path") from None
    if not text.lstrip().startswith("{"):
        listed = _list(text)
        if not listed:
            raise CheckpointError(f"expected {FORMAT} or lines of sha256sum in {path}, found neither")
        return listed
    try:
        files = json.loads(text)["files"]
        return {
            str(file): {k: str(v) for k, v in entry.items() if k in ("blake3", "sha256")}
            for file, entry in files.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"expected {FORMAT} with an object `files` in {path}; record it again") from None


def manifest_text(digests: Digests) -> str:
    """Return a manifest of ours, to be kept beside a checkpoint or sent with it."""
    return json.dumps({"format": FORMAT, "files": {k: dict(v) for k, v in sorted(digests.items())}}, indent=1) + "\n"


def digest_problems(found: Digests, expected: Digests) -> list[Problem]:
    """Name the files whose content is not the published one."""
    problems = []
    for file, digests in expected.items():
        for algorithm, digest in digests.items():
            actual = found.get(file, {}).get(algorithm)
            if actual is not None and actual != digest.lower():
                problems.append(
                    Problem(
                        kind="digest",
                        name="",
                        file=file,
                        expected=f"{algorithm} {digest}",
                        found=f"{algorithm} {actual}",
                    )
                )
    return problems
