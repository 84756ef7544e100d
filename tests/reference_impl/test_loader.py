"""The loader gives exactly what was encoded, and refuses a checkpoint that is not what it says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.checkpoint import open_checkpoint
from harness.checkpoint.cut import plan_cut, write_cut
from harness.errors import CheckpointError
from reference_impl.config import read_config
from reference_impl.encoders import E2M1_MAGNITUDES, E4M3_MAGNITUDES
from reference_impl.loader import INDEX, ONE_FILE, load_weights
from reference_impl.recipe import make_tensors


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def expected_values(tensors: dict, name: str) -> np.ndarray:
    """Decode a weight from the encoder's tables, element by element on a few rows."""
    base = name.removesuffix(".weight")
    if f"{base}.weight_packed" in tensors:
        packed, scale = tensors[f"{base}.weight_packed"][1], tensors[f"{base}.weight_scale"][1]
        codes = np.empty((packed.shape[0], packed.shape[1] * 2), dtype=np.int64)
        codes[:, 0::2], codes[:, 1::2] = packed % 16, packed // 16
        signs = np.where(codes >= 8, -1.0, 1.0)
        return signs * E2M1_MAGNITUDES[codes % 8] * 2.0 ** (np.repeat(scale.astype(int), 32, axis=1) - 127)
    dtype, array = tensors[name]
    if dtype == "F8_E4M3":
        scale = tensors[f"{base}.weight_scale_inv"][1]
        rows, columns = np.indices(array.shape)
        signs = np.where(array >= 128, -1.0, 1.0)
        exact = signs * E4M3_MAGNITUDES[array % 128]
        return exact.astype(np.float32) * scale[rows // 128, columns // 128]
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else array


def test_every_weight_is_exactly_what_was_encoded(checkpoint):
    """All decoded parameters equal the encoder's values bit for bit."""
    tensors, (loaded, unused) = make_tensors(), load_weights(checkpoint, read_config(checkpoint))
    assert unused == []
    sides = ("weight_scale_inv", "weight_scale")
    assert set(loaded) == {n.replace("weight_packed", "weight") for n in tensors if not n.endswith(sides)}
    for name, weight in loaded.items():
        expected = expected_values(tensors, name)
        assert torch.equal(weight, torch.from_numpy(np.ascontiguousarray(expected)).float()), name


def edit_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def rename(folder: Path, old: str, new: str) -> None:
    """Rename a tensor in its shard and in the index; the names are of equal length."""
    shard = folder / json.loads((folder / INDEX).read_text())["weight_map"][old]
    assert len(old) == len(new)
    shard.write_bytes(shard.read_bytes().replace(old.encode(), new.encode()))
    edit_index(folder, lambda m: m.__setitem__(new, m.pop(old)))


def test_a_renamed_tensor_is_missing(copy):
    """A parameter without a tensor is an error that names it, not a silent initial value."""
    rename(copy, "model.layers.3.mlp.gate.weight", "model.layers.3.mlp.gatf.weight")
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.mlp\.gate\.weight"):
        load_weights(copy, read_config(copy))


def test_a_missing_scale_is_not_one(copy):
    """An FP8 weight without its multiplier is refused."""
    at = "model.layers.1.linear_attn.o_proj.weight_scale_in"
    rename(copy, f"{at}v", f"{at}w")
    with pytest.raises(CheckpointError, match="weight_scale_inv"):
        load_weights(copy, read_config(copy))


def test_a_tensor_beyond_the_model_is_refused(copy):
    """A tensor that no parameter uses is an error."""
    from safetensors.torch import save_file

    save_file({"model.layers.9.extra.weight": torch.ones(2)}, copy / "extra.safetensors")
    edit_index(copy, lambda m: m.__setitem__("model.layers.9.extra.weight", "extra.safetensors"))
    with pytest.raises(CheckpointError, match=r"layers\.9\.extra"):
        load_weights(copy, read_config(copy))


@pytest.mark.parametrize("damage", ["truncated", "gone", "elsewhere", "outside"])
def test_a_damaged_container_is_refused(copy, damage):
    """A short or missing shard, an index that lies, and a path out of the folder each end in a CheckpointError."""
    shard, name = copy / "model-00003-of-00034.safetensors", "model.norm.weight"
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-16])
    elif damage == "gone":
        shard.unlink()
    elif damage == "elsewhere":
        edit_index(copy, lambda m: m.__setitem__(name, next(f for f in m.values() if f != m[name])))
    else:
        edit_index(copy, lambda m: m.__setitem__(name, "../outside.safetensors"))
    with pytest.raises(CheckpointError):
        load_weights(copy, read_config(copy))


def test_another_model_is_refused(copy):
    """A configuration of another type, or an incomplete one, is refused before any shard is read."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(CheckpointError, match="llama"):
        read_config(copy)
    del config["index_topk"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="index_topk"):
        read_config(copy)


def test_some_layers_of_the_model_are_a_model(checkpoint, tmp_path):
    """A cut in one file without index is read; the mix of a layer that has become the first is told as unused."""
    write_cut(plan_cut(open_checkpoint(checkpoint), (2, 3)), tmp_path / "cut")
    config = read_config(tmp_path / "cut")
    assert [config.is_sparse(n) for n in range(2)] == [False, True]
    weights, unused = load_weights(tmp_path / "cut", config)
    assert unused == ["model.layers.0.attn_res.query"]
    whole, _ = load_weights(checkpoint, read_config(checkpoint))
    for here, there in ((0, 2), (1, 3), (2, 8)):
        names = [n for n in weights if n.startswith(f"model.layers.{here}.")]
        assert names
        for name in names:
            old = name.replace(f"layers.{here}.", f"layers.{there}.", 1)
            assert torch.equal(weights[name], whole[old]), name
    (tmp_path / "cut" / ONE_FILE).write_bytes(b"short")
    with pytest.raises(CheckpointError, match="whole safetensors file"):
        load_weights(tmp_path / "cut", config)
