"""Coverage: what the oracle's own choices reached."""

import torch
from sides import EXPERTS, TOKENS, normal, run_of, trace

from harness.compare import coverage


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
