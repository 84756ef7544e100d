"""What wrong weights look like: each kind of difference has its words, and right ones have none."""

from __future__ import annotations

import pytest
import torch

from harness.checkpoint.values import pattern_of

RIGHT = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (RIGHT.to(torch.float8_e4m3fn).bfloat16(), "rounded through a narrower format"),
        ((RIGHT * 2.0).round() / 2.0, ""),
        (RIGHT * 1.25, "1.25 times"),
        (torch.zeros_like(RIGHT), "zeros"),
        (RIGHT.flip(0), "in another order"),
        (torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).bfloat16(), "unlike the checkpoint's"),
        (RIGHT, ""),
    ],
)
def test_what_memory_holds_is_told(held, words):
    """A rounding, a scale, nothing, another order and foreign values are told apart; one bit left is none of them."""
    said = pattern_of(actual=held, expected=RIGHT.float())
    assert words in said if words else said == ""
