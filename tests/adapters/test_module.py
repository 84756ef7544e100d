"""Any nn.Module as a port: what is found, what a replay isolates, what a fault in one place shows."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from harness.adapter import capabilities, silent
from harness.adapters.module import ModuleAdapter
from harness.adapters.structure import discover
from harness.cases import text_case
from harness.errors import PortError
from harness.recorder import Pins, TraceRecorder
from harness.taps import level_of
from harness.types import Case, Setup
from tests.adapters.foreign import Decoder, decoder, folder


def port(path: Path, module: torch.nn.Module) -> ModuleAdapter:
    setup = Setup(side="accel", role="accel", adapter="port.py:make", dtype="float32")
    adapter = ModuleAdapter(module, folder(path), setup)
    adapter.load(path, setup)
    return adapter


def run(adapter: ModuleAdapter, pins: Pins | None = None) -> TraceRecorder:
    recorder = TraceRecorder(pins=pins)
    inputs = adapter.prepare(text_case(adapter.info, 17), recorder)
    recorder.span(0, 17)
    adapter.forward(inputs, recorder)
    return recorder


def wrong(adapter: ModuleAdapter, expected: TraceRecorder, level: int) -> list[str]:
    """Return the taps that differ by more than 1e-4 in a replay of the expected values."""
    values = expected.tensors()
    pins = Pins(tensors=values, taps=expected.taps, level=level, dtype=torch.float32)
    found = run(adapter, pins).tensors()
    hidden = [t for t in values if expected.taps[t].kind == "hidden" and level_of(t) <= level]
    return [t for t in hidden if (found[t] - values[t]).norm() > 1e-4 * values[t].norm()]


def test_foreign_names(tmp_path: Path) -> None:
    """A decoder with names of its own is named by how it is built; what is not recognised keeps its words."""
    names = discover(decoder()).names
    assert names["table"] == "embed"
    assert names["stack.1"] == "layers.1"
    assert names["stack.1.mix"] == "layers.1.attn"
    assert names["stack.1.mix.qkv"] == "layers.1.attn.qkv"
    assert (names["stack.1.a"], names["stack.1.b"]) == ("layers.1.input_norm", "layers.1.post_attn_norm")
    assert names["stack.1.crowd"] == "layers.1.moe"
    assert names["stack.1.crowd.choose"] == "layers.1.moe.router"
    assert names["last"] == "norm"
    assert names["head"] == "lm_head"
    assert not [path for path in names if "members." in path]


def test_plain_module(tmp_path: Path) -> None:
    """A module that takes token ids only has whole prefills and says why it has no more; it generates all the same."""
    adapter = port(tmp_path, decoder())
    assert "phases" not in capabilities(adapter)
    assert "cache" in adapter.scope.off["phases"]
    taps = run(adapter).taps
    assert {"embed", "layers.2.attn.core", "layers.2.moe.topk", "layers.2.moe.topk.scores", "logits"} <= set(taps)
    assert taps["layers.2.moe.topk"].kind == "routing"
    inputs = adapter.prepare(Case(id="c", token_ids=(5, 6, 7)), silent)
    ids = adapter.generate(inputs, 3, silent)
    assert len(ids) == 3
    again = adapter.prepare(Case(id="c", token_ids=(5, 6, 7, *ids[:2])), silent)
    assert int(adapter.forward(again, silent)[0, -1].argmax()) == ids[2]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_replay_isolates_a_fault(tmp_path: Path, in_place: bool) -> None:
    """One matrix scaled by 1 % in one layer differs at that leaf only, also where the residual is added in place."""
    expected = run(port(tmp_path, decoder()))
    benign, faulty = decoder(in_place=in_place), decoder(in_place=in_place)
    faulty.stack[1].mix.out_proj.weight.data.mul_(1.01)
    assert wrong(port(tmp_path, benign), expected, 3) == []
    adapter = port(tmp_path, faulty)
    assert wrong(adapter, expected, 3) == ["layers.1.attn.out_proj"]
    assert wrong(adapter, expected, 2) == ["layers.1.attn"]
    assert wrong(adapter, expected, 1) == ["layers.1"]


def test_a_replay_leaves_the_source_alone(tmp_path: Path) -> None:
    """A port that writes into what it is given does not change the values that are replayed."""
    expected = run(port(tmp_path, decoder()))
    values = expected.tensors()
    before = {t: v.clone() for t, v in values.items()}
    run(
        port(tmp_path, decoder(in_place=True)),
        Pins(tensors=values, taps=expected.taps, level=3, dtype=torch.float32, decisions=True),
    )
    assert all(torch.equal(values[t], before[t]) for t in values)


def test_pinned_decisions_reach_the_experts(tmp_path: Path) -> None:
    """With decisions pinned the port's experts follow the reference's routes, weighted by the port's own scores."""
    expected = run(port(tmp_path, decoder()))
    values = expected.tensors()
    other = decoder()
    other.stack[1].crowd.choose.weight.data.neg_()
    adapter = port(tmp_path, other)
    free = run(adapter).tensors()
    assert not torch.equal(free["layers.1.moe.topk"].sort(-1).values, values["layers.1.moe.topk"].sort(-1).values)
    adapter = port(tmp_path, other)
    pins = Pins(tensors=values, taps=expected.taps, level=1, dtype=torch.float32, decisions=True)
    recorder = run(adapter, pins)
    assert "layers.1.moe.topk" in recorder.pinned
    unpinned = run(adapter, Pins(tensors=values, taps=expected.taps, level=1, dtype=torch.float32)).tensors()
    assert not torch.equal(unpinned["layers.1"], recorder.tensors()["layers.1"])


def test_logits_of_every_position_are_asked_for(tmp_path: Path) -> None:
    """A module that returns the last position's logits only is refused in words."""

    class Last(Decoder):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return super().forward(input_ids)[:, -1:]

    adapter = port(tmp_path, Last())
    inputs = adapter.prepare(Case(id="c", token_ids=(1, 2, 3)), silent)
    with pytest.raises(PortError, match="logits of 3 tokens"):
        adapter.forward(inputs, silent)


class Offering(Decoder):
    """A decoder that says which operators are its own, and how its device computes."""

    arithmetic = MappingProxyType({"accumulate": "bfloat16"})

    def operators(self):
        return {"softmax": "triton"}


def test_a_module_hands_over_its_own_operators(tmp_path: Path) -> None:
    """What a module's class says of its operators is the adapter's own word; one that says nothing has none."""
    plain, offering = decoder(), decoder()
    offering.__class__ = Offering
    adapter = port(tmp_path, offering)
    assert adapter.operators() == {"softmax": "triton"}
    assert adapter.arithmetic == {"accumulate": "bfloat16"}
    assert not hasattr(port(tmp_path, plain), "operators")
