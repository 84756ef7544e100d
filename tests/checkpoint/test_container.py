"""Folders and files that lie, each in its own way."""

from __future__ import annotations

import json
import os

import pytest
import torch
from checkpoint_files import reindex, shard, write

from harness.checkpoint import open_checkpoint
from harness.errors import CheckpointError

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path):
    draw = torch.Generator().manual_seed(1)
    first = {"a": torch.randn(3, 5, generator=draw), "b": torch.randn(7, generator=draw).to(torch.bfloat16)}
    second = {"c": torch.randn(2, 4, generator=draw).to(torch.float8_e4m3fn), "d": torch.arange(6)}
    return write(tmp_path / "checkpoint", first, second)


def kinds(path):
    return sorted({p.kind for p in open_checkpoint(path).problems})


def test_a_good_checkpoint_reads_back(folder):
    """Without a fault there is no problem, and every tensor reads back bit for bit in its own dtype and shape."""
    checkpoint = open_checkpoint(folder)
    assert checkpoint.problems == ()
    assert list(checkpoint.tensors) == ["a", "b", "c", "d"]
    draw = torch.Generator().manual_seed(1)
    assert torch.equal(checkpoint.read("a"), torch.randn(3, 5, generator=draw))
    assert torch.equal(checkpoint.read("b"), torch.randn(7, generator=draw).to(torch.bfloat16))
    c = torch.randn(2, 4, generator=draw).to(torch.float8_e4m3fn)
    assert checkpoint.read("c").dtype == torch.float8_e4m3fn
    assert torch.equal(checkpoint.read("c").view(torch.uint8), c.view(torch.uint8))
    assert checkpoint.read("d").tolist() == [0, 1, 2, 3, 4, 5]
    assert checkpoint.nbytes == 60 + 14 + 8 + 48


def test_the_library_writes_what_we_read(tmp_path):
    """A file written by the safetensors library reads back, empty tensors and metadata included."""
    from safetensors.torch import save_file

    tensors = {"x": torch.randn(3, 2), "empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.problems == ()
    assert all(torch.equal(checkpoint.read(n), v) for n, v in tensors.items())


def test_packed_four_bit_is_read_as_bytes(tmp_path):
    """An F4 tensor of 2x6 elements reads as 2x3 bytes."""
    codes = torch.tensor([[0x21, 0x43, 0x65], [0x87, 0xA9, 0xCB]], dtype=torch.uint8)
    (tmp_path / "model.safetensors").write_bytes(
        shard({"x": codes}, edit=lambda h: h["x"].update(dtype="F4", shape=[2, 6]))
    )
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.problems == ()
    assert torch.equal(checkpoint.read("x"), codes)


def _truncate(folder):
    path = folder / B
    path.write_bytes(path.read_bytes()[:-5])


def _append(folder):
    path = folder / B
    path.write_bytes(path.read_bytes() + b"xx")


def _cut_in_header(folder):
    path = folder / A
    path.write_bytes(path.read_bytes()[:40])


def _second_export(folder):
    (folder / "other.safetensors").write_bytes(shard({"a": torch.zeros(3, 5)}))


FOLDER_FAULTS = {
    "missing_shard": lambda f: (f / B).unlink(),
    "truncated": _truncate,
    "trailing_bytes": _append,
    "truncated_header": _cut_in_header,
    "total_size": lambda f: reindex(f, lambda i: i["metadata"].update(total_size=1)),
    "not_in_shard": lambda f: reindex(f, lambda i: i["weight_map"].update(a=B)),
    "not_in_index": lambda f: reindex(f, lambda i: i["weight_map"].pop("d")),
    "stray_shard": lambda f: (f / "adapter.safetensors").write_bytes(shard({"lora": torch.zeros(2)})),
    "shadowing_shard": _second_export,
    "unsafe_name": lambda f: reindex(f, lambda i: i["weight_map"].update(e="../outside.safetensors")),
}


@pytest.mark.parametrize("kind", FOLDER_FAULTS)
def test_each_fault_of_a_folder_is_named(folder, kind):
    """Each way in which a folder can differ from its index is found, under its own name."""
    (folder.parent / "outside.safetensors").write_bytes(shard({"e": torch.zeros(2)}))
    FOLDER_FAULTS[kind](folder)
    assert kind in kinds(folder)


def test_a_duplicate_name_in_the_index_is_found(folder):
    """A tensor that the index names twice is a problem, although JSON readers keep the last silently."""
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace('"a": ', f'"a": "{B}", "a": '))
    assert "duplicate_key" in kinds(folder)


