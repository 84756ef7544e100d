"""The shadow on models of transformers that run on the small device: silent, bounded, and each defect named by a call
that anybody can replay."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = os.environ.get("CXX") or "g++"
pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C++ compiler {COMPILER!r} to build it with")
BREAKS = ("strided_read", "topk_last", "softmax_band", "blit_neighbours")

CODE = """
import dataclasses, json, sys, time
from pathlib import Path
import torch
from accel_impl import device
from harness.faults import models
from harness.plugins import open_adapter, parse_spec
from harness.shadow.facts import shadow_facts
from harness.types import Case, Setup

torch.set_num_threads(1)
name, scratch, breaks = sys.argv[1], Path(sys.argv[2]), sys.argv[3].split(",")
checkpoint = models.build(name, scratch / name)
setup = Setup(side="accel", role="accel", adapter="hf", dtype="bfloat16", device="pocket:1")
told = {}
with torch.no_grad():
    adapter = open_adapter(parse_spec(f"hf:{checkpoint}"), checkpoint, setup)
    adapter.load(checkpoint, setup)
    case = Case(id="ids", token_ids=tuple(3 + (7 * i) % 240 for i in range(61)))
    for word in ("", "hurried", *breaks):
        device.set_breaks([word] if word in device.BREAKS else [])
        options = {"lengths": [7, 61], "seconds": 0.0 if word == "hurried" else 30.0}
        said = dataclasses.replace(setup, options={"device_breaks": word} if word in device.BREAKS else {})
        facts = shadow_facts(adapter, said, case, options, scratch / f"{name}-{word}", lambda _: None)
        told[word] = {**facts, "compared": sum(t["compared"] for t in facts["operators"].values())}
print(json.dumps(told))
"""


def shadowed(name: str, scratch: Path, breaks: tuple[str, ...]) -> dict:
    """Return what the shadow told of a model, without a defect, in a hurry, and with each defect."""
    words = [sys.executable, "-c", CODE, name, str(scratch), ",".join(breaks)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """What is told of a small model with experts."""
    pytest.importorskip("transformers")
    return shadowed("qwen3_moe", tmp_path_factory.mktemp("experts"), BREAKS)


def test_a_dense_model_is_silent_unless_its_kernels_are_wrong(tmp_path):
    """Llama has nothing to say on the right device; a wrong softmax is named, a wrong top-k is none of its own."""
    pytest.importorskip("transformers")
    told = shadowed("llama", tmp_path, ("topk_last", "softmax_band"))
    assert [f["operator"] for f in told[""]["findings"] + told["topk_last"]["findings"]] == []
    assert {f["operator"] for f in told["softmax_band"]["findings"]} <= {"aten::_softmax", "aten::_safe_softmax"}
    assert told["softmax_band"]["findings"][0]["module"] == "model.layers.0.self_attn"


def test_the_right_device_is_silent_and_its_results_are_not_changed(experts):
    """No call is beyond its budget, hundreds were repeated, and the logits have the bits of a run without a shadow."""
    assert experts[""]["findings"] == []
    assert experts[""]["compared"] > 300
    assert max(t["worst"] for t in experts[""]["operators"].values()) < 1
    assert {word: facts["changed"] for word, facts in experts.items()} == dict.fromkeys(experts, 0)


def test_repeating_ends_with_its_time(experts):
    """Without time hardly anything is repeated, and all calls are still seen."""
    calls = {word: sum(t["calls"] for t in experts[word]["operators"].values()) for word in ("", "hurried")}
    assert calls["hurried"] == calls[""]
    assert experts["hurried"]["compared"] < experts[""]["compared"] / 10


@pytest.mark.parametrize(("defect", "operators", "kinds", "module"), [
    ("strided_read", {"clone", "cat", "_to_copy"}, {"bits"}, "model.layers.0.self_attn"),
    ("topk_last", {"topk"}, {"bits"}, "model.layers.0.mlp.gate"),
    ("softmax_band", {"_softmax", "_safe_softmax"}, {"values"}, "model.layers.0.self_attn"),
    ("blit_neighbours", {"cat", "copy_", "index_put_"}, {"bits", "neighbours"}, "model.layers.0.self_attn"),
])  # fmt: skip
def test_each_defect_is_named_and_replayed(experts, defect, operators, kinds, module):
    """The operator, its module, its input are told; the script in the folder gives the same in a process of its own."""
    findings = experts[defect]["findings"]
    assert {f["operator"].partition("::")[2] for f in findings} & operators
    assert {f["kind"] for f in findings} <= {*kinds, "values"}
    first = next(f for f in findings if f["operator"].partition("::")[2] in operators)
    assert first["module"] == module
    assert "modeling_qwen3_moe" in first["site"] or "transformers/" in first["site"]
    assert all("strides" in words for words in first["inputs"])
    script = [sys.executable, str(Path(first["saved"]) / "replay.py")]
    again = subprocess.run(script, capture_output=True, text=True, cwd=ROOT, check=False)
    assert again.returncode == 1, again.stdout + again.stderr[-2000:]
    assert f"aten::{first['operator'].partition('::')[2]} of {module}" in again.stdout
    assert "elements differ" in again.stdout
