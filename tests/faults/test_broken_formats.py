"""Two broken formats through the whole command: what the load report says of a file, and of a port that misreads."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.faults.disk import DAMAGES
from harness.faults.disk.writers import write

pytest.importorskip("transformers")
PORT = Path(__file__).parent / "decoded_ports.py"


def broken(name: str, folder: Path, *damages: str) -> Path:
    """Write the checkpoint of a format with some damages."""
    files = write(name)
    for damage in damages:
        DAMAGES[damage].inflict(files)
    return files.write(folder)


def test_a_gpt_oss_file_with_a_reserved_scale(verify, tmp_path):
    """Scale byte 255 and a relabelled norm are refused by tensor, file and byte, although the loader is silent."""
    folder = broken("mxfp4_gpt_oss", tmp_path / "main", "scale_not_a_number", "one_norm_relabelled")
    outcome = verify(f"hf:{folder}?dtype=bfloat16", reference=f"hf:{folder}")
    outcome.refused_at("load")
    assert {"load.index", "load.content"} <= set(outcome.broken("load"))
    told = {f["tap"]: f["message"] for f in outcome.findings("load")}
    assert "NaN, infinite or reserved" in told["model.layers.3.mlp.experts.gate_up_proj_scales"]
    assert "F16" in next(message for tap, message in told.items() if "norm" in tap)


@pytest.mark.parametrize("mistake", ["", "nibbles"])
def test_a_port_that_misreads_packed_experts(verify, tmp_path, mistake):
    """A compressed-tensors file and a port of its own: accepted where it is right, refused with the cause if not."""
    folder = broken("mxfp4_packed", tmp_path / "main")
    words = f"?mistake={mistake}" if mistake else ""
    outcome = verify(f"{PORT}:port{words}", "--set", f"run.checkpoint={folder}", reference=f"{PORT}:port")
    if not mistake:
        assert outcome.broken("load") == {}, outcome
        return
    first = outcome.refused_at("load")
    assert first["tap"].startswith("model.layers.3.")
    assert "nibbles of each byte swapped" in first["cause"]
