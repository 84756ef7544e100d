"""The shared parts against formulas written out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from reference_impl.config import RopeConfig
from reference_impl.experts import gated_clamped, within_groups, worth_of_groups
from reference_impl.layers import (
    layer_norm,
    mix,
    rms_norm,
    rotary_angles,
    rotate_half_split,
    rotate_interleaved,
    top_indices,
    yarn_frequencies,
)
from reference_impl.recurrent import delta_rule, short_convolution
from reference_impl.sparse import attend, one_hot_any, recent

ROPE = RopeConfig(
    rope_theta=50000.0,
    factor=256.0,
    original_max_position_embeddings=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale_all_dim=0.707,
)


def rotated(pair: tuple[float, float], angle: float) -> tuple[float, float]:
    (x, y), c, s = pair, math.cos(angle), math.sin(angle)
    return x * c - y * s, y * c + x * s


@pytest.mark.parametrize("style", ["interleaved", "half"])
def test_rotary_turns_the_pairs_of_its_layout(style):
    """Each pair turns by position times its frequency; which features form a pair depends on the layout."""
    position, frequencies = 37, torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64)
    x = torch.randn(1, 1, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    angles = rotary_angles(torch.tensor([[position]]), frequencies)
    expected = x.flatten().tolist()
    for i, frequency in enumerate(frequencies.tolist()):
        a, b = (2 * i, 2 * i + 1) if style == "interleaved" else (i, i + 3)
        expected[a], expected[b] = rotated((expected[a], expected[b]), position * frequency)
    if style == "half":
        found = rotate_half_split(x, angles)
    else:
        found = torch.cat([rotate_interleaved(x[..., :6], angles), x[..., 6:]], dim=-1)
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-12)


def test_rotary_tables_are_not_rounded_at_high_positions():
    """The angle at the last of a million places is right to double precision (float32 would be off by 0.03)."""
    angle = rotary_angles(torch.tensor([[1048575]]), yarn_frequencies(16, ROPE))[0, 0, 1].item()
    assert angle == pytest.approx(1048575 * 50000.0 ** (-2 / 16), rel=1e-14)


def test_slow_pairs_are_stretched_by_the_factor_and_fast_ones_kept():
    """YaRN leaves what turns 32 times within 4,096 tokens, divides what turns less than once, and goes down between."""
    ratio = yarn_frequencies(16, ROPE) / 50000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    turns = 4096 * 50000.0 ** (-torch.arange(8, dtype=torch.float64) / 8) / (2 * math.pi)
    assert (ratio[turns > 32] == 1).all()
    assert torch.allclose(ratio[turns < 1], torch.tensor(1 / 256, dtype=torch.float64))
    assert (ratio.diff() <= 0).all()
    assert len(ratio.unique()) >= 4


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


def test_a_mix_does_not_feel_how_large_a_stream_is():
    """A thousandfold stream takes the share of its direction; one that answers more takes more."""
    generator = torch.Generator().manual_seed(4)
    streams = [torch.randn(1, 3, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
    query = 3 * streams[1][0, 0]
    found = mix(query, streams, 1e-12)
    assert torch.allclose(mix(query, [1000 * streams[0], *streams[1:]], 1e-12), found)
    assert torch.allclose(found[0, 0], rms_norm(streams[1][0, 0], None, 1e-12), atol=0.3)


def test_ties_go_to_the_lower_index_and_choices_ascend():
    """Of equal scores the earlier is taken, and choices come in ascending order whatever their scores."""
    assert top_indices(torch.zeros(1, 3000), 5).tolist() == [[0, 1, 2, 3, 4]]
    scores = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 3.0], [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    assert top_indices(scores, 4).tolist() == [[1, 2, 3, 5], [0, 1, 2, 3]]


def test_a_group_is_worth_its_two_best():
    """A group with one great expert loses to two with two good ones; of equal groups the earlier are taken."""
    scores = torch.tensor([[9.0, 0, 0, 0, 5, 0, 5, 0, 0, 6, 0, 4.5]])
    worth = worth_of_groups(scores, 3)
    assert worth.tolist() == [[9, 10, 10.5]]
    never = float("-inf")
    found = within_groups(scores, top_indices(worth, 2), 3)
    assert found.tolist() == [[never] * 4 + [5, 0, 5, 0, 0, 6, 0, 4.5]]


def test_a_sink_takes_weight_and_gives_nothing():
    """The mixed values equal sum_s exp(q.k_s) v_s / (sum_s exp(q.k_s) + exp(sink)) over the allowed keys only."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, n, 2, 4, generator=generator, dtype=torch.float64) for n in (1, 5, 5))
    sinks, allowed = torch.tensor([0.7, -1.0]), torch.tensor([[[True, False, True, True, False]]])
    found = attend(q, k, v, allowed, sinks, 0.4)
    for head in range(2):
        weights = [math.exp(float(q[0, 0, head] @ k[0, s, head]) * 0.4) for s in (0, 2, 3)]
        total = sum(weights) + math.exp(float(sinks[head]))
        expected = sum(w * v[0, s, head] for w, s in zip(weights, (0, 2, 3), strict=True)) / total
        assert torch.allclose(found[0, 0, head], expected, rtol=1e-6)


