"""What explains a weight that differs: every known mistake by its own words, made here on the stored bytes by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from checkpoint_files import write
from quantised_weights import weights

from harness.checkpoint import decode, logical_tensors, open_checkpoint
from harness.checkpoint.causes import causes_of, stored_weight
from harness.checkpoint.causes.permuted import order_words
from harness.checkpoint.formats import decode_parts

DRAW = torch.Generator().manual_seed(3)
RIGHT = torch.randn(64, 48, generator=DRAW).bfloat16()


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return the weight, its stored parts and its right value, by format."""
    found = {}
    for name, (tensors, config) in weights().items():
        checkpoint = open_checkpoint(write(tmp_path_factory.mktemp("causes") / name, tensors, config=config))
        (logical,) = logical_tensors(checkpoint)
        assert not logical.problem, logical.problem
        parts = {role: checkpoint.read(part) for role, part in logical.parts.items()}
        found[name] = logical, parts, decode(checkpoint, logical)
    return found


def said(held, logical, parts, right):
    found = causes_of(held=held, expected=right, logical=logical, parts=parts)
    return found.words if found is not None else ""


def nibbles_swapped(value):
    raw = value.view(torch.uint8).int()
    return ((raw >> 4) | ((raw & 0xF) << 4)).to(torch.uint8).view(value.dtype)


def exponent_plus(step):
    return lambda s: (s.view(torch.uint8).int() + step).to(torch.uint8).view(s.dtype)


def exponents_as_numbers(scale):
    return scale.float()


