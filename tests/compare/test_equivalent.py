"""What is the same thing written otherwise."""

import torch
from sides import hidden, noisy, normal, run_of, trace, value

from harness.compare import compare_run
from harness.types import Scope

ROUTER, CHOICES = "layers.0.moe.router.out.1", "layers.0.moe.experts.in.top_k_index"


def test_weights_in_another_order_are_sorted_by_their_own_choices_on_every_floor() -> None:
    """A floor of another shape is left out without its choices being taken for those of the next one."""
    ids = normal(48, 8, seed=1).topk(4).indices
    weights = normal(48, 4, seed=2).abs()
    order = torch.arange(4).flip(0)
    oracle = {ROUTER: weights, CHOICES: ids, "layers.0": hidden(3)}
    run = run_of(3)
    dims = {ROUTER: "token choice", CHOICES: "token choice"}
    swapped = {**noisy(oracle, 5), CHOICES: ids[:, order]}
    swapped[ROUTER] = swapped[ROUTER][:, order]
    odd = {**noisy(oracle, 6), CHOICES: ids, ROUTER: weights[:-1]}
    found = compare_run(
        stage="text", run=run, oracle=trace(oracle, run, dims), scope=Scope(), dtype="bfloat16",
        floors=[trace(t, run, dims) for t in (odd, swapped)], accel=trace(swapped, run, dims),
    )  # fmt: skip
    assert 0.5 < value(found, "error_ratio", ROUTER, "whole").value <= 1.0
