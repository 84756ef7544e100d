"""Before there are weights, a configuration gives a checkpoint of true shapes."""

from __future__ import annotations

import json

import pytest
import torch

from harness.checkpoint import open_checkpoint
from harness.checkpoint.cut import read_cut, write_cut
from harness.checkpoint.formats import decode, logical_tensors
from harness.checkpoint.problems import promise_problems
from harness.errors import UsageError
from harness.faults.models import CONFIGS, build
from harness.unreleased import made, plan_random
from harness.unreleased.made import rows_of


def released(folder, name, *, quantisation=None, **overrides):
    """Write the configuration of an architecture, and nothing else; return its folder."""
    from transformers import AutoConfig

    words = {**CONFIGS[name], **overrides}
    config = AutoConfig.for_model(name, **words)
    config.architectures = None
    folder.mkdir()
    config.save_pretrained(folder)
    if quantisation is not None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantisation}))
    return folder


def written(source, out, layers=None):
    write_cut(plan_random(source, layers), out)
    checkpoint = open_checkpoint(out)
    assert checkpoint.problems == ()
    assert [p for p in promise_problems(checkpoint) if p.severity == "error"] == []
    return checkpoint


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next", "qwen3_vl_moe"])
def test_names_and_shapes_are_those_of_a_saved_model(tmp_path, name):
    """Every tensor that transformers saves of such a model is there in its shape, and no other."""
    saved = open_checkpoint(build(name, tmp_path / "saved"))
    found = written(tmp_path / "saved", tmp_path / "made")
    assert {n: r.shape for n, r in found.tensors.items()} == {n: r.shape for n, r in saved.tensors.items()}
    assert read_cut(tmp_path / "made").random


@pytest.mark.parametrize("name", ["kimi_linear", "gpt_oss"])
def test_a_random_model_runs_and_is_not_degenerate(tmp_path, name):
    """Some layers of it load with nothing missing, and give finite logits that depend on the token."""
    from transformers import AutoModelForCausalLM

    written(released(tmp_path / "source", name), tmp_path / "made", (0, 3))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "made", output_loading_info=True)
    assert {k: v for k, v in info.items() if v} == {}
    with torch.no_grad():
        logits = model(torch.arange(3, 40)[None]).logits.float()
    assert logits.isfinite().all()
    assert 0.2 < logits.std() < 20
    assert logits.argmax(-1).unique().numel() > 10


def test_the_same_bytes_every_time(tmp_path):
    """Two writings agree in every byte; layers that both hold do not depend on which others were chosen."""
    source = released(tmp_path / "source", "llama")
    written(source, tmp_path / "a", (0, 1))
    written(source, tmp_path / "b", (0, 1))
    name = "model.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_rows_are_made_in_pieces(monkeypatch):
    """Memory is bounded by a piece of a tensor, and the pieces together have unit rows in the right scale."""
    monkeypatch.setattr(made, "CHUNK_ELEMENTS", 1 << 12)
    parts = list(rows_of("model.layers.0.mlp.up_proj.weight", (300, 256)))
    assert len(parts) == 19
    assert max(p.shape[0] for p in parts) == 16
    assert torch.cat(parts).std() == pytest.approx(256**-0.5, rel=0.02)
    assert len({p.flatten()[0].item() for p in parts}) == len(parts)


def test_fp8_with_block_scales_is_written_as_configured(tmp_path):
    """Matrices of layers are E4M3 with a scale for each block, partial edges included; what is kept plain is plain."""
    words = {"quant_method": "fp8", "weight_block_size": [32, 32], "fmt": "e4m3", "modules_to_not_convert": ["lm_head"]}
    source = released(tmp_path / "source", "deepseek_v3", quantisation=words)
    checkpoint = written(source, tmp_path / "made", (0, 2))
    formats = {x.name: x.format for x in logical_tensors(checkpoint)}
    assert formats["model.layers.1.mlp.experts.3.down_proj.weight"] == "fp8_block"
    plain = ("model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.gate.weight", "model.norm.weight")
    assert {formats[n] for n in plain} == {"plain"}
    logical = next(x for x in logical_tensors(checkpoint) if x.name.endswith("layers.0.self_attn.q_a_proj.weight"))
    assert decode(checkpoint, logical).std() == pytest.approx(1.4 / 8, rel=0.1)


def test_mxfp4_experts_are_written_as_gpt_oss_has_them(tmp_path):
    """Merged experts are blocks and scales, whose values have the size that plain ones would have."""
    source = released(tmp_path / "source", "gpt_oss", quantisation={"quant_method": "mxfp4"})
    checkpoint = written(source, tmp_path / "made", (1, 2))
    assert checkpoint.tensors["model.layers.0.mlp.experts.gate_up_proj_blocks"].shape == (8, 64, 2, 16)
    logical = next(x for x in logical_tensors(checkpoint) if x.name.endswith("0.mlp.experts.gate_up_proj"))
    assert decode(checkpoint, logical).std() == pytest.approx(1 / 8, rel=0.1)


def test_a_format_that_is_not_written_leaves_plain_weights_and_says_so(tmp_path):
    """Of another format the configuration loses its quantisation, and a note tells."""
    source = released(tmp_path / "source", "llama", quantisation={"quant_method": "awq", "bits": 4})
    checkpoint = written(source, tmp_path / "made")
    assert "quantization_config" not in checkpoint.config
    assert any("awq" in note for note in read_cut(tmp_path / "made").notes)


def test_an_index_that_came_early_says_what_is_quantised(tmp_path):
    """Where only the index is there, its names of scales decide, and tensors that are not made up are counted."""
    words = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    source = released(tmp_path / "source", "llama", quantisation=words)
    only = "model.layers.2.mlp.up_proj.weight"
    names = [only, f"{only}_scale_inv", "model.layers.2.mystery.weight"]
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    write_cut(plan_random(source, (1, 2)), tmp_path / "made")
    scales = [n for n in open_checkpoint(tmp_path / "made").tensors if "scale" in n]
    assert scales == ["model.layers.1.mlp.up_proj.weight_scale_inv"]
    assert any("1 tensors that the index names are not made up" in n for n in read_cut(tmp_path / "made").notes)


def test_an_architecture_that_nobody_knows_is_refused(tmp_path):
    """Without transformers' knowledge nothing says which tensors there are; the way out is told."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "brand_new", "num_hidden_layers": 3}))
    with pytest.raises(UsageError, match=r"model_type that transformers knows.*--layers"):
        plan_random(tmp_path, (0, 1))
    with pytest.raises(UsageError, match=r"expected a config\.json"):
        plan_random(tmp_path / "nowhere", None)
