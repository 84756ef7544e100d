"""Logits of a free run as distributions over the vocabulary. Knows taps; must not know limits."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.compare.align import as_rows
from harness.compare.subject import Scene, Views, number
from harness.metrics.distributions import kl_nats, padding_probability, top1_agreement
from harness.types import Measurement


def compare_logits(scene: Scene, views: Views) -> list[Measurement]:
    """Compare the distributions of a free run. The floor is never below rounding the oracle's own logits.

    The ratio is one of medians over tokens, as of accumulated values: one route that flips honestly, in a short prompt,
    moves a mean by hundreds.
    """
    rows = [as_rows(t, views.tap).values[scene.first_token :] for t in (views.oracle, views.accel, *views.floors)]
    expected, actual, floors = rows[0], rows[1], rows[2:]
    rounded = expected.to(getattr(torch, scene.dtype))
    kl = kl_nats(actual=actual, expected=expected)
    floor_kls = torch.stack([kl_nats(actual=f, expected=expected) for f in (rounded, *floors)])
    n = int(expected.shape[0])
    floor_top1 = min((top1_agreement(actual=f, expected=expected) for f in floors), default=1.0)
    ratio = float(kl.quantile(0.5) / floor_kls.quantile(0.5, dim=1).max())
    top1 = top1_agreement(actual=actual, expected=expected)
    whole = scene.accel.tensors[views.tap.name]
    return [
        number(scene, views.tap, "padding_probability", _padding(whole, expected), whole.numel()),
        number(scene, views.tap, "logits_kl_ratio", ratio, n, token=int(kl.argmax())),
        number(scene, views.tap, "kl_nats_per_token", float(kl.mean()), n, floor=float(floor_kls.mean(dim=1).max())),
        number(scene, views.tap, "top1_agreement", top1, n, floor=floor_top1),
    ]


def _padding(logits: Tensor, expected: Tensor) -> float:
    """Return what the port gives to columns beyond the reference's vocabulary (padded for tiles or shards)."""
    return padding_probability(logits.reshape(-1, logits.shape[-1]), vocab=expected.shape[-1])
