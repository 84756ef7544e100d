"""What a checkpoint should hold: layers and experts against their siblings, sizes and layouts against the words."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_files import write
from test_inspect import CONFIG, EXPERTS, HIDDEN, LAYERS, PACKED, VOCAB, tensors

from harness.checkpoint import checkpoint_facts, open_checkpoint
from harness.checkpoint.declared import ignores
from harness.checkpoint.problems import checkpoint_problems

QUANTISED = {**CONFIG, "quantization_config": PACKED}


def found(tmp_path, stored, config=CONFIG):
    """Return (severity, kind, tensor) of everything that is wrong."""
    checkpoint = open_checkpoint(write(tmp_path, stored, config=config))
    return {(p.severity, p.kind, p.name) for p in checkpoint_problems(checkpoint)}


def without(stored, *names):
    """Return a checkpoint without the tensors that hold one of these words."""
    return {n: t for n, t in stored.items() if not any(word in n for word in names)}


def renamed(stored, old, new):
    """Return a checkpoint with one tensor under another name."""
    return {new if n == old else n: t for n, t in stored.items()}


AT = "model.layers.2"
MISSING = {
    "a projection": (without(tensors(), f"{AT}.self_attn.o_proj"), "missing_tensor", f"{AT}.self_attn.o_proj.weight"),
    "a norm": (without(tensors(), f"{AT}.input_layernorm"), "missing_tensor", f"{AT}.input_layernorm.weight"),
    "a layer": (without(tensors(), f"{AT}."), "missing_layer", AT),
    "the last layer": (without(tensors(), "model.layers.3."), "layer_count", "model.layers"),
    "an expert": (
        without(tensors(experts=True), f"{AT}.mlp.experts.3."), "missing_tensor", f"{AT}.mlp.experts.3.up_proj.weight",
    ),
    "one matrix of the last expert": (
        without(tensors(experts=True), f"{AT}.mlp.experts.5.down_proj"), "missing_tensor",
        f"{AT}.mlp.experts.5.down_proj.weight",
    ),
    "a scale": (
        without(tensors(experts=True, packed=True), f"{AT}.mlp.experts.1.up_proj.weight_scale"), "undecodable",
        f"{AT}.mlp.experts.1.up_proj.weight",
    ),
    "a packed weight": (
        without(tensors(experts=True, packed=True), f"{AT}.mlp.experts.1.up_proj.weight_packed"), "missing_tensor",
        f"{AT}.mlp.experts.1.up_proj.weight",
    ),
    "a name": (
        renamed(tensors(), f"{AT}.self_attn.q_proj.weight", f"{AT}.self_attn.wq.weight"), "missing_tensor",
        f"{AT}.self_attn.q_proj.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MISSING)
def test_what_is_missing_is_named(tmp_path, what):
    """Each tensor, layer or expert that siblings have is named as missing, and makes the load stage fail."""
    stored, kind, name = MISSING[what]
    config = QUANTISED if "scale" in what or "packed" in what else CONFIG
    assert ("error", kind, name) in found(tmp_path, stored, config)
    facts = checkpoint_facts(tmp_path)
    assert name in {p["name"] for p in (*facts["problems"], *facts["undecodable"])}


def test_kinds_of_layers_are_not_missing_tensors(tmp_path):
    """Dense layers before sparse ones, and two kinds of attention that take turns, are what they are."""
    dense, sparse = tensors(), tensors(experts=True)
    stored = {n: t for n, t in sparse.items() if not n.startswith("model.layers.0.mlp")}
    stored.update({n: t for n, t in dense.items() if n.startswith("model.layers.0.mlp")})
    assert found(tmp_path / "a", stored, {**CONFIG, "first_k_dense_replace": 1}) == set()
    assert found(tmp_path / "b", stored) == set()
    turns = {n.replace("self_attn", "linear_attn") if int(n.split(".")[2]) % 2 else n: t
             for n, t in tensors().items() if n.startswith("model.layers")}  # fmt: skip
    kinds = ["full_attention", "linear_attention"] * 2
    assert found(tmp_path / "c", turns, {**CONFIG, "layer_types": kinds}) == set()


BENIGN = {
    "a tied head that is absent": (without(tensors(), "lm_head"), {**CONFIG, "tie_word_embeddings": True}, None),
    "a padded vocabulary": (tensors(), {**CONFIG, "vocab_size": VOCAB - 3}, "the vocabulary is padded"),
    "a layer that predicts further tokens": (
        tensors(), {**CONFIG, "num_hidden_layers": LAYERS - 1, "num_nextn_predict_layers": 1},
        "they predict further tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BENIGN)
def test_what_is_meant_is_silent_or_a_note(tmp_path, what):
    """Harmless differences are no problem; where one is worth knowing, a note gives the reason."""
    stored, config, reason = BENIGN[what]
    problems = checkpoint_problems(open_checkpoint(write(tmp_path, stored, config=config)))
    assert {p.severity for p in problems} <= {"note"}
    assert (reason is None) == (problems == [])
    assert all(reason in p.found for p in problems)
    assert checkpoint_facts(tmp_path)["problems"] == []


def test_an_old_index_may_name_what_is_computed(tmp_path):
    """An index that names a buffer which no shard holds is old, and nothing is lost; a weight would be."""
    folder = write(tmp_path, tensors(), config=CONFIG)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = next(iter(index["weight_map"].values()))
    index["weight_map"]["model.layers.0.self_attn.rotary_emb.inv_freq"] = file
    path.write_text(json.dumps(index))
    assert {(p.severity, p.kind) for p in checkpoint_problems(open_checkpoint(folder))} == {("note", "legacy_key")}
    index["weight_map"]["model.layers.0.self_attn.q_norm.weight"] = file
    path.write_text(json.dumps(index))
    assert ("error", "not_in_shard") in {(p.severity, p.kind) for p in open_checkpoint(folder).problems}


def _quantised(**words):
    return {**CONFIG, "quantization_config": {**PACKED, **words}}


def _halves(stored, word, dtype):
    return {n: t.to(dtype) if word in n else t for n, t in stored.items()}


FP8 = {
    "model.layers.0.mlp.up_proj.weight": torch.zeros(96, 32).to(torch.float8_e4m3fn),
    "model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(3, 1),
}
CONTRADICTIONS = {
    "another method": (tensors(packed=True), _quantised(quant_method="gptq", format=None), "method_contradicted"),
    "another format": (tensors(packed=True), _quantised(format="pack-quantized"), "method_contradicted"),
    "no method": (tensors(packed=True), CONFIG, "method_contradicted"),
    "a method and plain tensors": (tensors(), _quantised(), "method_contradicted"),
    "other bits": (
        tensors(packed=True), _quantised(config_groups={"group_0": {"weights": {"num_bits": 8}}}), "bits_contradicted",
    ),
    "another group": (
        tensors(packed=True), _quantised(config_groups={"group_0": {"weights": {"group_size": 16}}}),
        "group_contradicted",
    ),
    "another block": (
        FP8, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "undecodable",
    ),
    "an ignored module": (
        tensors(packed=True), _quantised(ignore=["lm_head", "re:.*down_proj"]), "ignored_but_quantised",
    ),
    "a module left out": (
        {**without(tensors(packed=True), f"{AT}.mlp.up_proj"), f"{AT}.mlp.up_proj.weight": torch.zeros(96, 32)},
        _quantised(), "quantised_but_plain",
    ),
    "the layers": (tensors(), {**CONFIG, "num_hidden_layers": LAYERS + 3}, "layer_count"),
    "fewer layers": (tensors(), {**CONFIG, "num_hidden_layers": LAYERS - 1}, "layer_count"),
    "the experts": (tensors(experts=True), {**CONFIG, "num_experts": EXPERTS - 1}, "expert_count"),
    "more experts": (tensors(experts=True), {**CONFIG, "num_experts": EXPERTS * 4}, "expert_count"),
    "the vocabulary": (tensors(), {**CONFIG, "vocab_size": VOCAB + 1}, "vocab_rows"),
    "the hidden size": (tensors(), {**CONFIG, "hidden_size": HIDDEN * 2}, "hidden_size"),
    "the heads": (tensors(), {**CONFIG, "num_attention_heads": 8}, "heads"),
    "the key heads": (tensors(), {**CONFIG, "num_key_value_heads": 4}, "heads"),
    "one relabelled half": (_halves(tensors(), f"{AT}.mlp.up_proj", torch.float16), CONFIG, "dtype_contradicted"),
    "one odd shape": (
        {n: t[:90] if n.startswith(f"{AT}.mlp.up_proj") else t for n, t in tensors(experts=False).items()}, CONFIG,
        "odd_shape",
    ),
    "all halves relabelled": (
        _halves(tensors(), "", torch.float16), {**CONFIG, "torch_dtype": "bfloat16"}, "dtype_contradicted",
    ),
    "a tie flag": (
        {**tensors(), "lm_head.weight": torch.ones(VOCAB, HIDDEN, dtype=torch.bfloat16)},
        {**CONFIG, "tie_word_embeddings": True}, "tie_contradicted",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_each_contradiction_has_its_name(tmp_path, what):
    """A configuration that says something else than the tensors is a problem that names what, and a tensor if any."""
    stored, config, kind = CONTRADICTIONS[what]
    nothing_quantised = what == "a method and plain tensors"
    assert kind in {k for _, k, name in found(tmp_path, stored, config) if name or nothing_quantised}


def test_a_tied_head_that_is_stored_again_is_fine(tmp_path):
    """A head that repeats the embedding byte for byte contradicts no tie."""
    assert found(tmp_path, tensors(), {**CONFIG, "tie_word_embeddings": True}) == set()


def test_patterns_of_ignored_modules():
    """Names, starts, ends, globs and expressions match whole parts; one that could take for ever matches none."""
    ignored = ignores(
        ("lm_head", "mlp.gate", "model.layers.0", "re:.*self_attn.*", "visual*", "re:(a+)+$", "re:(a|a)*b")
    )
    for module in ("lm_head", "model.layers.3.mlp.gate", "model.layers.0.mlp.up_proj", "m.self_attn.q", "visual.x"):
        assert ignored(module)
    for module in ("model.layers.3.mlp.gate_proj", "model.layers.10.mlp.up_proj", "a" * 60):
        assert not ignored(module)
