"""The benchmark of loading runs on small checkpoints: every side does its work. Nothing is timed here."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

FOLDER = str(Path(__file__).resolve().parents[2] / "benchmarks")


@pytest.fixture
def bench(monkeypatch):
    """Give the benchmark's modules, their model small."""
    monkeypatch.syspath_prepend(FOLDER)
    threads = torch.get_num_threads()
    files, load = importlib.import_module("load_files"), importlib.import_module("load")
    monkeypatch.setattr(files, "_LINEAR", {"mlp.up_proj": (256, 128)})
    monkeypatch.setattr(files, "VOCABULARY", 16)
    yield files, load
    torch.set_num_threads(threads)
    for name in ("load", "load_files"):
        sys.modules.pop(name, None)


def test_sides_of_the_load_benchmark_do_the_same_work(bench, tmp_path):
    """Each format is readable, whole and above suspicion; a side that cannot load it says why."""
    files, load = bench
    del load.SIDES["transformers from_pretrained"]
    for name in files.FORMATS:
        size = files.write(tmp_path / name, name, 1 << 18)
        assert load.read(tmp_path / name) == size
        assert all(digests["blake3"] for digests in load.whole(tmp_path / name))
        table = load.passes(tmp_path / name, 1, cold=True)
        assert set(table) == set(load.SIDES)
        assert table["read the bytes"]["speed"] == 1.0


def test_the_decoders_of_the_load_benchmark_agree(bench):
    """What is looked up in eager torch, and converted by torch, is what day0 decodes."""
    files, load = bench
    from harness.checkpoint.decoders import decode_fp8_block, decode_mxfp4

    draw = torch.Generator().manual_seed(0)
    packed, scale = files.mxfp4(64, 128, draw)
    assert torch.equal(load.eager_mxfp4(packed, scale, torch.float32), decode_mxfp4(packed, scale))
    codes, grid = files.fp8(200, 300, draw)
    assert torch.equal(load.eager_fp8(codes, grid), decode_fp8_block(codes, grid, (128, 128)))
    rows = load.decoders(1, 64, 128)
    assert rows["MXFP4, into float32"]["base"] == "eager lookup, float32"
