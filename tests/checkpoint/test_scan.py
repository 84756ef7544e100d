"""One pass over a checkpoint: what it digests, finds in codes, and keeps when a file goes bad meanwhile."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os

import pytest
import torch
from blake3 import blake3
from checkpoint.checkpoint_files import write

from harness.checkpoint import decode, logical_tensors, open_checkpoint
from harness.checkpoint.scan import content_facts, expected_seconds, pieces, scan, scan_bytes, shard
from harness.checkpoint.scan.manifest import manifest_text

SEED = torch.Generator().manual_seed(5)
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
PACKED = {"quantization_config": {"config_groups": {"g": {"weights": {"group_size": 32}}}}}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=SEED)


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=SEED).to(torch.uint8)


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=SEED).to(torch.int32)


def exponents(*shape: int) -> torch.Tensor:
    return torch.randint(118, 124, shape, generator=SEED).to(torch.uint8)


FORMATS = {
    "plain": ({"a.weight": normal(300, 70).bfloat16()}, {}),
    "plain_stack": ({"a.weight": normal(3, 90, 64)}, {}),
    "convolution": ({"conv.weight": normal(40, 3, 5, 5)}, {}),
    "fp8_block": (
        {"a.weight": normal(300, 200).to(torch.float8_e4m3fn), "a.weight_scale_inv": normal(3, 2).abs()},
        FP8,
    ),
    "fp8_stack": (
        {"a.weight": normal(3, 150, 130).to(torch.float8_e4m3fn), "a.weight_scale_inv": normal(3, 2, 2).abs()},
        FP8,
    ),
    "fp8_channel": ({"a.weight": normal(300, 64).to(torch.float8_e4m3fn), "a.weight_scale": normal(300, 1).abs()}, {}),
    "fp8_tensor": ({"a.weight": normal(300, 64).to(torch.float8_e4m3fn), "a.weight_scale": normal(1).abs()}, {}),
    "mxfp4": ({"a.weight_packed": codes(300, 48), "a.weight_scale": exponents(300, 3)}, {}),
    "mxfp4_blocks": ({"e.up_blocks": codes(3, 200, 2, 16), "e.up_scales": exponents(3, 200, 2)}, {}),
    "nvfp4": (
        {
            "a.weight_packed": codes(300, 48),
            "a.weight_scale": normal(300, 6).abs().clamp(min=0.1).to(torch.float8_e4m3fn),
            "a.weight_global_scale": torch.tensor([37.0]),
        },
        {},
    ),
    "int4": (
        {
            "a.weight_packed": words(300, 12),
            "a.weight_scale": normal(300, 3).abs().bfloat16(),
            "a.weight_shape": torch.tensor([300, 96]),
        },
        PACKED,
    ),
    "int8_with_zero_points": (
        {
            "a.weight_packed": words(300, 24),
            "a.weight_scale": normal(300, 3).abs().bfloat16(),
            "a.weight_zero_point": words(75, 3),
            "a.weight_shape": torch.tensor([300, 96]),
        },
        PACKED,
    ),
    "gptq": (
        {
            "a.qweight": words(12, 80),
            "a.qzeros": words(3, 10),
            "a.scales": normal(3, 80).abs().half(),
            "a.g_idx": (torch.arange(96) // 32).to(torch.int32),
        },
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
    ),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_pieces_decode_to_the_whole(kind, tmp_path, monkeypatch):
    """Cut into small pieces, each matrix of a stack has the mean, size and extremes of the weight decoded at once."""
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", 1500)
    tensors, config = FORMATS[kind]
    checkpoint = open_checkpoint(write(tmp_path, tensors, config=config))
    (shard,) = scan(checkpoint)
    assert not shard.problems
    (logical,) = logical_tensors(checkpoint)
    whole = decode(checkpoint, logical).double()
    matrices = list(whole) if whole.dim() == 3 else [whole]
    assert [s.elements for s in shard.statistics] == [m.numel() for m in matrices]
    for found, expected in zip(shard.statistics, matrices, strict=True):
        assert found.mean == pytest.approx(float(expected.mean()), rel=1e-4, abs=1e-7)
        assert found.rms == pytest.approx(float(expected.square().mean().sqrt()), rel=1e-5)
        assert found.largest == pytest.approx(float(expected.abs().max()), rel=1e-6)


def test_a_digest_is_that_of_the_file(tmp_path):
    """Each file's digests are those of its bytes, header included, by every algorithm asked for."""
    checkpoint = open_checkpoint(write(tmp_path, {"a": normal(40, 9)}, {"b": normal(7)}))
    shards = list(scan(checkpoint, algorithms=("blake3", "sha256"), values=False))
    assert [s.digests["blake3"] for s in shards] == [
        blake3((tmp_path / s.file).read_bytes()).hexdigest() for s in shards
    ]
    assert all(len(s.digests["sha256"]) == 64 for s in shards)
    assert scan_bytes(checkpoint) == sum((tmp_path / s.file).stat().st_size for s in shards)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -math.nan])
