"""How far an error is one number, as honest runs show by where they differ. Knows tensors; not taps or limits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 20
"""Elements of one side worked on at a time: long prompts need no more memory than short ones."""


def shared_of(*, actual: Tensor, honest: Sequence[Tensor], expected: Tensor, rows: Tensor) -> Tensor:
    """Return for some rows the share of honest runs' squared error that they differ by along the error of `actual`.

    Where errors consist of n independent numbers it is 1 / n on average; where one number times a fixed pattern makes
    the whole error (an ill-conditioned token), it is near 1, however small that number is by chance in the runs seen.
    An error that lies elsewhere than where honest runs differ, as that of a fault, shares nothing: near 0. What honest
    runs have in common does not count.
    Shapes: actual, expected [T, E], honest S x [T, E], S at least 2, rows [N]; returns [N], NaN where errors are.
    """
    step = max(1, _BLOCK_ELEMENTS // max(1, expected.shape[1]))
    share = torch.zeros(len(rows), dtype=torch.float64)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        right = expected[part].to(torch.float64)
        errors_STE = torch.stack([h[part].to(torch.float64) - right for h in honest])
        mean_TE = errors_STE.mean(dim=0)
        own_TE = actual[part].to(torch.float64) - right - mean_TE
        inner_ST = ((errors_STE - mean_TE) * own_TE).sum(dim=-1)
        along_T = inner_ST.square().sum(dim=0) / (len(honest) - 1)
        whole_T = own_TE.square().sum(dim=-1) * errors_STE.square().sum(dim=-1).mean(dim=0)
        share[start : start + step] = torch.where(whole_T == 0, 0.0, along_T / whole_T)
    return share
