"""The built-in checkpoint: the same bytes everywhere, the public form, values that hide nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.errors import CheckpointError
from reference_impl import maker
from reference_impl.drawing import OUTLIERS
from reference_impl.recipe import CONFIG, LARGE_SINK, make_tensors

ROOT = Path(__file__).parents[2]
DIGEST = """
from hashlib import blake2b
from reference_impl.maker import make_files
print(blake2b(b"".join(make_files().values())).hexdigest())
"""


def index(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "model.safetensors.index.json").read_text())


def test_two_processes_make_the_same_bytes():
    """The files do not depend on the process that makes them (hash seed, threads)."""
    made = [
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert made[0] == made[1]


def test_shards_are_small_and_the_index_is_true(checkpoint):
    """Every shard holds exactly what the index says, within the size, and total_size counts the tensors' bytes."""
    from safetensors import safe_open

    told, found, total = index(checkpoint), {}, 0
    for shard in sorted(checkpoint.glob("*.safetensors")):
        assert shard.stat().st_size <= maker.SHARD_BYTES
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (the reader is no mapping)
                found[name] = shard.name
                total += file.get_tensor(name).nbytes
    assert found == told["weight_map"]
    assert total == told["metadata"]["total_size"]


def test_layers_and_scales_are_spread_over_shards(checkpoint):
    """A layer lies in several shards, and a weight and its scale are together in some cases and apart in others."""
    weight_map = index(checkpoint)["weight_map"]
    assert len({f for n, f in weight_map.items() if n.startswith("model.layers.2.")}) > 3
    assert len(set(weight_map.values())) == 34
    scales = {"weight_scale_inv": "weight", "weight_scale": "weight_packed"}
    apart = {
        weight_map[name] != weight_map[f"{base}.{scales[last]}"]
        for name in weight_map
        for base, _, last in [name.rpartition(".")]
        if last in scales
    }
    assert apart == {True, False}


def test_values_are_not_neutral():
    """Scales, norms, sinks and the router's bias are all away from the values that hide a fault."""
    tensors = make_tensors()
    fp8_scales = np.concatenate([a.ravel() for n, (_, a) in tensors.items() if n.endswith("_scale_inv")])
    assert (np.frexp(fp8_scales)[0] != 0.5).all()
    for name, (_, array) in tensors.items():
        if name.endswith("weight_scale"):
            assert len(set(array.ravel().tolist())) >= 3, name
        if name.endswith("layernorm.weight"):
            values = (array.astype(np.uint32) << 16).view(np.float32)
            assert all(np.abs(values - o).min() < 0.02 for o in OUTLIERS), name
        if name.endswith("sinks"):
            assert array.min() >= -1
            assert array.max() == LARGE_SINK
            assert np.sort(array)[-2] <= 3
        if name.endswith("e_score_correction_bias"):
            assert 0.2 < array.std() < 0.3
            assert 6.9 < array.mean() < 7.1
        if name.endswith("A_log"):
            assert array.min() < -1.5
            assert array.max() > 0.5
        if name.endswith("dt_bias"):
            assert array.min() < -4
            assert array.max() > 0
        if name.endswith("_res.query"):
            assert 0.5 < array.std() < 2


def test_ensure_reuses_a_whole_folder_and_repairs_a_broken_one(tmp_path, monkeypatch):
    """A second call writes nothing; a truncated shard, a missing file or a stray one is put right."""
    files = maker.make_files()
    monkeypatch.setattr(maker, "make_files", lambda: dict(files))
    folder = maker.ensure(tmp_path / "builtin")
    shard = folder / "model-00001-of-00034.safetensors"
    whole, written = shard.read_bytes(), shard.stat().st_mtime_ns
    assert maker.ensure(folder) == folder
    assert shard.stat().st_mtime_ns == written
    shard.write_bytes(whole[:-5])
    maker.ensure(folder)
    assert shard.read_bytes() == whole
    (folder / "config.json").unlink()
    (folder / "stray.safetensors").write_bytes(b"x")
    maker.ensure(folder)
    assert json.loads((folder / "config.json").read_text()) == json.loads(json.dumps(CONFIG))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["builtin"]
    assert not (folder / "stray.safetensors").exists()


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    """A file in the cache's place gives a CheckpointError that says what to do."""
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(CheckpointError, match="XDG_CACHE_HOME"):
        maker.ensure(tmp_path / "cache" / "builtin")