def test_one_value_that_is_no_number_is_found_with_its_place(dtype, value, tmp_path):
    """NaN and infinity of either sign are found in any float type, at their coordinate; the largest number is none."""
    good, bad = normal(50, 60).to(dtype), normal(50, 60).to(dtype)
    good[3, 4], good[5, 6] = torch.finfo(dtype).max, torch.finfo(dtype).min
    bad[31, 7] = math.copysign(value, -1.0) if math.isnan(value) else value
    (shard,) = scan(open_checkpoint(write(tmp_path, {"good": good, "bad": bad})))
    (problem,) = shard.problems
    assert (problem.kind, problem.name) == ("nonfinite", "bad")
    assert "[31, 7]" in problem.found


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda s: s.__setitem__((2, 1), 255), "reserved_scale"),
        (lambda s: s.__setitem__((2, 1), 3), "wild_scale"),
        (lambda s: None, None),
    ],
)
def test_scale_bytes_are_looked_at(change, kind, tmp_path):
    """A reserved E8M0 byte and one far from the others are named; scales of a usual spread are not."""
    scale = exponents(300, 3)
    change(scale)
    (shard,) = scan(open_checkpoint(write(tmp_path, {"a.weight_packed": codes(300, 48), "a.weight_scale": scale})))
    assert [p.kind for p in shard.problems] == ([kind] if kind else [])


@pytest.mark.parametrize(
    ("value", "kind"), [(0.0, "zero_scale"), (-1.0, "negative_scale"), (math.nan, "reserved_scale")]
)
def test_float_scales_are_looked_at(value, kind, tmp_path):
    """A scale that is zero, negative or no number is named."""
    scale = normal(3, 2).abs() + 0.1
    scale[1, 1] = value
    tensors = {"a.weight": normal(300, 200).to(torch.float8_e4m3fn), "a.weight_scale_inv": scale}
    (shard,) = scan(open_checkpoint(write(tmp_path, tensors, config=FP8)))
    assert {p.kind for p in shard.problems} == {kind}


def test_a_matrix_of_zeros_is_named_and_a_bias_of_zeros_is_not(tmp_path):
    """Nobody trains a matrix to zero in all its elements; a bias may stay there."""
    tensors = {"a.weight": torch.zeros(30, 40), "a.bias": torch.zeros(30), "b.weight": -torch.zeros(30, 40)}
    (shard,) = scan(open_checkpoint(write(tmp_path, tensors)))
    assert {p.name for p in shard.problems if p.kind == "all_zero"} == {"a.weight", "b.weight"}


def test_a_shard_that_shrinks_keeps_what_was_learned(tmp_path):
    """A file cut after it was opened is unreadable by name; its first tensors and the other file are known."""
    checkpoint = open_checkpoint(write(tmp_path, {"a": normal(64, 64), "b": normal(64, 64)}, {"c": normal(64, 64)}))
    cut, other = checkpoint.headers
    whole = (tmp_path / cut).read_bytes()
    (tmp_path / cut).write_bytes(whole[:-100])
    shards = {s.file: s for s in scan(checkpoint)}
    (problem,) = shards[cut].problems
    assert (problem.kind, problem.name) == ("unreadable", "b")
    assert "100 bytes early" in problem.found
    assert [s.name for s in shards[cut].statistics] == ["a"]
    assert not shards[cut].digests
    assert shards[other].digests


