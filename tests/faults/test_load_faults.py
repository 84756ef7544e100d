"""Weights that are not the checkpoint's: refused by the load stage, by name, with what memory holds instead."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

SHARD_3 = {"visual.blocks.0.attn.qkv.bias", "model.layers.1.linear_attn.conv1d.weight"}
"""The first weights of the third shard of the built-in checkpoint, in the order of the model."""


@pytest.mark.parametrize(
    ("fault", "criterion", "place", "cause"),
    [
        ("dropped_shard", "load.values", "visual.blocks.0.attn.qkv.bias", "zeros: never written"),
        ("short_shard", "load.values", "model.layers.7.self_attn.kv_b_proj.weight", "zeros"),
        ("linear_e8m0", "load.lossy", "model.layers.1.mlp.experts.0.gate_proj.weight", "scale byte read as a number"),
        ("halved_scales", "load.values", "model.layers.2.linear_attn.q_proj.weight", "each scale half as large"),
        ("reinitialised", "load.values", "model.layers.3.self_attn.indexer.wk.weight", "first random ones"),
        ("skipped_key", "load.values", "model.layers.1.post_attention_layernorm.weight", "the constant 1"),
        ("gate_up_swapped", "load.order", "model.layers.3.mlp.experts.0.gate_proj.weight", "another tensor than"),
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


@pytest.mark.parametrize("changed", [True, False])
def test_a_file_is_held_to_what_was_published_of_it(verify, llama, tmp_path, changed):
    """One bit that differs from the published digest is refused by file, however well it loads; equal files are not."""
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    shards = sorted(folder.glob("*.safetensors"))
    lines = [f"{hashlib.sha256(shard.read_bytes()).hexdigest()}  {shard.name}" for shard in shards]
    (folder / "SHA256SUMS").write_text("\n".join(lines))
    if changed:
        content = bytearray(shards[1].read_bytes())
        content[-2] ^= 1
        shards[1].write_bytes(content)
    outcome = verify(f"hf:{folder}?dtype=bfloat16", reference=f"hf:{folder}", stage="load")
    assert list(outcome.broken("load")) == (["load.content"] if changed else [])
    if changed:
        first = outcome.refused_at("load")
        assert first["tap"] == shards[1].name
        assert "sha256" in first["message"]


def test_a_value_that_is_no_number_is_found_in_the_file(verify, llama, tmp_path):
    """A NaN in a shard is named with its tensor, file and place."""
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    shard = sorted(folder.glob("*.safetensors"))[1]
    tensors = load_file(shard)
    name = next(n for n, t in tensors.items() if t.dim() == 2)
    tensors[name][3, 5] = float("nan")
    save_file(tensors, shard, metadata={"format": "pt"})
    outcome = verify(f"hf:{folder}?dtype=bfloat16", reference=f"hf:{folder}", stage="load")
    assert "load.content" in outcome.broken("load")
    told = [f["message"] for f in outcome.findings("load") if f["tap"] == name]
    assert any("[3, 5]" in message and shard.name in message for message in told), told
