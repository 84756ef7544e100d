"""Feed-forward: dense, or experts that a router chooses in groups. Knows names of weights and operators.

Legend: B requests, T tokens, F features, E experts, K chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accel_impl import ops
from accel_impl.formats import Resident
from accel_impl.held import CHOICE, HIDDEN, Held
from harness.adapter import Recorder

SCORES = "batch token expert"


def experts(held: Held, layer: int, tap: str, x_BTF: Tensor, record: Recorder) -> Tensor:
    """Return the experts' weighted sum beside the shared expert."""
    name, use = f"model.layers.{layer}.mlp", held.use
    ids_BTK, weights_BTK = _routed(held, name, f"{tap}.router", x_BTF, record)

    def act(gate: Tensor, up: Tensor) -> Tensor:
        return ops.swiglu_clamped(use, gate, up)

    partial = ops.grouped_experts(use, x_BTF, ids_BTK, weights_BTK, _held_here(held, name), act)
    routed = record(f"{tap}.experts", held.place.reduce_experts(partial).to(held.dtype), dims=HIDDEN)
    shared = record(f"{tap}.shared_expert", held.gated(x_BTF, f"{name}.shared_experts"), dims=HIDDEN)
    return routed + shared


def _routed(held: Held, name: str, router: str, x_BTF: Tensor, record: Recorder) -> tuple[Tensor, Tensor]:
    """Return the chosen experts and their weights [B, T, K]; the bias only selects."""
    config = held.config
    logits = record(f"{router}.logits", held.exact(x_BTF, f"{name}.gate"), dims=SCORES)
    p_BTE = torch.sigmoid(logits)
    biased = _of_groups(held, p_BTE + held.wide(f"{name}.gate.e_score_correction_bias"), router, record)
    biased = record(f"{router}.topk.scores", biased, dims=SCORES, kind="scores")
    ids_BTK = ops.choose_experts(held.use, biased, config.num_experts_per_tok)
    ids_BTK = record(f"{router}.topk", ids_BTK, dims=CHOICE, kind="routing")
    chosen = p_BTE.gather(-1, ids_BTK)
    weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
    return ids_BTK, record(f"{router}.weights", weights, dims=CHOICE)


def _of_groups(held: Held, scores_BTE: Tensor, router: str, record: Recorder) -> Tensor:
    """Choose groups of experts, and return the scores with -inf for experts of the others."""
    groups = held.config.n_group
    worth = ops.group_worth(held.use, scores_BTE, groups)
    worth = record(f"{router}.groups.topk.scores", worth, dims="batch token group", kind="scores")
    taken = ops.choose_experts(held.use, worth, held.config.topk_group)
    taken = record(f"{router}.groups.topk", taken, dims=CHOICE, kind="routing")
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, taken, True)
    by_group = scores_BTE.unflatten(-1, (groups, -1))
    return by_group.masked_fill(~kept[..., None], float("-inf")).flatten(-2)


def _held_here(held: Held, name: str) -> dict[int, tuple[Resident, Resident, Resident]]:
    here = held.place.experts(held.config.n_routed_experts)
    return {
        expert: tuple(held.weights[f"{name}.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))  # type: ignore[misc]
        for expert in here
    }