def test_many_queries_attend_in_blocks_as_one(monkeypatch):
    """Attention over queries in blocks is attention over all, and a block may end anywhere."""
    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(1, 11, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    allowed = torch.ones(1, 11, 11, dtype=torch.bool).tril()
    whole = attend(q, k, v, allowed, torch.zeros(2), 1.0)
    monkeypatch.setattr("reference_impl.sparse.QUERY_BLOCK", 4)
    assert torch.allclose(attend(q, k, v, allowed, torch.zeros(2), 1.0), whole, rtol=1e-12)


def test_minus_one_chooses_no_key():
    """The padding of a selection adds no key to the mask, neither the first nor the last."""
    assert one_hot_any(torch.tensor([[[0, 2, -1]], [[-1, -1, -1]]]), 4).int().tolist() == [
        [[1, 0, 1, 0]],
        [[0, 0, 0, 0]],
    ]


def test_a_window_counts_the_query_itself():
    """The last two keys of the queries at places 0, 1 and 3."""
    assert recent(torch.tensor([0, 1, 3]), 5, 2).int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 1, 0]]


def test_expert_activation_clamps_gate_above_and_up_on_both_sides():
    """The gate is cut at 7 only from above, the up side at both ends, and one is added to it after the cut."""
    one = torch.eye(1, dtype=torch.float64)
    for gate, up in ((9.0, 9.0), (-9.0, -9.0), (0.5, 2.0)):
        weights = {"gate_proj.weight": gate * one, "up_proj.weight": up * one, "down_proj.weight": one}
        g, u = min(gate, 7.0), min(max(up, -7.0), 7.0)
        expected = g / (1 + math.exp(-1.702 * g)) * (u + 1)
        assert gated_clamped(weights, one).item() == pytest.approx(expected, rel=1e-9)


def test_a_convolution_looks_back_and_never_ahead():
    """The last tap meets the token itself, the first the one three before."""
    before = torch.zeros(1, 9, 1, dtype=torch.float64)
    before[0, 5] = 1.0  # the third token of six
    found = short_convolution(before, torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float64))[0, :, 0]
    silu = [x / (1 + math.exp(-x)) for x in (0, 0, 4, 3, 2, 1)]
    assert found.tolist() == pytest.approx(silu)


def test_the_delta_rule_replaces_what_a_key_recalls():
    """Written twice under one key with full strength, only the second value is read; a channel that decays is gone."""
    one, k = torch.ones(1, 2, 1, dtype=torch.float64), torch.eye(2, dtype=torch.float64)[None, [0, 0], None]
    v = torch.tensor([[[[5.0, 7.0]], [[1.0, 2.0]]]], dtype=torch.float64)
    read, state = delta_rule(k, k, v, torch.zeros_like(k), one, None)
    assert read[0, :, 0].tolist() == [[5.0, 7.0], [1.0, 2.0]]
    decay = torch.full_like(k, -1e9)
    assert delta_rule(k, k, v, decay, 0 * one, state)[1].abs().max() == 0
