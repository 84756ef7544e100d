"""The ways in which faults get into a port, and the common checks that stand beside the gates."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from harness.adapter import Inputs, silent
from harness.faults.caches import _rounded, _writes
from harness.faults.catalogue import NoPlace
from harness.faults.naive import CHECKS, naive
from harness.faults.parts import Parts
from harness.faults.tapped import Tapped
from harness.faults.ways import held, on_topk, other_activation
from harness.types import Run, Setup, Tap, Trace


class Port:
    """A port that hands one value to its recorder and goes on with what comes back."""

    def prepare(self, case, record):
        return Inputs(token_ids=torch.zeros(1, 3, dtype=torch.int64))

    def forward(self, inputs, record):
        return record("layers.0.attn", torch.ones(1, 3, 2)) + 1

    def weights(self):
        return iter(())


def seen(port: Port) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a recorder hears, and what the port gives."""
    heard: list[torch.Tensor] = []

    def record(tap, tensor, *, dims="", kind=""):
        heard.append(tensor)
        return tensor

    result = port.forward(port.prepare(None, record), record)
    return heard[0], result


@pytest.mark.parametrize(("way", "heard", "result"), [("made", 2.0, 3.0), ("handed", 1.0, 3.0), ("", 1.0, 2.0)])
def test_a_value_is_changed_before_or_after_it_was_recorded(way, heard, result):
    """What a unit computes wrongly is recorded wrong; what goes astray later is recorded right."""
    port = Port()
    places = Tapped(port, {"layers.0.attn": Tap(name="layers.0.attn")})
    if way:
        getattr(places, way)(places.find("attn$"), lambda y, _: y * 2)
    recorded, given = seen(port)
    assert bool((recorded == heard).all())
    assert bool((given == result).all())


def test_a_port_is_as_wrong_without_a_recorder():
    """A changed value reaches the port also where nobody listens, and a place that is not shown is none."""
    port = Port()
    places = Tapped(port, {"layers.0.attn": Tap(name="layers.0.attn")})
    places.made("layers.0.attn", lambda y, _: y * 2)
    assert bool((port.forward(port.prepare(None, silent), silent) == 3).all())
    with pytest.raises(NoPlace):
        places.find("indexer")


class Chooser(nn.Module):
    """Chooses two of what it is given."""

    def forward(self, x):
        """Return what was chosen."""
        return torch.topk(x, 2).indices


def test_a_faulty_kernel_is_seen_by_who_watches_torch_calls():
    """A changed top-k lies below function modes: a watcher sees the wrong result, as from a faulty device."""
    watched: list[torch.Tensor] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.topk:
                watched.append(result.indices)
            return result

    module = Chooser()
    on_topk(module, lambda x, k: (torch.topk(x, k).values, torch.zeros(1, 2, dtype=torch.int64)), lambda x: True)
    with Watch():
        chosen = module(torch.tensor([[1.0, 3.0, 2.0]]))
    assert chosen.tolist() == watched[0].tolist() == [[0, 0]]
    assert Chooser()(torch.tensor([[1.0, 3.0, 2.0]])).tolist() == [[1, 2]]


def test_a_parameter_is_another_one_only_for_the_time_being():
    """Who looks at weights outside of the call sees the checkpoint's."""
    weight = nn.Parameter(torch.ones(3))
    with held(weight, 0.0):
        assert bool((weight == 0).all())
    assert bool((weight == 1).all())


def trace(value: torch.Tensor) -> Trace:
    setup = Setup(side="accel", role="accel", adapter="x")
    taps = {"layers.0": Tap(name="layers.0")}
    return Trace(
        setup=setup, run=Run(id="r", stage="text", kind="forward"), taps=taps, tensors={"layers.0": value}, facts={}
    )


@pytest.mark.parametrize(
    ("change", "refusing"),
    [
        (lambda x: x, set()),
        (lambda x: x * 1.005, {"relative 1e-3"}),
        (lambda x: x * 1.5, {"assert_close", "relative 1e-3"}),
        (lambda x: -x, set(CHECKS)),
        (lambda x: x * float("nan"), set(CHECKS)),
    ],
)
def test_common_checks_say_what_they_always_say(change, refusing):
    """Cosine and correlation are blind to a scale; a relative difference sees rounding; NaN passes nowhere."""
    value = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
    found = naive(trace(change(value)), trace(value), "bfloat16")
    assert {check for check, wrong in found.items() if wrong} == refusing


def test_a_module_without_layers_has_no_parts():
    """What is no decoder is said to be none."""
    with pytest.raises(NoPlace):
        Parts(nn.Linear(2, 2))


class Attention(nn.Module):
    """Writes its input to a cache and returns what the cache holds."""

    def forward(self, hidden_states, cache=None):
        """Return keys and values as they are read."""
        return cache.update(hidden_states, hidden_states, 0)


class Cache:
    """Gives back what it was given."""

    def update(self, key, value, layer):
        return key, value


def test_a_cache_changes_only_what_is_written():
    """Rounding lies between an attention and its cache; whoever calls the attention keeps the cache as it was."""
    attention, cache = Attention(), Cache()
    _writes(attention, lambda value, name: _rounded(value, 1.0) if name == "keys" else value)
    x = torch.tensor([1.0, 1.01, 500.0])
    key, value = attention(hidden_states=x, cache=cache)
    assert key.tolist() == [1.0, 1.0, 448.0]
    assert value is x


@pytest.mark.parametrize(
    ("activation", "name"), [(nn.SiLU(), "GELU"), (nn.GELU(), "SiLU"), (torch.nn.functional.silu, "GELU")]
)
def test_another_activation_is_another_one(activation, name):
    """An activation is exchanged for one that gives other values, and what is none has no place."""
    assert type(other_activation(activation)).__name__ == name
    with pytest.raises(NoPlace):
        other_activation(None)


def test_an_activation_of_two_halves_stays_one():
    """A gated activation is called as it was, with gate and up."""

    class Gated(nn.Module):
        def forward(self, gate, up):
            return nn.functional.silu(gate) * up

    gate, up = torch.ones(2), torch.full((2,), 3.0)
    assert torch.equal(other_activation(Gated())(gate, up), nn.functional.gelu(gate) * up)
