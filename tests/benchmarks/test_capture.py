"""The benchmarks run: every side that is installed does its work. Nothing is timed here."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
FOLDER = str(Path(__file__).resolve().parents[2] / "benchmarks")


@pytest.fixture
def bench(monkeypatch):
    """Give a benchmark's module by name."""
    monkeypatch.syspath_prepend(FOLDER)
    threads = torch.get_num_threads()
    yield importlib.import_module
    torch.set_num_threads(threads)
    for name in ("moe24", "capture", "compare"):
        sys.modules.pop(name, None)


def test_every_side_of_capture_runs(bench, tmp_path):
    """Each side has a ratio or a reason, and equal tensors are stored once."""
    capture = bench("capture")
    table, facts = capture.measure("bfloat16", 1, 2, tmp_path)
    assert {"plain forward", "day0 statistics", "day0 all tensors", "transformers debugger"} <= set(table)
    assert all("ratio" in row or row["skipped"] for row in table.values())
    assert facts["distinct_tensors"] < facts["taps"]
    assert facts["distinct_bytes"] < facts["written_bytes"]
    assert facts["statistics_bytes"] < facts["written_bytes"]
    assert "aim" in capture.render(table, facts, "bfloat16")


def test_compare_judges_an_honest_port(bench, tmp_path):
    """The traces that are compared say something: every layer has its ratios, and an honest port's are small."""
    compare = bench("compare")
    run = compare.record(tmp_path, "bfloat16", 2)
    found = compare.compare(tmp_path, run, "bfloat16")
    whole = {
        m.subject: m.value for m in found if m.metric == "error_ratio" and m.where.get("slice") == "whole"
    }  # fmt: skip
    assert {"layers.0", "layers.1", "layers.1.moe.experts", "norm"} <= set(whole)
    assert max(whole.values()) < 1.5
    assert any(m.metric == "slope_beyond_noise" and m.where["slice"] == "expert" for m in found)
    assert compare.read(tmp_path) != 0
    assert len(compare.common(tmp_path)) > 20
