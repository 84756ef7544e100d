"""Weights that are not the checkpoint's: refused by the load stage, by name, with what memory holds instead."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

SHARD_3 = {"visual.blocks.0.norm1.bias", "model.layers.0.mlp.down_proj.weight"}
"""The first weights of the third shard of the built-in checkpoint, in the order of the model."""


@pytest.mark.parametrize(
    ("fault", "criterion", "place", "cause"),
    [
        ("dropped_shard", "load.values", "visual.blocks.0.norm1.bias", "zeros: never written"),
        ("short_shard", "load.values", "model.layers.4.mlp.experts.5.up_proj.weight", "block scales"),
        ("linear_e8m0", "load.lossy", "model.layers.1.mlp.experts.0.gate_proj.weight", "block scales misread"),
        ("halved_scales", "load.values", "model.layers.2.self_attn.q_a_proj.weight", "0.5 times the checkpoint's"),
        ("reinitialised", "load.values", "model.layers.1.self_attn.indexer.wk.weight", "first random ones"),
        ("skipped_key", "load.values", "model.layers.1.post_attention_layernorm.weight", "the constant 1"),
        ("gate_up_swapped", "load.order", "model.layers.3.mlp.experts.0.gate_proj.weight", "another tensor's"),
    ],
)
def test_a_wrong_weight_is_refused_by_name(verify, fault, criterion, place, cause):
    """The run ends at load, the first finding is the first wrong weight, and it says what memory holds instead."""
    outcome = verify(fault, stage="startup")
    first = outcome.refused_at("load")
    assert first["tap"] == place
    assert cause in first["cause"]
    assert criterion in outcome.broken("load")
    if fault == "dropped_shard":
        assert {f["tap"] for f in outcome.findings("load")} >= SHARD_3


@pytest.fixture(scope="module")
def llama(tmp_path_factory, tiny_model) -> Path:
    """A small sharded checkpoint that a transformers reference reads."""
    return Path(tiny_model("llama").removeprefix("hf:"))


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_checkpoint_is_named_whatever_the_port_does(verify, llama, tmp_path, damage):
    """A shard that is short, or not there, is found from headers before any loader's opinion counts."""
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    shard = sorted(folder.glob("*.safetensors"))[1]
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-1000])
    else:
        shard.unlink()
    outcome = verify(f"hf:{folder}?dtype=bfloat16", reference=f"hf:{folder}", stage="startup")
    first = outcome.refused_at("load")
    assert shard.name in str(outcome.findings("load")), first
