"""What wrong weights look like: each kind of difference has its words, and right ones have none."""

from __future__ import annotations

import pytest
import torch

from harness.checkpoint.causes import causes_of

RIGHT = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (RIGHT.to(torch.float8_e4m3fn).bfloat16(), "rounded through a narrower format"),
        ((RIGHT * 2.0).round() / 2.0, "like the checkpoint's"),
        (RIGHT * 1.25, "1.25 times"),
        (torch.zeros_like(RIGHT), "zeros"),
        (RIGHT.flip(0), "reversed order"),
        (torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).bfloat16(), "filled by initialisation"),
        (RIGHT, ""),
    ],
)
def test_what_memory_holds_is_told(held, words):
    """A rounding, a scale, nothing, another order and foreign values are told apart; one bit left is none of them."""
    said = causes_of(held=held, expected=RIGHT.float())
    assert said is not None and words in said.words if words else said is None
