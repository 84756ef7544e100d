"""Statistics of tensors, and the recorder that keeps nothing else."""

import json
import math

import pytest
import torch

from harness.recorder import TraceRecorder
from harness.statistics import SKETCH, as_facts, statistics_of


def facts(tensor):
    return {name: column[0] for name, column in as_facts({"tap": [statistics_of(tensor)]}).items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64])
def test_numbers_are_those_of_the_tensor(dtype):
    """Mean, rms, least and greatest agree with what float64 says of the same values."""
    values = (torch.randn(3, 40, 17, generator=torch.Generator().manual_seed(0)) * 9 + 2).to(dtype)
    found, wide = facts(values), values.double()
    assert found["n"] == values.numel()
    assert found["mean"] == pytest.approx(float(wide.mean()), rel=1e-5)
    assert found["rms"] == pytest.approx(float(wide.square().mean().sqrt()), rel=1e-5)
    assert (found["min"], found["max"]) == (float(wide.min()), float(wide.max()))
    assert found["nonfinite"] == 0
    assert (found["shape"], found["stride"], found["dtype"]) == ((3, 40, 17), (680, 17, 1), str(dtype)[6:])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_counted(bad):
    """NaN and infinities are counted one by one; a value whose square overflows is not one of them."""
    values = torch.ones(64)
    values[[3, 7]] = bad
    values[9] = 1e30
    assert facts(values)["nonfinite"] == 2
    values[[3, 7]] = 0
    assert facts(values)["nonfinite"] == 0


def test_the_sketch_holds_values_of_different_channels():
    """The sketch is a few of the tensor's own values, not all of one channel."""
    values = torch.arange(256 * 512).reshape(256, 512)
    sketch = [float(word) for word in facts(values)["sketch"].split()]
    assert abs(len(sketch) - SKETCH) <= 1
    assert len({v % 512 for v in sketch}) == len(sketch)


@pytest.mark.parametrize("tensor", [torch.zeros(0, 4), torch.tensor(3.0), torch.tensor([True, False])])
def test_small_and_strange_tensors_have_statistics(tensor):
    """Nothing at all, a scalar and booleans have an entry that is plain JSON."""
    found = facts(tensor)
    assert json.loads(json.dumps(found))["n"] == tensor.numel()


def test_tensors_of_every_mode_have_the_same_numbers():
    """Inference mode, gradients and memory in another order change nothing, in whatever order they come."""
    values = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = facts(values)
    with torch.inference_mode():
        assert facts(values.clone()) == expected
    assert facts(values.clone().requires_grad_()) == expected
    turned = facts(values.T.contiguous().T)
    assert {**turned, "stride": expected["stride"]} == expected


def test_a_recorder_of_statistics_keeps_tensors_only_where_named():
    """Every tap has its numbers of each call; the taps that are named are kept whole as well."""
    record = TraceRecorder(statistics=True, keep=("layers.1",))
    for start, stop in ((0, 4), (4, 6)):
        record.span(start, stop)
        for name in ("layers.0", "layers.1"):
            value = torch.full((1, stop - start, 2), float(stop))
            assert record(name, value) is value
    found = record.statistics()
    assert found["tap"] == ["layers.0", "layers.0", "layers.1", "layers.1"]
    assert (found["call"], found["mean"]) == ([0, 1, 0, 1], [4.0, 6.0, 4.0, 6.0])
    assert record.tokens("layers.0") == 6
    assert list(record.tensors()) == ["layers.1"]
    assert record.tensors()["layers.1"].shape == (1, 6, 2)


def test_without_names_no_tensor_is_kept():
    """Statistics alone hold no tensor, and are not kept unless they are asked for."""
    record, plain = TraceRecorder(statistics=True), TraceRecorder()
    for each in (record, plain):
        each.span(0, 2)
        each("layers.0", torch.ones(1, 2, 2))
    assert record.tensors() == {}
    assert plain.statistics() == {}
