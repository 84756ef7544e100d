"""The checkpoint made of holes is a whole one."""

from __future__ import annotations

from benchmarks.sparse_checkpoint import write
from harness.checkpoint.inspect import inspect


def test_a_small_one_is_clean(tmp_path):
    """With few layers and experts it has no problem, and takes next to nothing on disk."""
    count, total = write(tmp_path, layers=4, experts=6, shards=3)
    found = inspect(tmp_path)
    assert found["problems"] == []
    assert (found["tensors"], found["bytes"], found["shards"]) == (count, total, 3)
    assert set(found["formats"]) == {"mxfp4", "fp8_block", "plain"}
    assert sum(p.stat().st_blocks * 512 for p in tmp_path.iterdir()) < 10_000_000 < total
