"""A reference is recorded on one machine; its port is verified on another, where the reference does not run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness import cli
from harness.faults import models

PORTS = """
from transformers import AutoModelForCausalLM


def port(checkpoint, setup):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=setup.dtype, attn_implementation="sdpa").eval()
    if setup.options.get("wrong"):
        model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda module, given, out: out * 1.05)
    return model


class Dead:
    name = "dead"

    def __init__(self, scope):
        self.scope = scope

    def load(self, checkpoint, setup):
        raise RuntimeError("this machine has no such device")

    prepare = forward = generate = close = lambda self, *given: None


def dead_on_load(checkpoint, setup):
    from harness.types import Scope

    return Dead(Scope())
"""
Verify = Callable[..., tuple[int, str, dict]]


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """A small checkpoint, its goldens, and the same checkpoint elsewhere, as on another machine."""
    desk = tmp_path_factory.mktemp("desk")
    (desk / "ports.py").write_text(PORTS)
    models.build("llama", desk / "here" / "llama", num_hidden_layers=2)
    words = ["record", "--reference", f"hf:{desk / 'here' / 'llama'}", "--out", str(desk / "gold"), "--stage", "text"]
    threads = torch.get_num_threads()
    assert cli.run(words) == 0
    torch.set_num_threads(threads)
    (desk / "here").rename(desk / "there")
    return desk


@pytest.fixture
def verify(desk, tmp_path, capsys) -> Verify:
    """Run `day0 verify` of a port of the moved checkpoint; return exit code, what it said, results.json."""

    def run(port: str, *words: str, goldens: Path | None = None, model: str = "llama") -> tuple[int, str, dict]:
        place = ["--set", f"run.checkpoint={desk / 'there' / model}", "--out", str(tmp_path / "run")]
        given = ["--goldens", str(goldens or desk / "gold"), "--accel", f"{desk / 'ports.py'}:{port}"]
        code = cli.run(["verify", "--stage", "text", *given, *place, *words])
        said = "".join(capsys.readouterr())
        path = tmp_path / "run" / "results.json"
        return code, said, json.loads(path.read_text()) if path.is_file() else {}

    return run


def test_a_floor_of_another_declaration_is_not_used(verify):
    """Goldens for ports that declare nothing do not judge one that declares an FP8 cache; both are named."""
    code, said, _ = verify("port", "--set", "accel.precision.cache=float8_e4m3fn")
    assert code == 4
    assert "nothing beside the dtype" in said
    assert "cache float8_e4m3fn:tensor" in " ".join(said.split())


def test_goldens_hold_no_weights(desk):
    """What travels is words and activations: no tensor of the checkpoint is among them, and who made them is said."""
    (reference,) = (desk / "gold").glob("*/reference-bfloat16.json")
    words = json.loads(reference.read_text())
    assert set(words["files"]) <= {"config.json", "generation_config.json"}
    assert words["made"]["time"]
    manifests = [json.loads(p.read_text()) for p in (desk / "gold").rglob("manifest.json")]
    names = {row["tap"]["name"] for m in manifests for row in m["tensors"]}
    assert not {n for n in names if "weight" in n}
    assert all(m["provenance"]["checkpoint"] == words["digests"]["checkpoint"] for m in manifests)
    assert {m["digests"] for m in manifests} == {"blake3"}


def test_a_wrong_port_is_refused_without_the_reference(verify):
    """No reference is named and none is there: a 5 % error is found in its place, from goldens alone."""
    code, _, results = verify("port?wrong=1")
    assert code == 1
    assert any("no reference was named" in line for line in results["scope"]["not_covered"])
    (text,) = [s for s in results["stages"] if s["name"] == "text"]
    assert text["status"] == "FAILED"
    assert text["findings"][0]["tap"].startswith("layers.1.attn")


def test_goldens_stand_in_for_a_reference_that_fails(desk, verify):
    """A reference that cannot be loaded on this machine is replaced by its recording: a right port is accepted."""
    code, _, results = verify("port", "--reference", f"{desk / 'ports.py'}:dead_on_load")
    assert code == 0, results
    said = [line for line in results["scope"]["not_covered"] if "the reference did not run here" in line]
    assert "no such device" in said[0]


def test_another_checkpoint_is_refused(desk, verify):
    """Goldens of one checkpoint do not judge a port of another: nothing is loaded, and both digests are named."""
    models.build("llama", desk / "there" / "other", seed=5, num_hidden_layers=2)
    code, said, results = verify("port", model="other")
    assert (code, results) == (4, {})
    assert "the goldens are of another checkpoint: expected digest" in said


def test_another_precision_is_refused(verify):
    """Goldens for bfloat16 ports do not judge a float32 port."""
    code, said, _ = verify("port?dtype=float32")
    assert code == 4
    assert "the goldens are for ports in bfloat16, expected float32" in said


def test_a_question_that_was_not_recorded_is_not_passed(verify):
    """A port with a scope of its own asks other questions; what has no answer is an ERROR that says what to record."""
    code, _, results = verify("port", "--set", "scope.max_length_tokens=40")
    assert code == 1
    (text,) = [s for s in results["stages"] if s["name"] == "text"]
    assert text["status"] == "ERROR"
    assert any("the goldens hold no answer" in v["reason"] for v in text["verdicts"])


def _asked_of_every_port(manifest: Path) -> bool:
    run = json.loads(manifest.read_text())["run"]
    return run["kind"] == "forward" and run["observe"] and not run["level"] and not run["dtype"]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("format", "expected format 'day0.goldens/1'"),
        ("words", "was changed after it was written"),
        ("recorder", "stale"),
        ("config", "found it changed or missing"),
        ("json", "expected what was recorded of a reference"),
        ("part", "expected .* bytes"),
    ],
)
def test_goldens_that_were_changed_are_refused(desk, verify, tmp_path, monkeypatch, harm, said):
    """Edited words, another version, a changed configuration, a short part: refused before anything is loaded."""
    from harness import recorder

    gold = tmp_path / "gold"
    shutil.copytree(desk / "gold", gold)
    (path,) = gold.glob("*/reference-bfloat16.json")
    words = json.loads(path.read_text())
    manifest = next(p for p in sorted(gold.rglob("manifest.json")) if _asked_of_every_port(p))
    if harm == "format":
        path.write_text(json.dumps({**words, "format": "day0.goldens/0"}))
    elif harm == "words":
        path.write_text(json.dumps({**words, "spec": "hf:elsewhere"}))
    elif harm == "recorder":
        monkeypatch.setattr(recorder, "VERSION", recorder.VERSION + 1)
    elif harm == "config":
        (path.parent / "checkpoint" / "config.json").write_text("{}")
    elif harm == "json":
        path.write_text("{")
    else:
        part = next(manifest.parent.glob("*.safetensors"))
        part.write_bytes(part.read_bytes()[:-8])
    code, told, results = verify("port", goldens=gold)
    assert (code, results) == (4, {}), told
    assert re.search(said, told), told