FP8, MX, NV = "fp8_block", ("mxfp4", "mxfp4_int8", "mxfp4_blocks"), ("nvfp4_multiplier", "nvfp4_divisor")
PARTS = [
    *((f, "weight", nibbles_swapped, "nibbles of each byte swapped") for f in (*MX, *NV, "int4_packed", "gptq_v1")),
    *((f, "scale", exponent_plus(-1), "exponent off by one: bias 128") for f in MX),
    *((f, "scale", exponent_plus(1), "exponent off by one: bias 126") for f in MX),
    *((f, "scale", lambda s: s.roll(1, -1), "block of columns before") for f in (*MX, *NV, FP8, "int4_packed")),
    *((f, "scale", lambda s: s.reshape(s.shape[::-1]).t().contiguous(), "transposed") for f in (FP8, "mxfp4", NV[0])),
    *((f, "global", lambda s: 1 / s, "global scale inverted") for f in NV),
    *((f, "global", torch.ones_like, "global scale dropped") for f in NV),
    (FP8, "scale", lambda s: 1 / s, "reciprocal of each scale"),
    (FP8, "scale", torch.ones_like, "missing scale taken as 1"),
    (FP8, "scale", lambda s: torch.exp2(torch.log2(s).round()), "nearest power of two"),
    (FP8, "scale", lambda s: torch.exp2(torch.log2(s).floor()), "rounded down to a power of two"),
    (FP8, "scale", lambda s: s.bfloat16().float(), "rounded to bfloat16"),
    (FP8, "weight", lambda w: w.view(torch.float8_e4m3fnuz), "FNUZ"),
    (FP8, "weight", lambda w: (w.view(torch.uint8) & 0x7F).view(w.dtype), "sign bit ignored"),
    ("fp8_channel", "scale", lambda s: s[:1].expand_as(s).contiguous(), "first row for all"),
    ("gptq_v1", "group", lambda g: (torch.arange(len(g)) // 32).int(), "g_idx"),
    ("awq", "scale", lambda s: s.roll(-1, 0), "next block of columns"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "role", "change", "words"), PARTS, ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_read_wrongly_is_named(stored, format, role, change, words, dtype):
    """A weight decoded from one part that was read wrongly is explained by that mistake, in either precision."""
    logical, parts, right = stored[format]
    held = decode_parts(logical, {**parts, role: change(parts[role])}).to(dtype)
    assert words in said(held, logical, parts, right)


@pytest.mark.parametrize("format", list(weights()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_right_weight_needs_no_cause(stored, format, dtype):
    """Twin: what is decoded rightly differs in nothing, and written out by place it is the same."""
    logical, parts, right = stored[format]
    assert causes_of(held=right.to(dtype), expected=right, logical=logical, parts=parts) is None
    by_place = stored_weight(logical, parts)
    assert torch.allclose(by_place.rows(torch.arange(by_place.shape[0])).reshape(right.shape), right, rtol=1e-6, atol=0)


def test_scale_bytes_read_as_numbers(stored):
    """Exponent bytes multiplied in as they are."""
    logical, parts, right = stored["mxfp4"]
    codes = right / torch.exp2(parts["scale"].float() - 127).repeat_interleave(32, 1)
    held = codes * parts["scale"].float().repeat_interleave(32, 1)
    assert "scale byte read as a number" in said(held.bfloat16(), logical, parts, right)


def test_a_block_size_from_the_shape(stored):
    """320 rows in 3 blocks are 128 a block, not 107: as in a loader that divides and rounds up."""
    logical, parts, right = stored[FP8]
    scale, codes = parts["scale"], parts["weight"].float()
    held = codes * scale[(torch.arange(320) // 107)][:, torch.arange(640) // 128]
    assert "block size taken from the shape" in said(held, logical, parts, right)


def test_scales_not_cut_with_the_weight(stored):
    """Every rank of four takes the first columns' scales; and a cut that is no multiple of a block is named."""
    logical, parts, right = stored[FP8]
    scale, codes, column = parts["scale"], parts["weight"].float(), torch.arange(640)
    rows = scale[torch.arange(320) // 128]
    held = codes * rows[:, column % 320 // 128]
    assert "scales not cut with the weight" in said(held, logical, parts, right)
    held = codes * rows[:, column // 320 * 320 // 128 + column % 320 // 128]
    assert "cut through a block" in said(held, logical, parts, right)


@pytest.mark.parametrize(("bits", "words"), [(4, "arithmetic"), (8, "")])
def test_signed_bytes_shifted(stored, bits, words):
    """The high nibble of a signed byte shifted arithmetically, its sign lost; twin: shifted as it should be."""
    logical, parts, right = stored["mxfp4_int8"]
    high = right[:, 1::2]
    held = right.clone()
    held[:, 1::2] = high.abs() if bits == 4 else high
    words = said(held, logical, parts, right)
    assert ("shifted as a signed number, its sign lost" in words) is (bits == 4)


def test_zero_points_of_the_other_version(stored):
    """Version 1 of GPTQ stores zero points less one: a reader of version 2 is off by one everywhere."""
    logical, parts, right = stored["gptq_v1"]
    scale = parts["scale"].float().t()[:, parts["group"].long()]
    assert "zero point off by one (GPTQ version 1" in said((right + scale).half(), logical, parts, right)


def test_offset_and_twos_complement(stored):
    """Stored plus 8: a reader that does not subtract it, and one that reads two's complement."""
    logical, parts, right = stored["int4_packed"]
    scale = parts["scale"].float().repeat_interleave(32, 1)
    q = (right / scale).round() + 8
    assert "offset of 8 not subtracted" in said((q * scale).bfloat16(), logical, parts, right)
    signed = torch.where(q < 8, q, q - 16)
    assert "two's complement" in said((signed * scale).bfloat16(), logical, parts, right)


def test_half_precision_dequantisation_and_two_mistakes(stored):
    """Products in float16 overflow or lose digits; two mistakes at once are told together."""
    logical, parts, right = stored[FP8]
    scale = parts["scale"][torch.arange(320) // 128][:, torch.arange(640) // 128]
    held = (parts["weight"].half() * scale.half()).float()
    assert "float16 dequantisation" in said(held, logical, parts, right)
    logical, parts, right = stored["mxfp4"]
    both = {"weight": nibbles_swapped(parts["weight"]), "scale": exponent_plus(-1)(parts["scale"])}
    words = said(decode_parts(logical, both), logical, parts, right)
    assert "swapped" in words
    assert "off by one" in words


@pytest.mark.parametrize("mistaken", [True, False])
def test_a_mistake_below_another_rounding(stored, mistaken):
    """A port that holds FP8 of what it misread is near to that reading; twin: FP8 of the right values is a rounding."""
    logical, parts, right = stored["mxfp4"]
    weight = nibbles_swapped(parts["weight"]) if mistaken else parts["weight"]
    value = decode_parts(logical, {**parts, "weight": weight})
    step = value.abs().amax(1, keepdim=True) / 100.7
    words = said((value / step).to(torch.float8_e4m3fn).float() * step, logical, parts, right)
    assert ("nibbles of each byte swapped" in words) is mistaken
    assert ("one more rounding" in words) is mistaken


VALUES = [
    (-RIGHT, "sign turned"),
    (RIGHT + 1, "1 more than"),
    (RIGHT * 4, "4 times"),
    (RIGHT.float() * math.sqrt(48), "square root of 48"),
    (RIGHT.float().half(), ""),
    (RIGHT.to(torch.float8_e5m2).bfloat16(), "e5m2 without a scale"),
    (RIGHT.clamp(-1, 1), "clipped at 1"),
    (RIGHT.view(torch.int16).view(torch.float16), "bits read as float16"),
    (RIGHT.view(torch.uint8).reshape(64, 48, 2).flip(-1).contiguous().view(torch.bfloat16)[..., 0], "bytes swapped"),
    (RIGHT.reshape(48, 64).t(), "transposed shape (a view"),
    (RIGHT.roll(1, 0), "rows shifted by 1"),
    (RIGHT.roll(3, 1), "columns shifted by 3"),
    (RIGHT.flatten().roll(4).reshape(64, 48), "starts 4 too early"),
    (RIGHT.reshape(4, 2, 8, 48).transpose(1, 2).reshape(64, 48), "within each 16: halves woven"),
    (RIGHT.reshape(4, 8, 2, 48).transpose(1, 2).reshape(64, 48), "within each 16: every second one together"),
    (torch.cat((RIGHT[32:], RIGHT[:32])), "first and second half exchanged"),
    (torch.cat((RIGHT[:8], RIGHT[16:24], RIGHT[8:16], RIGHT[24:])), "rows 8 to 15 and 16 to 23 exchanged"),
    (RIGHT.flip(0), "reversed order"),
    (torch.zeros(64, 48), "zeros: never written"),
    (torch.full((64, 48), float("nan")), "NaN"),
    (0.02 * torch.randn(64, 48, generator=DRAW), "deviation 0.02: filled by initialisation"),
    ((2 * torch.rand(64, 48, generator=DRAW) - 1) / math.sqrt(48), "default of a linear layer: filled by init"),
    (RIGHT.float() + 0.5 * torch.randn(64, 48, generator=DRAW), "another export"),
]  # fmt: skip


@pytest.mark.parametrize(("held", "words"), VALUES, ids=[w or "right" for _, w in VALUES])
def test_what_was_done_to_plain_values_is_named(held, words):
    """Signs, factors, roundings, orders, offsets and what was never written have words of their own."""
    found = causes_of(held=held, expected=RIGHT)
    assert words in found.words if words else found is None


def test_a_part_and_a_single_bit():
    """A mistake in some rows is told as such; one flipped bit is told as a bit, and another value as nothing known."""
    held = RIGHT.clone()
    held[40:] = 0
    assert causes_of(held=held, expected=RIGHT).words.startswith("zeros in part of it")
    held = RIGHT.clone()
    held.view(torch.int16)[3, 5] ^= 1 << 9
    assert "bit 9 of 16: a flipped bit" in causes_of(held=held, expected=RIGHT).words
    held = RIGHT.clone()
    held[3, 5] += 0.37
    assert causes_of(held=held, expected=RIGHT) is None


def test_rows_in_their_places_are_no_shift():
    """Rows of which one is no row of the checkpoint, and all others lie where they belong, are not called shifted."""
    places = np.arange(100)
    places[7] = -1
    assert order_words(places) == ""
