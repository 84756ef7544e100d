"""Digests that were published for the files of a checkpoint: where they are found, and what differs."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from checkpoint.checkpoint_files import write

from harness.checkpoint import open_checkpoint
from harness.checkpoint.scan import content_facts
from harness.checkpoint.scan.manifest import MANIFEST, digest_problems, manifest_text, published
from harness.errors import CheckpointError

FILE = "model.safetensors"
CONTENT = b"weights"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def in_a_list(folder):
    (folder / FILE).write_bytes(CONTENT)
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  other\n{DIGEST.upper()} *./{FILE}\nnot a line\n")


def beside_the_file(folder):
    (folder / FILE).write_bytes(CONTENT)
    (folder / f"{FILE}.sha256").write_text(f"{DIGEST}  {FILE}\n")


def linked_into_a_store(folder):
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    (blobs / DIGEST).write_bytes(CONTENT)
    (folder / FILE).symlink_to(blobs / DIGEST)


def left_by_a_download(folder):
    (folder / FILE).write_bytes(CONTENT)
    metadata = folder / ".cache" / "huggingface" / "download"
    metadata.mkdir(parents=True)
    (metadata / f"{FILE}.metadata").write_text(f"{'a' * 40}\n{DIGEST}\n1700000000.0\n")


def in_a_manifest(folder):
    (folder / FILE).write_bytes(CONTENT)
    (folder / MANIFEST).write_text(manifest_text({FILE: {"sha256": DIGEST}}))


@pytest.mark.parametrize("place", [in_a_list, beside_the_file, linked_into_a_store, left_by_a_download, in_a_manifest])
def test_a_published_digest_is_found(place, tmp_path):
    """Wherever publishers and downloads leave a file's digest, it is the one that is compared."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    place(folder)
    assert published(folder, [FILE]) == {FILE: {"sha256": DIGEST}}
    assert digest_problems({FILE: {"sha256": DIGEST}}, published(folder, [FILE])) == []
    (problem,) = digest_problems({FILE: {"sha256": "0" * 64}}, published(folder, [FILE]))
    assert (problem.kind, problem.file) == ("digest", FILE)


def test_nothing_published_is_nothing_known(tmp_path):
    """A folder without any list knows no digest, and compares none."""
    (tmp_path / FILE).write_bytes(CONTENT)
    assert published(tmp_path, [FILE]) == {}


@pytest.mark.parametrize("text", ["", "no digests here", "{", json.dumps({"files": [1]}), "{" * 100000])
def test_a_named_manifest_that_says_nothing_is_refused(text, tmp_path):
    """A manifest that was asked for is never silently empty."""
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match="expected"):
        published(tmp_path, [FILE], path)


def test_a_manifest_covers_what_lies_beside_the_shards(tmp_path):
    """A configuration that is not the recorded one is named, although no tensor contradicts it."""
    folder = write(tmp_path / "ck", {"a": torch.zeros(4, 4)}, config={"rope_theta": 10000.0})
    digests = content_facts(open_checkpoint(folder))["digests"]
    assert {"config.json", "model.safetensors.index.json"} <= set(digests)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest_text(digests))
    (folder / "config.json").write_text('{"rope_theta": 500000.0}')
    facts = content_facts(open_checkpoint(folder), manifest=manifest)
    assert [(p["kind"], p["file"]) for p in facts["problems"] if p["kind"] == "digest"] == [("digest", "config.json")]
