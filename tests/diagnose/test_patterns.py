"""Patterns: each is recognised under honest noise by what it leaves over, and noise is recognised as none of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from harness.diagnose.patterns import Matrix, best_pattern
from harness.diagnose.structure import region

TOKENS, HEADS, SIZE = 48, 4, 16
WIDTH = HEADS * SIZE


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


EXPECTED, INPUT, OTHER = (normal(TOKENS, WIDTH, seed=s) for s in (1, 2, 3))
OTHERS = {"layers.0": INPUT, "layers.3.attn": OTHER}


def by_head(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a change of the values seen as [T, heads, size]."""
    return lambda x: change(x.reshape(TOKENS, HEADS, SIZE)).reshape(TOKENS, WIDTH)


def rotated(x: Tensor) -> Tensor:
    """Turn each pair of channels of every head by an angle that grows with the position."""
    angle = torch.arange(TOKENS)[:, None, None] * 0.05 / torch.arange(1, SIZE // 2 + 1)
    first, second = x[..., : SIZE // 2], x[..., SIZE // 2 :]
    return torch.cat((first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()), dim=-1)


def scaled_head(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 2] *= 2
    return x


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x * 2, "2 times the expected"),
        (lambda x: -x, "the sign is turned"),
        (lambda x: x * 0, "zero everywhere"),
        (lambda x: x[:1].expand_as(x).clone(), "the same for every token"),
        (by_head(scaled_head), "head 2 is"),
        (lambda x: x + normal(WIDTH, seed=9), "a constant in each channel"),
        (lambda x: x * (1 + 0.5 * normal(WIDTH, seed=9)), "a factor of its own in each channel"),
        (lambda x: x.roll(1, 0), "the token 1 before it"),
        (by_head(lambda x: x[:, [1, 0, 2, 3]]), "heads in another order (0 holds 1; 1 holds 0)"),
        (by_head(lambda x: x.reshape(TOKENS, HEADS, 8, 2).transpose(2, 3)), "interleaved read as halves"),
        (by_head(lambda x: x.roll(SIZE // 2, -1)), "halves exchanged in each head"),
        (lambda x: x.reshape(TOKENS, HEADS, SIZE).transpose(1, 2).flatten(1), "heads and features exchanged"),
        (
            lambda x: x[:, torch.randperm(WIDTH, generator=torch.Generator().manual_seed(4))],
            "channels in another order",
        ),
        (lambda x: x[torch.randperm(TOKENS, generator=torch.Generator().manual_seed(4))], "rows in another order"),
        (lambda x: x.clamp(-1, 1), "cut at 1"),
        (lambda x: INPUT.clone(), "its input layers.0, unchanged"),
        (lambda x: OTHER.clone(), "what layers.3.attn should hold"),
        (lambda x: x + INPUT, "+1 times layers.0"),
        (by_head(rotated), "which grows with the position"),
    ],
)
def test_a_pattern_is_recognised(change: Callable[[Tensor], Tensor], words: str) -> None:
    """The words name what was done, and next to nothing is left over."""
    noise = 1e-3 * normal(TOKENS, WIDTH, seed=7)
    actual = change(EXPECTED)
    noisy = actual if not actual.any() or (actual == actual[:1]).all() or words == "cut at 1" else actual + noise
    found = best_pattern(Matrix(actual=noisy, expected=EXPECTED, heads=HEADS, others=OTHERS, inputs=("layers.0",)))
    assert found is not None
    assert words in found.words, found
    assert found.left < 0.1


def test_noise_is_no_pattern() -> None:
    """An error without structure is explained by nothing."""
    found = best_pattern(
        Matrix(
            actual=EXPECTED + 0.3 * normal(TOKENS, WIDTH, seed=7), expected=EXPECTED, heads=HEADS, others=OTHERS,
            inputs=("layers.0",),
        )
    )  # fmt: skip
    assert found is None or found.left > 0.8


def test_a_coarser_format_is_named() -> None:
    """Values that went through float8 are told from an error of that size."""
    fine = EXPECTED.float().bfloat16().double()
    found = best_pattern(Matrix(actual=fine.to(torch.float8_e4m3fn).double(), expected=fine))
    assert found is not None
    assert "float8_e4m3fn" in found.words
    assert found.left == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (slice(32, None), "only at positions >= 132 (window is 132); equal before"),
        (slice(28, None), "only at positions >= 128 (2^7); equal before"),
        (slice(0, 10), "only at positions < 110; equal after"),
        (slice(20, 21), "only at position 120"),
        (slice(20, 24), "only at positions 120 to 123"),
        (slice(3, None, 9), "only at 5 of 48 tokens"),
    ],
)
def test_where_the_error_is_stands_in_a_sentence(wrong: slice, words: str) -> None:
    """Stretches, their ends and single tokens are named by position, and by the model's own edge where it is one."""
    honest = 1e-3 * EXPECTED.norm(dim=1)
    actual = EXPECTED + 1e-3 * normal(TOKENS, WIDTH, seed=7)
    actual[wrong] *= 1.5
    said = region(actual=actual, expected=EXPECTED, noise=honest, first=100, edges={"window": 132})
    assert words in said


