"""What statistics make look wrong: damaged matrices among thirty layers of right ones, and right ones alone."""

from __future__ import annotations

import pytest
import torch
from checkpoint.checkpoint_files import write

from harness.checkpoint import open_checkpoint
from harness.checkpoint.scan import scan
from harness.checkpoint.scan.suspicion import FALSE_ALARMS, KINDS, suspicions

LAYERS, ROWS, COLUMNS = 24, 640, 512
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}


DRAWN = torch.randn(120, COLUMNS, generator=torch.Generator().manual_seed(2))


def matrices(seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights as training leaves them: smooth sizes of rows and columns, columns alike in all layers."""
    make = torch.Generator().manual_seed(seed)
    columns = torch.randn(COLUMNS, generator=make).mul(0.4).exp()
    found = {}
    for layer in range(LAYERS):
        for name in ("up", "down"):
            rows = (torch.randn(ROWS // 32, generator=make).cumsum(0) * 0.15).exp().repeat_interleave(32)[:, None]
            weight = torch.randn(ROWS, COLUMNS, generator=make) * columns * rows * 0.02
            drift = torch.linspace(-0.5, 0.5, COLUMNS).mul(torch.randn(ROWS, 1, generator=make) * 1.5).exp()
            found[f"layers.{layer}.{name}.weight"] = weight * drift / rows.mean() * 1.01**layer
    return found


def quantised(weights: dict[str, torch.Tensor], damage=None) -> dict[str, torch.Tensor]:
    """The same in FP8 with a scale for each 64x64, the scales of layer 7's up damaged."""
    stored = {}
    for name, weight in weights.items():
        blocks = weight.reshape(ROWS // 64, 64, COLUMNS // 64, 64)
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).reshape(ROWS, COLUMNS).to(torch.float8_e4m3fn)
        if damage is not None and name == "layers.7.up.weight":
            scale = damage(scale).contiguous()
        stored |= {name: codes, f"{name}_scale_inv": scale}
    return stored


def found(folder, *shards, config=None):
    checkpoint = open_checkpoint(write(folder, *shards, config=config))
    return suspicions([s for shard in scan(checkpoint) for s in shard.statistics])


def half(weights: dict[str, torch.Tensor], first: bool) -> dict[str, torch.Tensor]:
    inside = [name for name in weights if (8 <= int(name.split(".")[1]) < 16) != first]
    return {name: weights[name] for name in inside}


@pytest.mark.parametrize("seed", range(3))
def test_right_checkpoints_are_above_suspicion(seed, tmp_path):
    """Neither plain weights in two files nor their FP8 form show anything."""
    weights = matrices(seed)
    assert found(tmp_path / "plain", half(weights, True), half(weights, False)) == []
    assert found(tmp_path / "fp8", quantised(weights), config=FP8) == []


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda s: s.reshape(s.shape[1], s.shape[0]).t(), "size"),
        (lambda s: s.roll(1, 0), "seam"),
        (lambda s: s.flip(1), "seam"),
        (lambda s: 1 / s, "magnitude"),
        (lambda s: s * 2, "size"),
    ],
    ids=["reread", "shifted", "mirrored", "reciprocal", "doubled"],
)
def test_scales_that_are_not_a_matrix_own(damage, kind, tmp_path):
    """Scales in another order make values jump at block edges; reciprocal or doubled ones change their size."""
    seen = found(tmp_path, quantised(matrices(), damage), config=FP8)
    assert {s.name for s in seen} == {"layers.7.up.weight"}
    assert kind in {s.kind for s in seen}


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda w: w + w.std(), "off_centre"),
        (lambda w: w * 2, "size"),
        (lambda w: torch.cat([w[:200], DRAWN * w.std(), w[320:]]), "rows"),
        (lambda w: torch.cat([w[:200], torch.zeros(120, COLUMNS), w[320:]]), "rows"),
    ],
    ids=["off centre", "doubled", "random rows", "unwritten rows"],
)
def test_a_matrix_unlike_its_siblings(damage, kind, tmp_path):
    """One matrix off its centre, of another size, or with rows that are not its own is named with what is odd there."""
    weights = matrices()
    weights["layers.7.up.weight"] = damage(weights["layers.7.up.weight"])
    seen = found(tmp_path, weights)
    assert {s.name for s in seen} == {"layers.7.up.weight"}
    assert kind in {s.kind for s in seen}


def test_a_file_of_another_training_step(tmp_path):
    """Eight layers in a file of their own, all 10 % smaller than their neighbours, are one suspicion of that file."""
    weights = matrices()
    later = {name: weight * 0.9 for name, weight in half(weights, False).items()}
    (seen,) = found(tmp_path, half(weights, True), later)
    assert (seen.kind, seen.file) == ("shard", "model-00002-of-00002.safetensors")


def test_the_file_beside_a_wrong_one_is_not_accused(tmp_path):
    """Of three files, the middle one 10 % smaller: its neighbours are held to each other, not to it."""
    weights = matrices()
    parts = [{n: w for n, w in weights.items() if i * 8 <= int(n.split(".")[1]) < i * 8 + 8} for i in range(3)]
    parts[1] = {name: weight * 0.9 for name, weight in parts[1].items()}
    assert [(s.kind, s.file) for s in found(tmp_path, *parts)] == [("shard", "model-00002-of-00003.safetensors")]


def test_numbers_inside_names_are_names(tmp_path):
    """`w1` and `w2` of a layer are different weights: of another size in every layer, they are no suspicion."""
    make = torch.Generator().manual_seed(3)
    sizes = {"w1": 1.0, "w2": 4.0, "w3": 1.0}
    weights = {
        f"layers.{layer}.experts.{expert}.{name}.weight": torch.randn(64, 128, generator=make) * size * 0.02
        for layer in range(3)
        for expert in range(2)
        for name, size in sizes.items()
    }
    assert found(tmp_path, weights) == []


def test_blocks_that_all_siblings_drew_apart_are_no_suspicion(tmp_path):
    """Made-up weights whose blocks of 32 have sizes of their own in every matrix are as they were made."""
    make = torch.Generator().manual_seed(4)
    stored = {}
    for layer in range(8):
        scale = torch.randint(116, 122, (128, 8), generator=make, dtype=torch.uint8)
        packed = torch.randint(0, 256, (128, 128), generator=make, dtype=torch.uint8)
        stored |= {f"layers.{layer}.up.weight_packed": packed, f"layers.{layer}.up.weight_scale": scale}
    assert found(tmp_path, stored) == []


def test_each_kind_of_suspicion_has_a_rate():
    """What an honest checkpoint shows of it is said for every kind."""
    assert set(FALSE_ALARMS) == set(KINDS)
    assert all("95 %" in words for words in FALSE_ALARMS.values())
