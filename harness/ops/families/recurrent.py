"""The recurrent scan with gated delta rule. Knows its formula and budget; must not know devices.

S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) k_t^T S_{t-1})^T, o_t = S_t^T q_t, with keys of length 1. The state
does not grow, so after t steps of D-term products it is right to about t D u of its size. Source: Yang et al. 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.ops.arithmetic import Units
from harness.ops.case import Given, Spec, Want
from harness.ops.inputs import lay, sweep, values

SOURCE = "Yang et al. 2024 (gated delta rule); Higham 3.1 along the steps"


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs [H, T, V] and the last state [H, K, V], computed in float32. q, k [H, T, K]; g, beta [H, T]."""
    wide = [x.float() for x in (q, k, v, g, beta)]
    s, out = state.float(), []
    for t in range(q.shape[1]):
        qt, kt, vt, gt, bt = (x[:, t] for x in wide)
        s = s * gt.exp()[:, None, None]
        delta = bt[:, None] * (vt - (kt[:, :, None] * s).sum(1))
        s = s + kt[:, :, None] * delta[:, None, :]
        out.append((qt[:, :, None] * s).sum(1))
    return torch.stack(out, 1).to(q.dtype) if out else torch.empty_like(v), s


def _inputs(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    heads, width = 2, 8
    q, k = (torch.nn.functional.normalize(values(gen, torch.float64, (heads, size, width)), dim=-1) for _ in "qk")
    v = values(gen, dtype, (heads, size, 5))
    decay = {"no decay": 0.0, "strong decay": 20.0}.get(content, 0.3)
    g = -decay * torch.rand(heads, size, generator=gen)
    beta = torch.rand(heads, size, generator=gen)
    state = values(gen, torch.float32, (heads, width, 5))
    return Given(args=(*(lay(x.to(dtype), form) for x in (q, k, v)), g, beta.to(dtype), state))


def _truth(u: Units, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Sequence[Want]:
    s, size, out, slack = state, state.abs().amax(), [], []
    for t in range(q.shape[1]):
        kt = k[:, t, :, None]
        s = s * g[:, t, None, None].exp()
        s = s + kt * (beta[:, t, None, None] * (v[:, t, None, :] - (kt * s).sum(1, keepdim=True)))
        size = torch.maximum(size, torch.maximum(s.abs().amax(), v[:, t].abs().amax()))
        out.append((q[:, t, :, None] * s).sum(1))
        slack.append(((t + 1) * (q.shape[-1] + 8) * u.acc + u.exp) * size * q[:, t].abs().sum(-1, keepdim=True))
    last = (q.shape[1] * (q.shape[-1] + 8) * u.acc + u.exp) * size
    if not out:
        return [Want(value=v), Want(value=s)]
    return [
        Want(value=torch.stack(out, 1), slack=torch.stack(slack, 1).expand_as(v)),
        Want(value=s, slack=torch.full_like(s, float(last))),
    ]


SPECS = (
    Spec(
        name="gated_delta", family="recurrent", call=gated_delta, truth=_truth, source=SOURCE, plain=False,
        cases=lambda full: sweep(
            _inputs, full=full, sizes=(1, 7, 31, 64, 65, 129) if full else (1, 17), base=9,
            contents=("no decay", "strong decay"),
        ),
    ),
)  # fmt: skip
