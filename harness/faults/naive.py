"""What people check instead: cosine, correlation, assert_close, a relative difference. Knows tensors only.

The limits are those in common use, not this project's; they judge nothing here and stand beside the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from harness.types import Trace

SHARE = 0.99
"""Cosine and correlation that are commonly called equal. Source: the acceptance tests of several vendors."""
RELATIVE = 1e-3
"""A relative difference that is commonly called equal."""
CHECKS = ("cosine 0.99", "PCC 0.99", "assert_close", "relative 1e-3")
_LAYER = re.compile(r"layers\.\d+|vision\.blocks\.\d+|logits")


def naive(accel: Trace, oracle: Trace, dtype: str) -> dict[str, bool]:
    """Say for each check whether it refuses a port: any layer's output, or the logits, of a free run."""
    refused = dict.fromkeys(CHECKS, False)
    for name, expected in oracle.tensors.items():
        actual = accel.tensors.get(name)
        if not _LAYER.fullmatch(name) or actual is None or actual.shape != expected.shape:
            continue
        for check, wrong in _of_tensor(actual, expected, dtype).items():
            refused[check] |= wrong
    return refused


def _of_tensor(actual: Tensor, expected: Tensor, dtype: str) -> Mapping[str, bool]:
    a, e = actual.double().flatten(), expected.double().flatten()
    cosine = torch.nn.functional.cosine_similarity(a, e, dim=0)
    pcc = torch.nn.functional.cosine_similarity(a - a.mean(), e - e.mean(), dim=0)
    relative = (a - e).norm() / e.norm()
    return {
        "cosine 0.99": not bool(cosine > SHARE),
        "PCC 0.99": not bool(pcc > SHARE),
        "assert_close": not _close(actual, expected, getattr(torch, dtype)),
        "relative 1e-3": not bool(relative <= RELATIVE),
    }


def _close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    try:
        torch.testing.assert_close(actual.to(dtype), expected.to(dtype))
    except AssertionError:
        return False
    return True