def test_a_missing_shard_names_its_tensors(folder):
    """Deleting a shard names every tensor that is lost with it."""
    (folder / B).unlink()
    lost = {p.name for p in open_checkpoint(folder).problems if p.kind == "unreadable"}
    assert lost == {"c", "d"}


def test_a_truncated_tensor_is_never_read(folder):
    """A tensor whose bytes are not all there cannot be read, its neighbours can."""
    _truncate(folder)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.read("c").shape == (2, 4)
    with pytest.raises(CheckpointError, match="truncated"):
        checkpoint.read("d")


def test_a_link_that_leaves_the_folder_is_refused(folder):
    """A shard that is a link to somewhere else is not opened; one into the blobs of a download cache is."""
    outside = folder.parent / "outside.safetensors"
    (folder / B).rename(outside)
    os.symlink(outside, folder / B)
    assert "unsafe_name" in kinds(folder)
    cache = folder.parent / "hub" / "snapshots" / "revision"
    blobs = folder.parent / "hub" / "blobs"
    cache.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        (blobs / path.name).write_bytes(path.read_bytes())
        os.symlink(blobs / path.name, cache / path.name)
    assert kinds(cache) == []


HEADER_FAULTS = {
    "overlap": {"edit": lambda h: h["b"].update(data_offsets=[56, 70])},
    "hole": {"edit": lambda h: h["b"].update(data_offsets=[64, 78])},
    "size_mismatch": {"edit": lambda h: h["a"].update(shape=[3, 6])},
    "unknown_dtype": {"edit": lambda h: h["a"].update(dtype="F12")},
    "bad_entry": {"edit": lambda h: h["a"].update(shape=[3, -5])},
    "bad_header": {"text": "[1, 2]"},
    "duplicate_key": {
        "text": '{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},'
        ' "a": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}'
    },
}


@pytest.mark.parametrize("kind", HEADER_FAULTS)
def test_each_fault_of_a_header_is_named(tmp_path, kind):
    """A header that does not tile its data, or is no header, makes its file unusable and says why."""
    tensors = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}
    (tmp_path / "model.safetensors").write_bytes(shard(tensors, **HEADER_FAULTS[kind]))
    checkpoint = open_checkpoint(tmp_path)
    assert [p.kind for p in checkpoint.problems] == [kind]
    assert checkpoint.tensors == {}


@pytest.mark.parametrize(
    "header",
    [
        '{"a": {"dtype": "U8", "shape": [1], "data_offsets": [true, 1]}}',
        '{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 1]}}',
        '{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], "extra": 1}}',
        '{"__metadata__": {"a": 1}}',
        "[" * 100_000,
        "",
    ],
)
def test_nonsense_is_a_problem_and_never_a_crash(tmp_path, header):
    """Hostile JSON ends as a problem."""
    words = header.encode()
    (tmp_path / "model.safetensors").write_bytes(len(words).to_bytes(8, "little") + words + b"\0")
    assert open_checkpoint(tmp_path).problems


def test_a_header_of_absurd_length_is_not_allocated(tmp_path):
    """A declared header of 2^60 bytes is refused from its number alone."""
    (tmp_path / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    assert kinds(tmp_path) == ["header_too_large"]


def test_what_is_no_checkpoint_is_an_error(tmp_path):
    """A missing folder, an empty one and an index that is no index are errors that say what to do."""
    with pytest.raises(CheckpointError, match="nothing at"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="neither"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="index"):
        open_checkpoint(tmp_path)


def test_the_digest_sees_one_bit(folder):
    """One changed bit of data, a changed configuration or index each change the digest; a copy does not."""
    before = open_checkpoint(folder).digest
    assert open_checkpoint(folder).digest == before
    path = folder / A
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    changed = open_checkpoint(folder).digest
    (folder / "config.json").write_text(json.dumps({"rope_theta": 5}))
    assert len({before, changed, open_checkpoint(folder).digest}) == 3
    assert open_checkpoint(folder).sampled_digest() != open_checkpoint(folder).full_digest()
