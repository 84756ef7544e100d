"""The feed-forward block of routed and shared experts. Knows one block's weights; must not know the decoder.

B batch  T tokens  D features  E experts  G groups  C choices
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from harness.adapter import Recorder
from harness.taps import part_step
from reference_impl.config import Config
from reference_impl.layers import gated, linear, top_indices, wide, wide_linear

HIDDEN = "batch token feature"
LIMIT, ALPHA = 7.0, 1.702
"""Of the clamped SwiGLU."""
Part = Callable[[str], Mapping[str, Tensor]]


def experts(c: Config, part: Part, at: str, x_BTD: Tensor, record: Recorder) -> Tensor:
    """Apply the routed and the shared experts; `part` gives the weights below a name, "" those of the block itself."""
    chosen_BTC, weights_BTC = route(c, part(""), f"{at}.router", x_BTD, record)
    sum_BTD = torch.zeros_like(wide(x_BTD))
    parts_BTCD = sum_BTD[:, :, None].repeat(1, 1, c.num_experts_per_tok, 1)
    for e in range(c.n_routed_experts):
        chosen_here_BTC = chosen_BTC == e
        here_BT = chosen_here_BTC.any(-1)
        if not here_BT.any():
            continue
        out = wide(gated_clamped(part(f"experts.{e}"), x_BTD[here_BT]))
        share = (weights_BTC * chosen_here_BTC).sum(-1)[here_BT][:, None] * out
        sum_BTD[here_BT] += share
        parts_BTCD[chosen_here_BTC] = share
    if getattr(record, "wants_parts", False):
        step = part_step(parts_BTCD.shape[-1])
        record(f"{at}.experts.parts", parts_BTCD[..., ::step].float(), dims="batch token choice feature")
        record(f"{at}.experts.parts.owner", chosen_BTC, dims="batch token choice")
    routed_BTD = record(f"{at}.experts", sum_BTD.to(x_BTD.dtype), dims=HIDDEN)
    shared_BTD = record(f"{at}.shared_expert", gated(part("shared_experts"), x_BTD), dims=HIDDEN)
    return record(at, routed_BTD + shared_BTD, dims=HIDDEN)


def route(c: Config, w: Mapping[str, Tensor], at: str, x_BTD: Tensor, record: Recorder) -> tuple[Tensor, Tensor]:
    """Return the experts that each token takes, ascending, and their weights. Shapes [B, T, C] both.

    The bias decides who is taken, and nothing else. Source: arXiv 2412.19437, section 2.1.2.
    """
    logits_BTE = record(f"{at}.logits", wide_linear(x_BTD, w["gate.weight"]), dims="batch token expert")
    chances_BTE = logits_BTE.sigmoid()
    scores_BTE = chances_BTE + w["gate.e_score_correction_bias"]
    worth_BTG = record(f"{at}.groups.topk.scores", worth_of_groups(scores_BTE, c.n_group), dims="batch token group")
    groups_BTC = record(f"{at}.groups.topk", top_indices(worth_BTG, c.topk_group), dims="batch token choice")
    scores_BTE = within_groups(scores_BTE, groups_BTC, c.n_group)
    scores_BTE = record(f"{at}.topk.scores", scores_BTE, dims="batch token expert")
    chosen_BTC = record(f"{at}.topk", top_indices(scores_BTE, c.num_experts_per_tok), dims="batch token choice")
    weights_BTC = chances_BTE.gather(-1, chosen_BTC)
    weights_BTC = weights_BTC / (weights_BTC.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
    return chosen_BTC, record(f"{at}.weights", weights_BTC, dims="batch token choice")


def worth_of_groups(scores_BTE: Tensor, groups: int) -> Tensor:
    """Return what each group of neighbours is worth: the sum of its two best. Shape [B, T, G]."""
    return scores_BTE.unflatten(-1, (groups, -1)).topk(2, dim=-1).values.sum(-1)


def within_groups(scores_BTE: Tensor, groups_BTC: Tensor, groups: int) -> Tensor:
    """Return the scores with -inf for experts outside of the chosen groups."""
    scores_BTGE = scores_BTE.unflatten(-1, (groups, -1))
    outside_BTG = torch.ones_like(scores_BTGE[..., 0], dtype=torch.bool).scatter(-1, groups_BTC, False)
    return scores_BTGE.masked_fill(outside_BTG[..., None], float("-inf")).flatten(-2)


def gated_clamped(weights: Mapping[str, Tensor], x_BTD: Tensor) -> Tensor:
    """Apply down(act(gate x, up x)), act(g, u) = min(g, 7) sigmoid(1.702 min(g, 7)) (clamp(u, -7, 7) + 1)."""
    gate = linear(x_BTD, weights["gate_proj.weight"]).clamp(max=LIMIT)
    up = linear(x_BTD, weights["up_proj.weight"]).clamp(-LIMIT, LIMIT)
    return linear(gate * torch.sigmoid(ALPHA * gate) * (up + 1), weights["down_proj.weight"])
