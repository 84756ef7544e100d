from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from accel_impl.shards import INDEX, Shards, read_header
from harness.errors import CheckpointError


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def index_of(folder: Path) -> dict[str, str]:
    return dict(json.loads((folder / INDEX).read_text())["weight_map"])


def rewrite(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_cut_shard_is_refused_before_it_is_read(copy: Path) -> None:
    """A shard that is shorter than its header says is named, with both sizes."""
    shard = copy / index_of(copy)["lm_head.weight"]
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=f"bytes in .*{shard.name}, found"):
        Shards(copy)


def test_a_missing_shard_is_refused(copy: Path) -> None:
    """A shard that the index names and the folder lacks is an error, not a smaller model."""
    shard = copy / index_of(copy)["model.norm.weight"]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        Shards(copy)


def test_a_tensor_that_its_shard_lacks_is_named(copy: Path) -> None:
    """The index is held against the headers: a tensor in another shard than promised is named."""
    weight_map = index_of(copy)
    others = sorted(set(weight_map.values()) - {weight_map["model.norm.weight"]})
    rewrite(copy, {**weight_map, "model.norm.weight": others[0]})
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight'"):
        Shards(copy)


def test_no_shard_leaves_the_folder(copy: Path) -> None:
    """A shard name with a path in it is refused."""
    rewrite(copy, {**index_of(copy), "model.norm.weight": "../elsewhere.safetensors"})
    with pytest.raises(CheckpointError, match="leaves the folder"):
        Shards(copy)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ('{"a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}', "expected 'a' at bytes 0..2"),
        ('{"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 2]}}', "expected 'a' at bytes 0..3"),
        ('{"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}', "expected a dtype"),
        ('{"a": 1, "a": 2}', "named twice"),
    ],
)
def test_a_header_that_does_not_tile_its_data_is_refused(tmp_path: Path, header: str, words: str) -> None:
    """Holes, shapes that do not fit, unknown dtypes and duplicate names are errors with their place."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"\0\0\0")
    with pytest.raises(CheckpointError, match=words):
        read_header(path)


def test_a_header_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    """A header length beyond the file's end is refused before anything is allocated."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    with pytest.raises(CheckpointError, match="expected a header of at most 2 bytes"):
        read_header(path)
