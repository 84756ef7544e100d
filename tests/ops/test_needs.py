"""What a model uses is found by running it: operators, custom ones with their contract, modules in place of others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from harness.ops.contracts import contracts
from harness.ops.needs import family_of, watched
from harness.ops.table import coverage, replaced, served


@torch.library.custom_op("day0_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """Return 2x."""
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("day0_tests::sneaky", mutates_args=())
def sneaky(x: torch.Tensor) -> torch.Tensor:
    """Write to what is only to be read, and lie about the shape."""
    x.add_(1)
    return x.clone()


@sneaky.register_fake
def _(x):
    return x.new_empty(x.shape[0])


def test_operators_are_counted_and_call_for_families():
    """One softmax and two products are counted as such, and name their families; the rest is not guessed."""
    with watched() as seen:
        torch.softmax(torch.randn(3, 4) @ torch.randn(4, 5) @ torch.randn(5, 2), -1)
    assert seen.operators["aten::mm"] == 2
    assert {"matrix", "softmax"} <= seen.families
    assert family_of("aten::_scaled_dot_product_flash_attention_for_cpu") == "attention"
    assert family_of("vendor::mla_decode") == ""


def test_custom_operators_are_held_to_their_contract():
    """A custom operator that keeps its contract passes; one that mutates an input and lies about its shape does not."""
    with watched() as seen:
        twice(torch.randn(3))
        sneaky(torch.randn(3, 2))
    told = {c["operator"]: c["failures"] for c in contracts(seen)}
    assert told["day0_tests::twice"] == []
    assert any("test_schema" in f for f in told["day0_tests::sneaky"])


@torch.library.custom_op("day0_tests::shares", mutates_args=())
def shares(x: torch.Tensor) -> torch.Tensor:
    """Return the softmax of x plus its running sums, made of torch's own operators and of another custom one."""
    return twice(torch.softmax(x @ x.mT, -1)).cumsum(-1)


@torch.library.custom_op("day0_tests::foreign", mutates_args=())
def foreign(x: torch.Tensor) -> torch.Tensor:
    """Return the same without any operator of torch, as a binary would."""
    p = np.exp(x.numpy() @ x.numpy().T)
    return torch.from_numpy((2 * p / p.sum(-1, keepdims=True)).cumsum(-1))


def test_what_runs_inside_of_a_custom_operator_calls_for_families():
    """A softmax within a custom operator is a need of the model; one that uses none of torch's shows none."""
    x = torch.randn(4, 4)
    with watched() as made:
        found = shares(x)
    assert {"softmax", "matrix", "sums", "elementwise"} <= made.families
    assert set(made.operators) == {"day0_tests::shares"}
    assert made.inside["day0_tests::shares", "aten::_softmax"] == 1
    assert made.inside["day0_tests::shares", "day0_tests::twice"] == 1
    assert torch.equal(found, shares(x))
    with watched() as other:
        found = foreign(x)
    assert other.families == set()
    torch.testing.assert_close(found, shares(x))


def test_a_plain_cpu_serves_everything_from_its_library():
    """On a CPU every operator of torch is the library's, nothing falls back, and both phases are counted."""
    with watched() as prefill:
        torch.nn.functional.silu(torch.randn(3)).cumsum(0)
    with watched(keep=False) as decode:
        torch.topk(torch.randn(3), 2)
    table = coverage(prefill, decode, "cpu", {"mine": "triton"})
    counts = {row["operator"]: (row["prefill"], row["decode"], row["level"]) for row in table["rows"]}
    assert counts["aten::silu"] == (1, 0, "library")
    assert counts["aten::topk"] == (0, 1, "library")
    assert table["fallbacks"] == {}
    assert table["own"] == {"mine": "triton"}
    assert {row["level"] for row in table["rows"]} == {"library"}
    assert served("day0_tests::twice", "cpu") == "custom"


class Faster(nn.LayerNorm):
    """A port's own forward in place of torch's."""

    def forward(self, x):
        return x


class Renamed(nn.LayerNorm):
    """A subclass that keeps upstream's forward."""


def test_modules_in_place_of_others_are_named():
    """A subclass with its own forward, and a forward set on one object, are told; a plain subclass is not."""
    odd = nn.Linear(2, 2)
    odd.forward = lambda x: x
    with watched() as seen:
        for module in (Faster(2), Renamed(2), odd, nn.Linear(2, 2)):
            module(torch.randn(1, 2))
    rows = {(row["what"], row["how"]) for row in replaced(seen)}
    assert rows == {("Faster", "subclass"), ("Linear", "set on the object")}


def test_a_forward_that_was_patched_on_the_class_is_named(monkeypatch):
    """A function of another package in the place of a class's forward is told with where it is from."""

    def forward(self, x):
        return x

    monkeypatch.setattr(nn.Identity, "forward", forward)
    with watched() as seen:
        nn.Identity()(torch.randn(1))
    (row,) = [r for r in replaced(seen) if r["how"] == "patched"]
    assert row["instead_of"] == "torch.nn.modules.linear.Identity.forward"
    assert row["by"] == __name__


@pytest.mark.filterwarnings("ignore:Warning only once:UserWarning")
def test_a_kernel_that_is_registered_over_torchs_own_is_named():
    """A port that registers its own kernel for an operator of torch is told so, with the place; others are not."""
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("silu", lambda x: x * torch.sigmoid(x), "CPU", allow_override=True)
    try:
        with watched() as seen:
            torch.nn.functional.silu(torch.randn(3)).exp()
        (row,) = [r for r in coverage(seen, None, "cpu", {})["replaced"] if r["how"] == "registered"]
    finally:
        kernels._destroy()
    assert row["what"] == "aten::silu"
    assert "test_needs.py" in row["by"]


@pytest.fixture(autouse=True)
def _quiet():
    with torch.no_grad():
        yield