def test_growth_is_told_and_flat_errors_are_not() -> None:
    """An error that grows with position is called so; one that is everywhere alike has no place to name."""
    honest = 1e-3 * EXPECTED.norm(dim=1)
    slope = 1 + 0.01 * torch.arange(TOKENS)[:, None]
    assert "grows with position" in region(actual=EXPECTED * slope, expected=EXPECTED, noise=honest, first=0, edges={})
    assert region(actual=EXPECTED * 1.5, expected=EXPECTED, noise=honest, first=0, edges={}) == ""
    assert region(actual=EXPECTED, expected=EXPECTED, noise=honest, first=0, edges={}) == ""


def test_the_first_value_that_is_not_finite_is_named() -> None:
    """NaN is told by the position where it begins."""
    actual = EXPECTED.clone()
    actual[17, 3] = torch.nan
    said = region(actual=actual, expected=EXPECTED, noise=EXPECTED.norm(dim=1), first=0, edges={})
    assert said.startswith("not finite from position 17 on (1 of 48")


SMALL = 5e-4 * normal(TOKENS, WIDTH, seed=8)
GATE = normal(TOKENS, WIDTH, seed=10)
SILU = torch.nn.functional.silu(GATE)


def explained(actual: Tensor, expected: Tensor, **more) -> str:
    """Return the words of what explains nearly all of an error, or an empty string."""
    found = best_pattern(Matrix(actual=actual, expected=expected, **more))
    return found.words if found is not None and found.left < 0.1 else ""


def test_another_function_is_named_where_the_own_one_is_recognised() -> None:
    """GELU in place of SiLU is told with its input; of values that no known function gives nothing is claimed."""
    actual = torch.nn.functional.gelu(GATE) + SMALL
    said = explained(actual, SILU, around={"layers.0.mlp.gate_proj": GATE})
    assert said == "GELU of layers.0.mlp.gate_proj, where SiLU is due"
    assert explained(actual, EXPECTED, around={"layers.0.mlp.gate_proj": GATE}) == ""


def test_a_soft_cap_is_told_with_its_size() -> None:
    """A cap that is there too much, and one that is missing, are read off the largest value."""
    capped = 1.5 * torch.tanh(EXPECTED / 1.5)
    assert explained(capped, EXPECTED) == "a soft cap of 1.5 that does not belong there"
    assert explained(EXPECTED, capped) == "no soft cap, where one of 1.5 is due"


def test_factors_by_token_are_tried_on_other_channels_than_they_are_read_from() -> None:
    """A factor of each token is recognised; noise gains nothing from having one."""
    factor = 1 + 0.3 * normal(TOKENS, 1, seed=11)
    assert "for each token (" in explained(EXPECTED * factor + SMALL, EXPECTED)
    by_heads = 1 + 0.3 * normal(TOKENS, HEADS, 1, seed=11)
    assert "in each head" in explained(by_head(lambda x: x * by_heads)(EXPECTED), EXPECTED, heads=HEADS)
    assert explained(EXPECTED + 0.3 * normal(TOKENS, WIDTH, seed=12), EXPECTED, heads=HEADS) == ""


def test_weights_of_a_choice_are_traced_to_its_scores() -> None:
    """Raw logits in place of normalised sigmoids are told, and what was due; weights from elsewhere are not."""
    logits = normal(TOKENS, 8, seed=13)
    ids = logits.topk(4).indices
    chosen = {"layers.1.moe.router": (logits, ids)}
    taken = torch.sigmoid(logits).gather(-1, ids)
    due = 2.5 * taken / taken.sum(-1, keepdim=True)
    said = explained(logits.gather(-1, ids), due, chosen=chosen)
    assert said.startswith("the weights of the chosen as layers.1.moe.router itself, not normalised; due is a sigmoid")
    assert explained(normal(TOKENS, 4, seed=14), due, chosen=chosen) == ""


