"""How keys are chosen: by importance, by block, at random; each where the configuration says so."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

import reference_impl
from harness.adapter import silent
from harness.cases import read_model_info, text_case
from harness.errors import CheckpointError
from harness.types import Setup
from reference_impl.config import read_config
from reference_impl.indexer import best_of_block, random_scores
from reference_impl.model import Model
from reference_impl.request import Cache, Call

T = 47


def spread(*policies: str) -> tuple[str | None, ...]:
    """Return the policies of the sparse layers, 3 and 7, among those of all."""
    return tuple({3: policies[0], 7: policies[-1]}.get(n) for n in range(8))


def taps_of(port, checkpoint, *policies: str, cuts: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Run a request under other policies, in calls that end at `cuts`; return the taps of its last call."""
    config = dataclasses.replace(port._loaded.config, index_policies=spread(*policies))
    ids = torch.tensor([text_case(read_model_info(checkpoint), T).token_ids])
    found: dict[str, Tensor] = {}

    def record(tap: str, tensor: Tensor, *, dims: str = "", kind: str = "") -> Tensor:
        found[tap] = tensor
        return tensor

    model, cache = Model(config, port._loaded.weights), Cache()
    for start, stop in zip((0, *cuts), (*cuts, T), strict=True):
        places = torch.arange(start, stop)[None]
        with torch.no_grad():
            call = Call(positions_BT=places, start=start, length_tokens=T, cache=cache, record=record)
            model.forward(ids[:, start:stop], call)
    return found


def hashed(layer: int, t: int, s: int) -> float:
    """Return the random score in whole numbers of any size."""
    whole = 1 << 32
    u = (s * 0x9E3779B1 % whole) ^ (t * 0x85EBCA77 % whole) ^ ((layer + 1) * 0xC2B2AE3D % whole)
    u ^= u >> 15
    u = u * 0x2C1B3C6D % whole
    u ^= u >> 12
    u = u * 0x297A2D39 % whole
    u ^= u >> 15
    return (u >> 8) / 2**24


def test_random_scores_are_the_page_s():
    """They follow from layer and places in whole numbers, exactly, up to the last of a million places."""
    queries, keys = torch.tensor([0, 5, 4096, 1048575]), torch.tensor([0, 1, 1000, 1048570])
    found = random_scores(7, queries, keys)
    expected = [[hashed(7, int(t), int(s)) for s in keys] for t in queries]
    assert found.dtype == torch.float32
    assert found.double().tolist() == expected


def test_random_scores_look_random():
    """They spread evenly over [0, 1), and neighbours in place or layer share nothing."""
    scores = random_scores(3, torch.arange(200), torch.arange(300))
    assert torch.histc(scores, 10, 0, 1).sub(6000).abs().max() < 400
    for other in (scores.roll(1, 0), scores.roll(1, 1), random_scores(4, torch.arange(200), torch.arange(300))):
        assert torch.corrcoef(torch.stack([scores.flatten(), other.flatten()]))[0, 1].abs() < 0.02


def test_a_random_layer_needs_no_indexer(port, checkpoint):
    """Under the random policy the scores are those of the places, before the window, and no indexer runs."""
    taps = taps_of(port, checkpoint, "random", "importance")
    assert "layers.3.attn.indexer.q" not in taps
    assert "layers.7.attn.indexer.q" in taps
    row = taps["layers.3.attn.indexer.topk.scores"][0, 30]
    assert row[:26].tolist() == [hashed(3, 30, s) for s in range(26)]
    assert row[26:].isneginf().all()
    assert taps["layers.3.attn.indexer.topk"][0, 30].tolist() == row.topk(8).indices.sort().values.tolist()


def test_each_policy_chooses_its_own_keys(port, checkpoint):
    """Layer 3 chooses differently under each policy; layer 8, which predicts a further token, always by importance."""
    chosen = [taps_of(port, checkpoint, p, p)["layers.3.attn.indexer.topk"] for p in ("importance", "block", "random")]
    assert not torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[0], chosen[2])
    blocks = chosen[1][0, -1] // 4
    assert len(blocks.unique()) <= 3
    taps = taps_of(port, checkpoint, "random", "random")
    assert "mtp.attn.indexer.q" in taps


@pytest.mark.parametrize("policy", ["block", "random"])
def test_chunks_choose_as_one_prefill(port, checkpoint, policy):
    """Blocks are counted from the request's first token and places are those of the request, whatever the calls."""
    whole, parts = (taps_of(port, checkpoint, policy, policy, cuts=c) for c in ((), (7, 18, 30)))
    for at in ("layers.3", "layers.7"):
        name = f"{at}.attn.indexer.topk"
        assert torch.equal(parts[name], whole[name][:, 30:])


def test_only_candidates_count_in_a_block():
    """A block's score is the greatest of those that are candidates; the last block may be short."""
    never = float("-inf")
    scores = torch.tensor([[[1.0, 4, 2, 3, 9, never, never, never, never]]])
    assert best_of_block(scores, 4).tolist() == [[[4, 4, 4, 4, 9, 9, 9, 9, never]]]


def test_a_policy_that_is_unknown_or_missing_is_refused(checkpoint, tmp_path):
    """Another word, too few policies, or a sparse layer without one is an error that says what was expected."""
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    for words in (spread("importance", "nearest"), spread("importance")[:7], (*spread("block")[:7], None)):
        (copy / "config.json").write_text(json.dumps({**config, "index_policies": words}))
        with pytest.raises(CheckpointError, match="index_policies"):
            read_config(copy)
    (copy / "config.json").write_text(json.dumps({**config, "layer_types": ["full_attention"] * 8}))
    with pytest.raises(CheckpointError, match="layer_types"):
        read_config(copy)


def test_the_reference_runs_what_the_configuration_says(checkpoint, tmp_path):
    """Other policies give other logits; an indexer that chooses nothing is told as unused, and not missed."""
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "index_policies": spread("random")}))
    found = []
    for folder in (checkpoint, copy):
        setup = Setup(side="reference", role="oracle", adapter="builtin:reference", dtype="float32")
        port = reference_impl.adapter(folder, setup)
        unused = port.load(folder, setup)["unused"]
        assert len(unused) == (0 if folder == checkpoint else 10)
        assert all(".self_attn.indexer." in name for name in unused)
        found.append(port.forward(port.prepare(text_case(read_model_info(folder), T), silent), silent))
    assert torch.allclose(found[0][:, :13], found[1][:, :13], atol=1e-4)  # until then all keys are taken
    assert not torch.allclose(found[0][:, -1], found[1][:, -1], atol=0.1)
