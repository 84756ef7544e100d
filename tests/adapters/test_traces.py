"""Recorded traces in place of a port: judged in reverse replay, and refused where they cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from harness import cli
from harness.adapter import silent
from harness.adapters.traces import open_traces
from harness.dropin import Recorder
from harness.errors import MappingError, PortError, SpecError
from harness.faults import models
from harness.types import Setup

IDS = [int(i) for i in torch.randint(3, 200, (43,), generator=torch.Generator().manual_seed(0))]
MAP = """
format = "day0.map/1"
[[taps]]
tap = "embed"
from = "model.embed_tokens"
[[taps]]
tap = "layers.{n}"
from = "model.layers.{n}"
[[taps]]
tap = "layers.{n}.attn"
from = "model.layers.{n}.self_attn"
[[taps]]
tap = "layers.{n}.mlp"
from = "model.layers.{n}.mlp"
[[taps]]
tap = "norm"
from = "model.norm"
[[taps]]
tap = "logits"
from = "lm_head"
"""
NAMES = [
    "model.layers.?",
    "model.layers.?.self_attn",
    "model.layers.?.mlp",
    "model.embed_tokens",
    "model.norm",
    "lm_head",
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return models.build("llama", tmp_path_factory.mktemp("model") / "llama", num_hidden_layers=2)


def engine(model: Path, out: Path, *, wrong: bool = False, names: list[str] = NAMES, skip: int = 0) -> Path:
    """Serve one request in chunks and a decode step over a cache, with the recorder in the worker."""
    from transformers import AutoModelForCausalLM

    port = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    if wrong:
        port.model.layers[1].self_attn.o_proj.weight.data *= 1.05
    cache = None
    with torch.no_grad(), Recorder(out, names=names) as recorder:
        recorder.watch(port)
        for start, stop in ((0, 17), (17, 42), (42, 43)):
            if start >= skip:
                recorder.tokens("request 1", range(start, stop), ids=IDS[start:stop])
            else:
                recorder.tokens("other", [-1] * (stop - start))
            cache = port(torch.tensor([IDS[start:stop]]), past_key_values=cache, use_cache=True).past_key_values
    return out


@pytest.fixture(scope="module")
def right(llama, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("right")
    (folder / "map.toml").write_text(MAP)
    return engine(llama, folder)


def opened(folder: Path, model: Path | None = None, dtype: str = "bfloat16", **options: str):
    setup = Setup(side="accel", role="accel", adapter="traces", dtype=dtype, options=options)
    return open_traces(folder, model, setup)


def mapped(folder: Path, model: Path):
    return opened(folder, model, map=str(folder / "map.toml"))


def verified(folder: Path, model: Path, out: Path, map_file: Path) -> tuple[int, dict]:
    spec = f"traces:{folder}?map={map_file}"
    words = ["verify", "--reference", f"hf:{model}", "--accel", spec, "--stage", "text", "--out", str(out)]
    code = cli.run(words)
    return code, json.loads((out / "results.json").read_text())


def test_a_right_engine_is_accepted_from_its_recordings(right, llama, tmp_path):
    """Chunks and a decode step of another engine pass in reverse replay; what needs a running port is SKIPPED."""
    code, results = verified(right, llama, tmp_path / "run", right / "map.toml")
    stages = {s["name"]: s for s in results["stages"]}
    assert code == 0, results
    assert {n: s["status"] for n, s in stages.items()} == {"load": "SKIPPED", "startup": "SKIPPED", "text": "PASSED"}
    assert "recordings show what was recorded" in stages["load"]["reason"]
    verdicts = {v["criterion"]["id"]: v for v in stages["text"]["verdicts"]}
    assert verdicts["text.layers"]["count"] > 4
    assert verdicts["text.greedy"]["status"] == verdicts["text.observer"]["status"] == "SKIPPED"


def test_a_wrong_engine_is_refused_from_its_recordings(right, llama, tmp_path):
    """A 5 % error in one matrix of one layer is found in its unit, though nothing of the engine runs."""
    folder = engine(llama, tmp_path / "rec", wrong=True)
    code, results = verified(folder, llama, tmp_path / "run", right / "map.toml")
    text = results["stages"][-1]
    assert (code, text["status"]) == (1, "FAILED")
    assert text["findings"][0]["tap"] == "layers.1.attn"


def test_the_recorded_request_is_the_case(right, llama):
    """The case is the recorded token ids; other ids have no answer; nothing is generated."""
    port = mapped(right, llama)
    (case,) = port.cases
    assert case.token_ids == tuple(IDS)
    assert not port.scope.replay
    logits = port.forward(port.prepare(case, silent), silent)
    assert logits.shape[-2] == len(IDS)
    inputs = port.prepare(case, silent)
    with pytest.raises(PortError, match="cannot generate"):
        port.generate(inputs, 3, silent)
    with pytest.raises(PortError, match="no recording of these 2 token ids"):
        port._trace([1, 2])


def test_what_was_not_recorded_is_unobservable_with_its_reason(llama, tmp_path):
    """A layer that was not named is unobservable; logits that are not there leave nothing to judge as a whole."""
    folder = engine(llama, tmp_path, names=["model.layers.0", "model.layers.0.mlp"])
    (tmp_path / "map.toml").write_text(
        'format = "day0.map/1"\n[[taps]]\ntap = "layers.{n}"\nfrom = "model.layers.{n}"\n'
    )
    port = mapped(folder, llama)
    assert port.scope.unobservable["layers.1"] == "it was not recorded"
    assert "layers.0" not in port.scope.unobservable
    inputs = port.prepare(port.cases[0], silent)
    with pytest.raises(PortError, match="no logits: it was not recorded"):
        port.forward(inputs, silent)


def test_recordings_without_layers_are_a_black_box(right, llama, tmp_path):
    """Logits alone can be judged, and the scope says in which words; recordings with layers are no black box."""
    folder = engine(llama, tmp_path, names=["lm_head"])
    rows = ['format = "day0.map/1"', "[[taps]]", 'tap = "logits"', 'from = "lm_head"']
    (tmp_path / "map.toml").write_text("\n".join(rows))
    assert "a black box" in mapped(folder, llama).scope.off["layers"]
    assert "layers" not in mapped(right, llama).scope.off


def test_recordings_of_another_checkpoint_are_refused(right, llama, tmp_path):
    """Where a recording says which checkpoint it is of, another one is refused when it is loaded."""
    recorder = Recorder(tmp_path, names=["*"], about={"checkpoint": "0123456789abcdef"})
    recorder.tokens("r", range(3), ids=[1, 2, 3])
    recorder.tap("layers.0", torch.ones(3, 64, dtype=torch.bfloat16))
    recorder.close()
    port = opened(tmp_path, llama)
    with pytest.raises(PortError, match="recorded from another checkpoint: expected digest"):
        port.load(llama, Setup(side="accel", role="accel", adapter="x"))
    mapped(right, llama).load(llama, Setup(side="accel", role="accel", adapter="x"))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("nothing", r"found no manifest\.json"),
        ("empty", "expected the recording of a text request, found none"),
        ("no ids", "do not say which token ids they are of"),
        ("cut", "expected .* bytes"),
        ("dtype", "the recorded layers are float32"),
        ("option", "unknown option 'mapp'"),
    ],
)
def test_recordings_that_cannot_be_used_are_refused(tmp_path, harm, said):
    """No recordings, empty ones, ones of unknown tokens, cut short or of another precision: a usage error, with why."""
    if harm != "nothing":
        recorder = Recorder(tmp_path, names=["*"])
        if harm != "empty":
            recorder.tokens("r", range(3), ids=None if harm == "no ids" else [1, 2, 3])
            recorder.tap("layers.0", torch.ones(3, 4, dtype=torch.float32 if harm == "dtype" else torch.bfloat16))
        else:
            recorder.tokens("r", range(3))
        recorder.close()
    if harm == "cut":
        part = next(tmp_path.rglob("*.safetensors"))
        part.write_bytes(part.read_bytes()[:-1])
    options = {"mapp": "x"} if harm == "option" else {}
    with pytest.raises(SpecError, match=said):
        opened(tmp_path, **options)


def test_a_bad_mapping_ends_before_anything_runs(right, llama, tmp_path, capsys):
    """A mapping that matches nothing is a usage error of `verify` too."""
    path = tmp_path / "map.toml"
    path.write_text(MAP.replace("model.layers", "transformer.h"))
    with pytest.raises(MappingError, match="matches nothing"):
        opened(right, llama, map=str(path))
    words = ["verify", "--reference", f"hf:{llama}", "--accel", f"traces:{right}?map={path}", "--stage", "text"]
    assert cli.run([*words, "--out", str(tmp_path / "run")]) == 4
    assert "matches nothing" in capsys.readouterr().err


def test_a_prefix_that_was_not_computed_is_said(llama, tmp_path):
    """Where a prefix came from a cache, its taps are not whole and are named so."""
    folder = engine(llama, tmp_path, skip=17)
    with pytest.raises(SpecError, match="do not say which token ids"):
        opened(folder, llama)
