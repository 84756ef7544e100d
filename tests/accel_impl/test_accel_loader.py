from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accel_runs import setup_of

import accel_impl
from accel_impl import formats, loader
from accel_impl.config import read_config
from accel_impl.parallel import Place
from accel_impl.shards import INDEX, Shards
from harness.checkpoint.facts import audit_facts
from harness.errors import CheckpointError, SpecError
from harness.types import Layout


def loaded(checkpoint: Path, **options: Any) -> loader.Loaded:
    config = read_config(checkpoint)
    return loader.load(Shards(checkpoint), config, Place(), torch.bfloat16, **options)


def wrong_weights(checkpoint: Path, port: Any) -> list[str]:
    rows = audit_facts(checkpoint, port.weights(), "bfloat16")["weights"]
    return [row["name"] for row in rows if row["mismatches"] or row["unmatched"] or row["match"] != "named"]


def test_memory_holds_what_the_checkpoint_says(checkpoint: Path, opened: Any) -> None:
    """Every weight in memory equals an independent decoding of the checkpoint, and every tensor is used."""
    port = opened("bfloat16")
    assert wrong_weights(checkpoint, port) == []
    facts = loaded(checkpoint).facts
    assert (facts["unused"], facts["unfilled"], facts["lossy_blocks"]) == ([], [], {})


def test_swapped_nibbles_are_seen_in_memory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that takes the high nibble first gives wrong experts, and nothing else."""
    decode = formats.decode_mxfp4
    monkeypatch.setattr(formats, "decode_mxfp4", lambda p, s, out: decode((p >> 4) | (p << 4), s, out))
    port = accel_impl.adapter(checkpoint, setup_of("bfloat16"))
    port.load(checkpoint, setup_of("bfloat16"))
    first = [held for held in port.weights() if held.name.startswith("model.layers.1.mlp.")]
    rows = audit_facts(checkpoint, first, "bfloat16")["weights"]
    wrong = [row["name"] for row in rows if row["mismatches"]]
    assert wrong == [held.name for held in first if ".experts." in held.name]


def test_the_workspace_leaves_nothing_behind(checkpoint: Path) -> None:
    """Visiting in the other order with the workspace poisoned in between gives the same bits."""
    one, other = loaded(checkpoint), loaded(checkpoint, order="reverse", poison=True)
    assert set(one.weights) == set(other.weights)
    for name, held in one.weights.items():
        assert torch.equal(held.decode(torch.float32), other.weights[name].decode(torch.float32)), name


def test_leftovers_of_the_workspace_show_when_it_is_poisoned(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that forgets its last row is seen as NaN with poison."""
    decode = formats.decode_mxfp4

    def forgetful(packed: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        decode(packed[:-1], scale[:-1], out[:-1])
        return out

    monkeypatch.setattr(formats, "decode_mxfp4", forgetful)
    held = loaded(checkpoint, poison=True).weights["model.layers.1.mlp.experts.0.up_proj.weight"]
    assert held.decode(torch.float32)[-1].isnan().all()


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(ep=2), Layout(pp=2)])
def test_loading_costs_what_was_planned(checkpoint: Path, layout: Layout) -> None:
    """The most bytes ever held while loading are within the plan, and what stays is exactly the plan's."""
    config = read_config(checkpoint)
    from accel_impl.parallel import Fleet

    fleet = Fleet(layout)
    for rank in range(layout.world_size):
        facts = loader.load(Shards(checkpoint), config, fleet.place(rank), torch.bfloat16).facts
        assert facts["resident_bytes"] == facts["resident_planned_bytes"]
        assert 0.8 * facts["planned_bytes"] < facts["peak_bytes"] <= facts["planned_bytes"]


def test_experts_stay_in_a_byte_per_value(opened: Any) -> None:
    """Resident experts are FP8 with one scale byte per 128 columns of a row."""
    held = opened("bfloat16").model.weights["model.layers.1.mlp.experts.0.gate_proj.weight"]
    assert held.q.dtype == torch.float8_e4m3fn
    assert held.nbytes == 96 * 160 + 96 * 2


def test_a_tensor_that_is_not_there_is_named(checkpoint: Path, tmp_path: Path) -> None:
    """A missing scale is an error that names it; nothing is left unfilled."""
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    index = json.loads((copy / INDEX).read_text())
    gone = "model.layers.3.self_attn.o_proj.weight_scale_inv"
    del index["weight_map"][gone]
    (copy / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=gone):
        loaded(copy)


def test_a_stranger_in_the_checkpoint_is_reported(checkpoint: Path, tmp_path: Path) -> None:
    """A tensor that the port does not know is listed as unused."""
    from safetensors.torch import save_file

    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    save_file({"model.extra.weight": torch.ones(2)}, copy / "extra.safetensors")
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = "extra.safetensors"
    (copy / INDEX).write_text(json.dumps(index))
    assert loaded(copy).facts["unused"] == ["model.extra.weight"]


def test_an_unknown_option_names_the_nearest(checkpoint: Path) -> None:
    """A misspelt option is a usage error with a suggestion, for its name and for its value."""
    with pytest.raises(SpecError, match="did you mean 'ops'"):
        accel_impl.adapter(checkpoint, setup_of("bfloat16", opps="custom"))
    with pytest.raises(SpecError, match="did you mean 'custom'"):
        accel_impl.adapter(checkpoint, setup_of("bfloat16", ops="costum"))
    with pytest.raises(SpecError, match="float16"):
        accel_impl.adapter(checkpoint, setup_of("float16")).load(checkpoint, setup_of("float16"))
