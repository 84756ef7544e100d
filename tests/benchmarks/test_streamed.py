"""The benchmark of streaming runs small, and tells what it measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import streamed

from harness.checkpoint import open_checkpoint


def test_a_checkpoint_of_any_size_is_whole(tmp_path: Path) -> None:
    """What it writes is a checkpoint without a problem, of about the size that was asked for."""
    model = streamed.sized(0.008, 256)
    total = streamed.write(model, tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.problems == ()
    assert checkpoint.nbytes == total
    assert abs(total / 1e9 - 0.008) < 0.002


def test_the_small_run_records_and_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Recorded and accepted, with the memory of each process and the bytes that were read."""
    given = [str(tmp_path), "--gigabytes", "0.003", "--hidden", "256", "--tokens", "24", "--stages", "load"]
    assert streamed.main(given) == 0
    told = json.loads((tmp_path / "streamed.json").read_text())
    for step in ("record", "verify"):
        assert told[step]["times_the_checkpoint"] >= 1
        assert {"day0", "reference worker", "accel worker"} <= set(told[step]["anonymous_bytes"])
        assert max(told[step]["anonymous_bytes"].values()) <= told[step]["anonymous_together_bytes"]
    assert "times the checkpoint" in capsys.readouterr().out