def test_a_shard_that_vanishes_is_a_problem_of_its_own(tmp_path):
    """A file that is gone is named; the other one is read."""
    checkpoint = open_checkpoint(write(tmp_path, {"a": normal(64, 64)}, {"c": normal(64, 64)}))
    gone, other = checkpoint.headers
    (tmp_path / gone).unlink()
    shards = {s.file: s for s in scan(checkpoint)}
    assert [p.kind for p in shards[gone].problems] == ["unreadable"]
    assert shards[other].digests


def test_a_second_pass_reads_only_what_changed(tmp_path):
    """Finished shards are taken from the state file; one that changed, and a line cut off by a kill, are read again."""
    folder, state = tmp_path / "ck", tmp_path / "state.jsonl"
    checkpoint = open_checkpoint(write(folder, {"a": normal(64, 64)}, {"b": normal(64, 64)}))
    first = list(scan(checkpoint, state=state))
    lines = sorted(state.read_text().splitlines(), key=lambda line: str(json.loads(line)["file"]) != first[0].file)
    assert len(lines) == 2  # in the order in which shards were finished
    lines[0] = json.dumps({**json.loads(lines[0]), "digests": {"blake3": "taken from the file"}})
    state.write_text(lines[0] + "\n" + lines[1][:40])
    again = list(scan(open_checkpoint(folder), state=state))
    assert again[0].digests == {"blake3": "taken from the file"}
    assert [s.reused for s in again] == [True, False]
    assert again[1].statistics == first[1].statistics
    file = folder / first[0].file
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    changed = list(scan(open_checkpoint(folder), state=state))
    assert changed[0].digests["blake3"] == blake3(bytes(content)).hexdigest()


def test_blocks_that_fp8_cannot_hold_are_counted(tmp_path):
    """Scale exponents 14 apart convert exactly; 15 apart lose the finest codes, and only in that block."""
    for apart, lossy in ((14, 0), (15, 1)):
        packed, scale = torch.full((256, 128), 0x11, dtype=torch.uint8), torch.full((256, 8), 110, dtype=torch.uint8)
        packed[200, 70:80] = 0x77
        scale[200, 4] = 110 + apart
        folder = write(tmp_path / str(apart), {"a.weight_packed": packed, "a.weight_scale": scale})
        (shard,) = scan(open_checkpoint(folder))
        (conversion,) = shard.conversions
        assert (conversion.blocks, conversion.lossy) == (4, lossy)
        assert (conversion.worst > 0) == bool(lossy)


def test_the_facts_of_a_whole_checkpoint(tmp_path):
    """A digest that was published vouches for its file; another one is a problem; what was found stands beside."""
    folder = write(tmp_path, {"a": normal(64, 64)}, {"b": torch.full((8, 8), math.nan)})
    first, second = open_checkpoint(folder).headers
    right = blake3((folder / first).read_bytes()).hexdigest()
    (folder / "day0-manifest.json").write_text(manifest_text({first: {"blake3": right}, second: {"blake3": "0" * 64}}))
    facts = content_facts(open_checkpoint(folder))
    assert facts["vouched"] == [first]
    assert [(p["kind"], p["file"]) for p in facts["problems"]] == [("digest", second), ("nonfinite", second)]
    assert facts["digests"][first]["blake3"] == right
    assert facts["suspicions"] == []
    json.dumps(facts, allow_nan=False)


