"""The shared parts against formulas written out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from reference_impl.layers import (
    layer_norm,
    rms_norm,
    rotary_angles,
    rotate_half_split,
    rotate_interleaved,
    top_indices,
)
from reference_impl.model import attend, gated_clamped, one_hot_any


def rotated(pair: tuple[float, float], position: int, i: int, width: int, theta: float) -> tuple[float, float]:
    angle = position * theta ** (-2 * i / width)
    (x, y), c, s = pair, math.cos(angle), math.sin(angle)
    return x * c - y * s, y * c + x * s


@pytest.mark.parametrize("style", ["interleaved", "half"])
def test_rotary_turns_the_pairs_of_its_layout(style):
    """Each pair turns by position * theta^(-2i/width); which features form a pair depends on the layout."""
    width, theta, position = 6, 50000.0, 37
    x = torch.randn(1, 1, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    angles = rotary_angles(torch.tensor([[position]]), width, theta)
    expected = x.flatten().tolist()
    for i in range(width // 2):
        a, b = (2 * i, 2 * i + 1) if style == "interleaved" else (i, i + width // 2)
        expected[a], expected[b] = rotated((expected[a], expected[b]), position, i, width, theta)
    if style == "half":
        found = rotate_half_split(x, angles)
    else:
        found = torch.cat([rotate_interleaved(x[..., :width], angles), x[..., width:]], dim=-1)
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-12)


def test_rotary_tables_are_not_rounded_at_high_positions():
    """The angle at position 1023 is right to double precision (a float32 product would be off by 1e-5)."""
    angle = rotary_angles(torch.tensor([[1023]]), 16, 50000.0)[0, 0, 1].item()
    assert angle == pytest.approx(1023 * 50000.0 ** (-2 / 16), rel=1e-14)


def test_norms_compute_above_the_input_precision():
    """On bfloat16 input both norms are the rounding of their float32 result, not a chain of bfloat16 steps."""
    generator = torch.Generator().manual_seed(3)
    x, w, b = (torch.randn(*s, generator=generator).bfloat16() for s in ((5, 48), (48,), (48,)))
    f, eps = x.float(), 1e-5
    rms = f / (f.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w.float()
    centred = f - f.mean(-1, keepdim=True)
    normal = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w.float() + b.float()
    for found, expected in ((rms_norm(x, w, eps), rms), (layer_norm(x, w, b, eps), normal)):
        assert found.dtype == torch.bfloat16
        assert ((found.float() - expected).abs() <= expected.abs() * 2**-8 + 1e-6).all()


def test_ties_go_to_the_lower_index_and_choices_ascend():
    """Of equal scores the earlier is taken, and choices come in ascending order whatever their scores."""
    assert top_indices(torch.zeros(1, 3000), 5).tolist() == [[0, 1, 2, 3, 4]]
    scores = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 3.0], [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    assert top_indices(scores, 4).tolist() == [[1, 2, 3, 5], [0, 1, 2, 3]]


def test_a_sink_takes_weight_and_gives_nothing():
    """The mixed values equal sum_s exp(q.k_s) v_s / (sum_s exp(q.k_s) + exp(sink)) over the allowed keys only."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, n, 2, 4, generator=generator, dtype=torch.float64) for n in (1, 5, 5))
    sinks, allowed = torch.tensor([0.7, -1.0]), torch.tensor([[[True, False, True, True, False]]])
    found = attend(q, k, v, allowed, sinks)
    for head in range(2):
        weights = [math.exp(float(q[0, 0, head] @ k[0, s, head]) * 4**-0.5) for s in (0, 2, 3)]
        total = sum(weights) + math.exp(float(sinks[head]))
        expected = sum(w * v[0, s, head] for w, s in zip(weights, (0, 2, 3), strict=True)) / total
        assert torch.allclose(found[0, 0, head], expected, rtol=1e-6)


def test_minus_one_chooses_no_key():
    """The padding of a selection adds no key to the mask, neither the first nor the last."""
    assert one_hot_any(torch.tensor([[[0, 2, -1]], [[-1, -1, -1]]]), 4).int().tolist() == [
        [[1, 0, 1, 0]],
        [[0, 0, 0, 0]],
    ]


def test_expert_activation_clamps_gate_above_and_up_on_both_sides():
    """The gate is cut at 7 only from above, the up side at both ends, and one is added to it after the cut."""
    one = torch.eye(1, dtype=torch.float64)
    for gate, up in ((9.0, 9.0), (-9.0, -9.0), (0.5, 2.0)):
        weights = {"gate_proj.weight": gate * one, "up_proj.weight": up * one, "down_proj.weight": one}
        g, u = min(gate, 7.0), min(max(up, -7.0), 7.0)
        expected = g / (1 + math.exp(-1.702 * g)) * (u + 1)
        assert gated_clamped(weights, one).item() == pytest.approx(expected, rel=1e-9)
