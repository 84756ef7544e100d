"""A part of a model is verified in place of the whole, and says so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from harness import pipeline
from harness.checkpoint import open_checkpoint
from harness.checkpoint.cut import plan_cut, read_cut, write_cut
from harness.config import load_config
from harness.errors import ConfigError, UsageError
from harness.faults.models import build
from harness.portion import cut_to, prepared, telling
from harness.report.results import read_results
from harness.report.terminal import NullDisplay
from harness.unreleased import lists_of

ARCHITECTURES = ("llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "kimi_linear", "qwen3_next")
PORT = '''
import torch
from transformers import AutoModelForCausalLM


def port(checkpoint, setup):
    """Load a model and scale one matrix of layer 1."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, setup.dtype))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    return model
'''


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Keep what is written out of the user's cache, and away from a day0.toml."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function that makes a small model once."""
    folder = tmp_path_factory.mktemp("models")
    return lambda name: build(name, folder / name)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("layers", [(0, 2), (1, 3)])
def test_a_cut_computes_what_those_layers_of_the_whole_compute(models, tmp_path, name, layers):
    """The cut model gives the logits of the whole one from which the other layers were taken out, bit for bit."""
    import torch
    from transformers import AutoModelForCausalLM

    source = models(name)
    write_cut(plan_cut(open_checkpoint(source), layers, lists_of), tmp_path / "cut")
    cut, info = AutoModelForCausalLM.from_pretrained(tmp_path / "cut", output_loading_info=True)
    assert {k: v for k, v in info.items() if v} == {}
    whole = AutoModelForCausalLM.from_pretrained(source)
    whole.model.layers = torch.nn.ModuleList(whole.model.layers[n] for n in layers)
    for key, value in vars(whole.config).items():
        if isinstance(value, list) and len(value) == 4 and key.endswith("_types"):
            setattr(whole.config, key, [value[n] for n in layers])
    for number, layer in enumerate(whole.model.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        assert torch.equal(cut(ids, use_cache=False).logits, whole(ids, use_cache=False).logits)


def test_both_sides_are_given_the_cut(models):
    """A transformers SPEC is rewritten to the cut, its query kept; the checkpoint of all other ports is the cut too."""
    source = models("llama")
    flags = {"reference.spec": f"hf:{source}?attn=eager", "accel.spec": "port.py:port", "run.layers": "0,2"}
    said: list[str] = []
    config = prepared(load_config(flags=flags), said.append)
    folder = config.run.checkpoint
    assert config.reference.spec == f"hf:{folder}?attn=eager"
    assert config.accel.spec == "port.py:port"
    assert read_cut(folder).layers == (0, 2)
    assert "layers 0,2 of 4" in said[0]
    assert "written to" in said[0]
    again: list[str] = []
    assert prepared(load_config(flags=flags), again.append).run.checkpoint == folder
    assert "taken from" in again[0]
    assert "--layers 0,2" in pipeline.reproduce(config)


def test_a_server_that_would_serve_the_whole_model_is_refused(models):
    """serve: needs {checkpoint} in its command; of an address it is said what must be served there."""
    flags = {"reference.spec": f"hf:{models('llama')}", "run.layers": "0", "accel.spec": "serve:vllm serve X"}
    with pytest.raises(UsageError, match=r"expected \{checkpoint\} in the command"):
        prepared(load_config(flags=flags), lambda _: None)
    said: list[str] = []
    prepared(load_config(flags={**flags, "accel.spec": "openai:http://127.0.0.1:1/v1"}), said.append)
    assert re.fullmatch(r"http://127\.0\.0\.1:1/v1 must serve .*/cuts/\w+, not the whole model", said[-1])


def test_what_a_dry_run_needs_takes_no_disk(models, tmp_path):
    """Planning alone writes headers into a scratch folder, and nothing into the cache."""
    flags = {"reference.spec": f"hf:{models('llama')}", "accel.spec": f"hf:{models('llama')}", "run.layers": "0-1"}
    config = prepared(load_config(flags=flags), lambda _: None, scratch=tmp_path / "scratch")
    assert config.run.checkpoint.parent == tmp_path / "scratch"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("words", ["2,1", "1,1", "0-", "a", "", "3-1"])
def test_words_that_are_no_layers(words):
    """Layers are numbers and spans in rising order; anything else is told with an example."""
    with pytest.raises(ConfigError, match=r"--layers.*like 0-3,47,92"):
        load_config(flags={"run.layers": words})


def test_layers_are_a_key_of_the_configuration(tmp_path):
    """[run] layers is a text or a list of numbers and spans."""
    file = tmp_path / "mine.toml"
    file.write_text('[run]\nlayers = [0, "2-3"]\nrandom_weights = true\n')
    config = load_config(file)
    assert (config.run.layers, config.run.random_weights) == ((0, 2, 3), True)


def test_a_folder_of_ones_own(models, tmp_path):
    """`day0 cut` writes where it is told, and never over something."""
    said: list[str] = []
    cut_to(models("llama"), (0, 3), tmp_path / "mine", said.append)
    assert open_checkpoint(tmp_path / "mine").problems == ()
    with pytest.raises(UsageError, match="expected nothing at"):
        cut_to(models("llama"), (0, 3), tmp_path / "mine", said.append)


def test_progress_is_a_line_now_and_then(monkeypatch):
    """Long writings tell how far they are, how fast they go and how long it still takes."""
    now = [0.0]
    monkeypatch.setattr("harness.portion.time.monotonic", lambda: now[0])
    said: list[str] = []
    told = telling(said.append)
    for second in range(25):
        now[0] = float(second)
        told(second << 30, 100 << 30, "x")
    assert said == ["10.0 GiB of 100.0 GiB, 1.0 GiB/s, 90 s left: x", "20.0 GiB of 100.0 GiB, 1.0 GiB/s, 80 s left: x"]


def test_a_fault_in_a_cut_model_is_told_by_its_layer_of_the_whole(models, tmp_path):
    """A wrong matrix in the cut's layer 1 is told as layer 2 of the whole model; a right port passes."""
    Path("port.py").write_text(PORT)
    source = models("llama")

    def verified(accel: str):
        flags = {
            "reference.spec": f"hf:{source}", "accel.spec": accel, "run.layers": "0,2", "run.stage": "load",
            "run.out": tmp_path / "run",
        }  # fmt: skip
        return pipeline.verify(load_config(flags=flags), NullDisplay())

    results = verified("port.py:port")
    assert results.exit_code == 1
    finding = results.stage("load").findings[0]
    assert finding.tap == "model.layers.1.mlp.up_proj.weight"
    assert "layer 1 here is layer 2 of the whole model" in finding.message
    assert json.loads((tmp_path / "run" / "results.json").read_text())["cut"]["layers"] == [0, 2]
    assert "Verified was a model cut to layers 0,2 of 4" in (tmp_path / "run" / "summary.md").read_text()
    assert any("the whole model" in s for s in read_results(tmp_path / "run").scope.not_covered)
    assert verified(f"hf:{source}?dtype=bfloat16").exit_code == 0