@pytest.mark.parametrize("kind", FORMATS)
def test_helpers_change_nothing(kind, tmp_path, monkeypatch):
    """One file read by one thread alone, and by one whose pieces four others look at, shows the same."""
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", 1500)
    tensors, config = FORMATS[kind]
    checkpoint = open_checkpoint(write(tmp_path, tensors, config=config))
    alone, helped = (next(iter(scan(checkpoint, workers=workers))) for workers in (1, 4))
    assert dataclasses.replace(helped, read_at="") == dataclasses.replace(alone, read_at="")


def test_a_pipe_in_place_of_a_shard_is_told_at_once(tmp_path):
    """A pipe would never end: it is refused by its kind, and the other file is read."""
    checkpoint = open_checkpoint(write(tmp_path, {"a": normal(64, 64)}, {"c": normal(64, 64)}))
    piped, other = checkpoint.headers
    (tmp_path / piped).unlink()
    os.mkfifo(tmp_path / piped)
    shards = {s.file: s for s in scan(checkpoint)}
    (problem,) = shards[piped].problems
    assert problem.kind == "unreadable"
    assert "regular file" in problem.found
    assert shards[other].digests


@pytest.mark.parametrize("workers", [1, 4])
def test_a_disk_that_fails_keeps_what_was_learned(workers, tmp_path, monkeypatch):
    """An error of the disk in the third tensor names it; the NaN before it, and the first tensors, are known."""
    tensors = {"a": normal(64, 64), "b": torch.full((64, 64), math.nan), "c": normal(64, 64)}
    checkpoint = open_checkpoint(write(tmp_path, tensors))
    bad = checkpoint.tensors["c"].begin
    opened = shard.open_shard

    class Failing:
        def __init__(self, stream):
            self._stream = stream

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self._stream.close()

        def __getattr__(self, name):
            return getattr(self._stream, name)

        def readinto(self, view):
            if self._stream.tell() >= bad:
                raise OSError(errno.EIO, "Input/output error")
            return self._stream.readinto(view)

    monkeypatch.setattr(shard, "open_shard", lambda path: Failing(opened(path)))
    (found,) = scan(checkpoint, workers=workers)
    assert [(p.kind, p.name) for p in found.problems] == [("nonfinite", "b"), ("unreadable", "c")]
    assert "Input/output error" in found.problems[1].found
    assert [s.name for s in found.statistics] == ["a", "b"]
    assert not found.digests


def test_a_file_that_is_written_to_meanwhile_has_no_digest(tmp_path, monkeypatch):
    """A write into what was already read leaves its bytes unknown, and is told."""
    checkpoint = open_checkpoint(write(tmp_path, {"a": normal(64, 64), "b": normal(64, 64)}))
    (file,) = checkpoint.headers
    begin = checkpoint.tensors["a"].begin
    tensor = shard.Reading.tensor

    def touched(self, ref):
        tensor(self, ref)
        with (tmp_path / file).open("r+b") as stream:
            stream.seek(begin)
            stream.write(b"\1\2\3\4")

    monkeypatch.setattr(shard.Reading, "tensor", touched)
    (found,) = scan(checkpoint)
    assert [p.kind for p in found.problems] == ["unreadable"]
    assert "written to" in found.problems[0].found
    assert not found.digests


def test_a_matrix_of_zeros_in_a_stack_is_named(tmp_path):
    """One expert of zeros among others is a warning of its own, with its place."""
    stack = normal(4, 90, 64)
    stack[2] = 0
    (found,) = scan(open_checkpoint(write(tmp_path, {"experts": stack})))
    (problem,) = found.problems
    assert (problem.kind, problem.name, problem.severity) == ("all_zero", "experts[2]", "warning")
    assert problem.offset == found.statistics[2].offset


def test_a_pass_takes_about_as_long_as_its_samples_say(tmp_path):
    """There is an estimate for any readable checkpoint, and none for one whose files are gone."""
    folder = write(tmp_path, {"a.weight": normal(64, 64)}, {"c.weight": normal(64, 64).half()})
    checkpoint = open_checkpoint(folder)
    assert expected_seconds(checkpoint) > 0
    for file in checkpoint.headers:
        (folder / file).unlink()
    assert expected_seconds(checkpoint) == 0
