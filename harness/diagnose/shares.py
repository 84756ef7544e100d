"""What each expert's share in a sum became: read back from the sum. Knows tensors; no taps, traces or limits."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.diagnose.matrix import Made, Matrix

NEAR = 0.05
"""How far a share may be from 0 or 1 to be called left out or whole."""
ALL = 0.95
"""Part of the shares that must be near 0 or 1 for shares to be called left out."""

LEAST, SIGMAS = 2e-3, 4.0
"""Least deviation from 1 of an expert's factor, and how many robust standard errors it must be."""


def shared_out(matrix: Matrix) -> Made:
    """The expected terms, some left out or each with another weight: one factor for each term, read off the sum.

    Factors are read off every second channel and tried on the others.
    """
    parts, owner = matrix.parts, matrix.owner
    if parts is None or owner is None or parts.shape[2] < 4 * parts.shape[1]:
        return
    actual = matrix.actual[:, :: matrix.part_step]
    fit = parts[:, :, ::2]  # [T, K, C / 2]
    gram = fit @ fit.transpose(1, 2) + 1e-9 * torch.eye(parts.shape[1], dtype=parts.dtype)
    factor = torch.linalg.solve_ex(gram, fit @ actual[:, ::2, None])[0][..., 0]  # [T, K]; not finite where alike
    for words, kept in _readings(factor, owner):
        rest = (parts * (kept - 1)[..., None]).sum(1)
        changed = matrix.expected.clone()
        changed[:, :: matrix.part_step] += rest
        tried = torch.zeros_like(changed, dtype=torch.bool)
        tried[:, matrix.part_step :: 2 * matrix.part_step] = True
        yield words, changed, tried


def _readings(factor: Tensor, owner: Tensor) -> list[tuple[str, Tensor]]:
    """Return what factors [T, K] of the terms of experts `owner` may mean, the simplest first."""
    found: list[tuple[str, Tensor]] = []
    lost, whole = factor.abs() < NEAR, (factor - 1).abs() < NEAR
    if bool(lost.any()) and float((lost | whole).double().mean()) > ALL:
        whose = sorted(set(owner[lost].tolist()))
        named = ", ".join(map(str, whose[:6])) + (", ..." if len(whose) > 6 else "")
        first = int(lost.any(1).nonzero()[0])
        words = (
            f"the expected sum without {int(lost.sum())} of {lost.numel()} shares (of experts {named}), the first at "
        )
        found.append((f"{words}token {first}: tokens that an expert dropped", (~lost).double()))
    by_expert = _by_expert(factor, owner)
    off = [int(e) for e in (by_expert != 1).nonzero()[:, 0]]
    if len(off) == 1:
        words = f"the share of expert {off[0]} {float(by_expert[off[0]]):.4g} times its own: scaled"
        found.append((words, by_expert[owner]))
    elif off:
        shown = ", ".join(f"expert {e} {float(by_expert[e]):.4g} times" for e in off[:4])
        more = f" and {len(off) - 4} more" if len(off) > 4 else ""
        found.append((f"the shares of its experts by a factor of their own: {shown}{more}", by_expert[owner]))
    low, high = float(factor.min()), float(factor.max())
    words = f"the shares of the chosen experts with other weights ({low:.3g} to {high:.3g} times their own)"
    found.append((f"{words}: what weighs them, or the order in which weights meet experts", factor))
    return found


def _by_expert(factor: Tensor, owner: Tensor) -> Tensor:
    """Return the median factor of each expert, [experts]; exactly 1 where its tokens do not tell it from 1."""
    found = torch.ones(int(owner.max()) + 1, dtype=factor.dtype)
    for expert in sorted(set(owner.flatten().tolist())):
        mine = factor[owner == expert]
        middle = mine.median()
        spread = 1.4826 * (mine - middle).abs().median() / len(mine) ** 0.5
        if abs(float(middle) - 1) > max(LEAST, SIGMAS * float(spread)):
            found[expert] = middle
    return found
