"""The gated delta rule with a decay for each channel, in chunks and step by step, in float32. Must not know weights.

Within a chunk, with g the sum of decays between two tokens (never taken as a difference of sums from the chunk's start,
which cancels where one decay is huge), S_t = diag(e^g(0,t)) S_0 + sum_i e^g(i,t) k_i u_i^T, and the corrections u solve

    (1 + tril(beta_t sum_c k_t[c] k_i[c] e^g(i,t)[c], -1)) u = beta (v - (k e^g(0,t)) S_0)

so that u = u0 - w S_0 with u0 and w of the chunk alone. Exponents are sums of decays <= 0: no factor exceeds 1.
Source: arXiv 2412.06464, section 3.2 (WY form); arXiv 2510.26692, section 3.2 (decay by channel).

Legend: B requests, T tokens, H heads, K and V widths, N chunks, C tokens of a chunk (i: earlier one).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 16
TILE = 8 * CHUNK
"""Tokens whose chunks are prepared at once; bounds the memory of products by pair and channel."""
FLOAT = torch.float32


class Chunks(NamedTuple):
    """What chunks contribute, whatever the state they begin with. Shapes: [B, H, N, ...] of the sizes named."""

    u_CV: Tensor
    w_CK: Tensor
    q_CK: Tensor
    inner_CC: Tensor
    k_CK: Tensor
    end_K: Tensor


def step(q_BHK: Tensor, k_BHK: Tensor, v_BHV: Tensor, decay_BHK: Tensor, beta_BH: Tensor, s_BHKV: Tensor) -> Tensor:
    """Take one token into the state, in place, and return what it reads [B, H, V]."""
    s_BHKV.mul_(decay_BHK.exp()[..., None])
    wrong = v_BHV - torch.einsum("bhk,bhkv->bhv", k_BHK, s_BHKV)
    s_BHKV.add_(k_BHK[..., None] * (beta_BH[..., None] * wrong)[..., None, :])
    return torch.einsum("bhk,bhkv->bhv", q_BHK, s_BHKV)


def chunked(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, decay_BTHK: Tensor, beta_BTH: Tensor, s_BHKV: Tensor
) -> Tensor:
    """Take all tokens into the state, in place, and return what each reads [B, T, H, V]."""
    length, found = q_BTHK.shape[1], []
    for start in range(0, length, TILE):
        parts = [x[:, start : start + TILE] for x in (q_BTHK, k_BTHK, v_BTHV, decay_BTHK, beta_BTH)]
        chunks = prepared(*(_by_chunk(x) for x in parts))
        cores = [_through(Chunks(*(x[:, :, n] for x in chunks)), s_BHKV) for n in range(chunks.u_CV.shape[2])]
        found.append(torch.stack(cores, dim=2).flatten(2, 3)[:, :, : parts[0].shape[1]])
    return torch.cat(found, dim=2).transpose(1, 2)


def _by_chunk(x_BTH: Tensor) -> Tensor:
    """Return [B, T, H, ...] as [B, H, N, C, ...]; a token added at the end neither decays, writes nor reads."""
    missing = -x_BTH.shape[1] % CHUNK
    padded = F.pad(x_BTH.to(FLOAT), [0, 0] * (x_BTH.dim() - 2) + [0, missing])
    return padded.transpose(1, 2).unflatten(2, (-1, CHUNK))


def prepared(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Chunks:
    """Return what each chunk contributes. Shapes: q, k, decay [B, H, N, C, K]; v [..., C, V]; beta [..., C]."""
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril(-1)
    between = torch.where(later[..., None], decay[..., :, None, :], decay.new_zeros(())).cumsum(-3)  # sums of (i, t]
    seen = later | torch.eye(CHUNK, dtype=torch.bool, device=q.device)
    ratio_CCK = between.exp() * seen[..., None]
    inner = torch.einsum("...tk,...ik,...tik->...ti", q, k, ratio_CCK)
    pairs = torch.einsum("...tk,...ik,...tik->...ti", k, k, ratio_CCK).tril(-1) * beta[..., None]
    begun = decay.cumsum(-2).exp()
    right = torch.cat((v, k * begun), dim=-1) * beta[..., None]
    solved = torch.linalg.solve_triangular(pairs, right, upper=False, unitriangular=True)
    u, w = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    return Chunks(u, w, q * begun, inner, k * ratio_CCK[..., -1, :, :], begun[..., -1, :])


def _through(chunk: Chunks, s_BHKV: Tensor) -> Tensor:
    """Take one chunk into the state, in place; return what its tokens read [B, H, C, V]."""
    u = chunk.u_CV - chunk.w_CK @ s_BHKV
    core = chunk.q_CK @ s_BHKV + chunk.inner_CC @ u
    s_BHKV.mul_(chunk.end_K[..., None]).add_(chunk.k_CK.mT @ u)
    return core
