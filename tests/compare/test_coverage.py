"""Coverage: what the oracle's own choices reached."""

import torch
from sides import EXPERTS, TOKENS, normal, run_of, trace

from harness.compare import coverage, idle_experts, unexercised
from harness.types import Measurement, Trace


def test_idle_experts_and_dense_selections_lower_the_share() -> None:
    """Two experts that no token reaches leave 6 of 8; a selection of 4 means something from the fifth token on."""
    routes = normal(TOKENS, EXPERTS, seed=3)
    routes[:, [1, 6]] = -50.0
    keys = normal(TOKENS, TOKENS, seed=4).masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), float("-inf"))
    tensors = {
        "layers.0.attn.indexer.topk.scores": keys[None],
        "layers.0.attn.indexer.topk": keys.topk(4).indices[None],
        "layers.0.moe.router.topk.scores": routes,
        "layers.0.moe.router.topk": routes.topk(2).indices,
    }
    run = run_of(0)
    dims = {"layers.0.attn.indexer.topk.scores": "batch token key"}
    found = {m.where["kind"]: m.value for m in coverage("text", run, trace(tensors, run, dims))}
    assert found["routing"] == 6 / 8
    assert found["selection"] == (TOKENS - 4) / TOKENS


def reached(*oracles: Trace, heads: int = 0, **config: float) -> dict[str, Measurement]:
    """Return what some runs reached, by what it is about."""
    found = unexercised("text", run_of(0), oracles, config=config, edges={}, heads=heads)
    return {m.where["what"]: m for m in found}


def test_a_head_that_gives_nothing_is_named() -> None:
    """A head that is silent in one run and speaks in another is exercised; one that is silent in both is not."""
    core = normal(1, TOKENS, 32, seed=5)
    core[..., 8:16] = 0
    name = "layers.0.attn.core"
    silent = trace({name: core}, run_of(0))
    found = reached(silent, heads=4)["heads"]
    assert found.problem == "too_few"
    assert found.detail["idle"] == [f"{name} head 1"]
    assert reached(silent, trace({name: normal(1, TOKENS, 32, seed=6)}, run_of(0)), heads=4)["heads"].value == 0


def test_a_selection_that_drops_nothing_is_named() -> None:
    """Keeping all candidates exercises nothing; a second, longer run that drops some does."""

    def chosen(tokens: int) -> Trace:
        keys = normal(tokens, tokens, seed=4).masked_fill(torch.ones(tokens, tokens).triu(1).bool(), float("-inf"))
        name = "layers.0.attn.indexer.topk"
        tensors = {f"{name}.scores": keys[None], name: keys.topk(8).indices[None]}
        return trace(tensors, run_of(0), {f"{name}.scores": "batch token key"})

    assert reached(chosen(8))["selections"].detail["idle"] == ["layers.0.attn.indexer.topk"]
    assert reached(chosen(8), chosen(24))["selections"].value == 0


def test_a_clamp_that_nothing_reaches_is_named() -> None:
    """A limit of 7 is reached by a value of 8, not by one of 3; one that no tap shows is said to be unseen."""
    for size, idle in ((8.0, []), (3.0, ["swiglu_limit 7"])):
        oracle = trace({"layers.0.mlp.gate_proj": torch.full((1, 4, 8), size)}, run_of(0))
        assert reached(oracle, swiglu_limit=7.0)["limits"].detail["idle"] == idle
    hidden = reached(trace({"embed": torch.ones(1, 4, 8)}, run_of(0)), swiglu_limit=7.0)["limits"]
    assert "no tap shows it" in hidden.detail["message"]


def test_idle_experts_of_all_layers_are_named_at_once() -> None:
    """The message of any of them names every layer's, and the criterion is inconclusive."""
    tensors = {}
    for layer, idle in ((0, [1]), (1, []), (2, [6, 7])):
        routes = normal(TOKENS, EXPERTS, seed=layer)
        routes[:, idle] = -50.0
        tensors[f"layers.{layer}.moe.router.topk.scores"] = routes
        tensors[f"layers.{layer}.moe.router.topk"] = routes.topk(2).indices
    found = idle_experts("text", run_of(0), [trace(tensors, run_of(0))], experts=EXPERTS, need=2)
    assert [m.problem for m in found] == ["too_few", "", "too_few"]
    assert all("layers.0: 1 of 8; layers.2: 6, 7 of 8" in m.detail["message"] for m in found if m.problem)