OWNER = torch.stack((torch.arange(TOKENS) % 5, torch.arange(TOKENS) % 3 + 5), 1)
PARTS = normal(TOKENS, 2, WIDTH, seed=15)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (torch.where(OWNER == 6, 1.1, 1.0), "expert 6 1.1 times"),
        (1 - (torch.arange(TOKENS) >= 40).double()[:, None] * torch.tensor([0.0, 1.0]), "the first at token 40"),
        (1 + 0.4 * normal(TOKENS, 2, seed=16), "with other weights"),
    ],
)
def test_shares_are_read_back_from_their_sum(factor: Tensor, words: str) -> None:
    """One expert too large, shares left out, shares weighed otherwise; noise is none of them."""
    total = PARTS.sum(1)
    actual = (PARTS * factor[..., None]).sum(1) + 1e-4 * normal(TOKENS, WIDTH, seed=17)
    assert words in explained(actual, total, parts=PARTS, owner=OWNER)
    noise = total + 0.3 * normal(TOKENS, WIDTH, seed=17)
    assert explained(noise, total, parts=PARTS, owner=OWNER) == ""


def attend(scores: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """Return what heads mix of values [H, T, D] by scores [H, T, T] where keys are seen, [T, H * D]."""
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
    return (weights @ values).transpose(0, 1).flatten(1)


SCORES, VALUES = normal(HEADS, TOKENS, TOKENS, seed=18), normal(HEADS // 2, TOKENS, SIZE, seed=19)
SEEN = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
WINDOW = SEEN & ~SEEN.tril(-5)


@pytest.mark.parametrize(
    ("scores", "seen", "due", "words"),
    [
        (1.2 * SCORES, SEEN, SEEN, "scores 1.2 times as large: the softmax scale"),
        (SCORES, SEEN.roll(1, 0) | SEEN, SEEN, ""),
        (SCORES, torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(1), SEEN, "one key of the future"),
        (SCORES, SEEN & (torch.arange(TOKENS) > 0) | torch.eye(TOKENS).bool(), SEEN, "all keys but the first"),
        (SCORES, SEEN & ~SEEN.tril(-4), WINDOW, "last 4 keys only: a window"),
        (SCORES, SEEN, WINDOW, "5 back and further too: a window"),
        (normal(HEADS, TOKENS, TOKENS, seed=20), SEEN, SEEN, "the right values with other weights"),
    ],
)
def test_weights_of_an_attention_are_read_back(scores: Tensor, seen: Tensor, due: Tensor, words: str) -> None:
    """Scale, mask and window are told by the weights of early tokens, with grouped heads; the same weights are not."""
    spread = VALUES.repeat_interleave(2, 0)
    around = {"layers.0.attn.v_proj": VALUES.transpose(0, 1).flatten(1)}
    expected = attend(SCORES, spread, due)
    actual = attend(scores, spread, seen) + 1e-5 * normal(TOKENS, WIDTH, seed=21)
    assert words in explained(actual, expected, heads=HEADS, around=around)
    other = {"layers.0.attn.v_proj": normal(TOKENS, WIDTH // 2, seed=22)}
    assert explained(actual, expected, heads=HEADS, around=other) == "" or not words


@pytest.mark.parametrize("joined", [True, False])
def test_weights_behind_a_gate_are_read_back(joined: bool) -> None:
    """Each head's mean may go through a sigmoid, of a projection of its own or of a half of the queries' one."""
    spread, gate = VALUES.repeat_interleave(2, 0), normal(TOKENS, HEADS, SIZE, seed=23)
    through = torch.sigmoid(gate).flatten(1)
    queries = torch.stack([normal(TOKENS, HEADS, SIZE, seed=24), gate], 2).flatten(1)
    around = {
        "layers.0.attn.v_proj": VALUES.transpose(0, 1).flatten(1),
        "layers.0.attn.q_proj": queries if joined else gate.flatten(1),
    }
    expected = attend(4 * SCORES, spread, SEEN) * through
    actual = attend(4 * SCORES, spread, torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(1)) * through
    actual = actual + 1e-5 * normal(TOKENS, WIDTH, seed=21)
    assert "one key of the future" in explained(actual, expected, heads=HEADS, around=around)
    del around["layers.0.attn.q_proj"]
    assert "future" not in explained(actual, expected, heads=HEADS, around=around)
