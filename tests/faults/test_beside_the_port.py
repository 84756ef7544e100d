"""The checkpoint's files are judged whatever the port does, and not read twice for nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

PORT = """
import os, signal

def port(checkpoint, setup):
    os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_a_port_that_crashes_takes_no_word_from_the_files(verify, tiny_model, tmp_path):
    """Beside the ERROR of the port stands the NaN that is in the file."""
    folder = tmp_path / "model"
    shutil.copytree(Path(tiny_model("llama").removeprefix("hf:")), folder)
    shard = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    name = next(n for n, t in tensors.items() if t.dim() == 2)
    tensors[name][1, 2] = float("nan")
    save_file(tensors, shard, metadata={"format": "pt"})
    (tmp_path / "port.py").write_text(PORT)
    outcome = verify(f"{tmp_path / 'port.py'}:port", reference=f"hf:{folder}", stage="load")
    broken = outcome.broken("load")
    assert {"load.content", "load.memory"} <= set(broken)
    rows = [json.loads(line) for line in (outcome.out / "measurements" / "load.jsonl").read_text().splitlines()]
    told = [m["detail"]["message"] for m in rows if m["metric"] == "content_problems"]
    assert any("NaN" in message and "[1, 2]" in message for message in told), told
