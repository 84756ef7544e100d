"""Decoders against values worked out by hand, on shapes that are neither square nor whole blocks."""

from __future__ import annotations

import math

import pytest
import torch

from harness.checkpoint import decoders as dec
from harness.errors import CheckpointError

MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_e2m1_codes():
    """All sixteen codes have their value, the low nibble is the even element, and signed bytes read alike."""
    packed = torch.tensor([[2 * i + ((2 * i + 1) << 4) for i in range(8)]], dtype=torch.uint8)
    expected = [*MAGNITUDES, *(-m for m in MAGNITUDES)]
    assert dec.unpack_e2m1(packed).tolist() == [expected]
    assert dec.unpack_e2m1(packed.view(torch.int8)).tolist() == [expected]


def test_e8m0_bytes():
    """A scale byte s is 2^(s-127): never s, never 2^s; 0 is a denormal, 255 is NaN."""
    values = dec.decode_e8m0(torch.tensor([0, 1, 126, 127, 128, 130, 254, 255], dtype=torch.uint8))
    assert values[:7].tolist() == [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 8.0, 2.0**127]
    assert math.isnan(values[7])


def test_fp8_blocks_with_partial_edges():
    """A 5x7 matrix in blocks of 2x3 takes its scale from a 3x3 grid; the last row and column of blocks are partial."""
    codes = torch.arange(1, 36).reshape(5, 7).to(torch.float32) % 13
    scale = torch.tensor([[1.0, 10.0, 100.0], [0.3, 0.7, 0.9], [-2.0, 5.0, 7.0]])
    value = dec.decode_fp8_block(codes.to(torch.float8_e4m3fn), scale, (2, 3))
    for row in range(5):
        for column in range(7):
            expected = torch.tensor(float(codes[row, column])) * scale[row // 2, column // 3]
            assert value[row, column] == expected


def test_fp8_block_scales_of_another_grid_are_refused():
    """A transposed grid, or one from another block size, is an error and not a broadcast."""
    codes = torch.ones(5, 7).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"\[3, 2\].*found \[2, 3\]"):
        dec.decode_fp8_block(codes, torch.ones(2, 3), (2, 4))
    with pytest.raises(CheckpointError):
        dec.decode_fp8_block(codes, torch.ones(1, 1), (2, 4))


def test_fp8_dialects():
    """The same bits are half as much in the FNUZ dialect, and its byte 0x80 is NaN."""
    bits = torch.tensor([[0x38, 0x80]], dtype=torch.uint8)
    one = torch.ones(1, 1)
    usual = dec.decode_fp8_block(bits.view(torch.float8_e4m3fn), one, (1, 2))
    fnuz = dec.decode_fp8_block(bits.view(torch.float8_e4m3fnuz), one, (1, 2))
    assert usual.tolist() == [[1.0, 0.0]]
    assert fnuz[0, 0] == 0.5
    assert math.isnan(fnuz[0, 1])


@pytest.mark.parametrize("shape", [(3,), (3, 1), (1,), ()])
def test_fp8_channel(shape):
    """One scale for each row, or one for all."""
    codes = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    scale = torch.arange(2, 2 + max(1, math.prod(shape))).to(torch.float32).reshape(shape)
    expected = codes * (scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(1, 1))
    assert torch.equal(dec.decode_fp8_channel(codes.to(torch.float8_e4m3fn), scale), expected)


def test_mxfp8():
    """32 elements along the input share a scale byte; the last block of 40 columns has eight."""
    codes = torch.ones(2, 40).to(torch.float8_e4m3fn)
    value = dec.decode_mxfp8(codes, torch.tensor([[127, 128], [126, 124]], dtype=torch.uint8))
    assert value[0].tolist() == [1.0] * 32 + [2.0] * 8
    assert value[1].tolist() == [0.5] * 32 + [0.125] * 8


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_mxfp4(dtype):
    """A 2x48 weight has one and a half blocks a row; a high nibble with its sign bit set survives a signed byte."""
    packed = torch.full((2, 24), 0xF2, dtype=torch.uint8).view(dtype)  # 1, -6, 1, -6, ...
    scale = torch.tensor([[127, 128], [120, 130]], dtype=torch.uint8)
    value = dec.decode_mxfp4(packed, scale)
    assert value.shape == (2, 48)
    assert value[0, 30:34].tolist() == [1.0, -6.0, 2.0, -12.0]
    assert value[1, 30:34].tolist() == [2.0**-7, -6 * 2.0**-7, 8.0, -48.0]
    with_type = dec.decode_mxfp4(packed, scale.view(torch.float8_e8m0fnu))
    assert torch.equal(value, with_type)


def test_mxfp4_blocks_of_gpt_oss():
    """blocks [E, out, in/32, 16] and scales [E, out, in/32] give [E, out, in], low nibble first."""
    draw = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (2, 3, 2, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(120, 132, (2, 3, 2), generator=draw, dtype=torch.uint8)
    value = dec.decode_mxfp4_blocks(blocks, scales)
    assert value.shape == (2, 3, 64)
    byte, signed = int(blocks[1, 2, 1, 5]), [*MAGNITUDES, *(-m for m in MAGNITUDES)]
    factor = 2.0 ** (int(scales[1, 2, 1]) - 127)
    assert value[1, 2, 32 + 10] == signed[byte & 15] * factor
    assert value[1, 2, 32 + 11] == signed[byte >> 4] * factor


def test_nvfp4_multiplies_or_divides():
    """The global scale multiplies in one dialect and divides in the other."""
    packed = torch.full((1, 12), 0x22, dtype=torch.uint8)  # ones
    scale = torch.tensor([[2.0, 0.5]]).to(torch.float8_e4m3fn)
    multiplied = dec.decode_nvfp4(packed, scale, torch.tensor([4.0]), divisor=False)
    divided = dec.decode_nvfp4(packed, scale, torch.tensor([4.0]), divisor=True)
    assert multiplied.tolist() == [[8.0] * 16 + [2.0] * 8]
    assert divided.tolist() == [[0.5] * 16 + [0.125] * 8]


def test_int4_packed():
    """Element j of a word is at bits 4j and stored as q + 8; the last word and the last group are partial."""
    q = (torch.arange(2 * 20).reshape(2, 20) * 7) % 16 - 8
    words = torch.zeros(2, 3, dtype=torch.int64)
    for row in range(2):
        for column in range(20):
            words[row, column // 8] |= (int(q[row, column]) + 8) << (4 * (column % 8))
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    scale = torch.tensor([[0.5, 3.0, 0.25], [2.0, 1.0, 0.125]]).to(torch.bfloat16)
    value = dec.decode_int4_packed(packed, scale, (2, 20), group=8)
    expected = q * scale.to(torch.float32).repeat_interleave(8, dim=1)[:, :20]
    assert torch.equal(value, expected)
    with pytest.raises(CheckpointError, match="groups of 4"):
        dec.decode_int4_packed(packed, scale, (2, 20), group=4)


def test_int4_zero_points():
    """A packed zero point is taken from the codes before they are scaled: (q - z) s."""
    q, zero = torch.tensor([[3, -8, 7, 0]]), -2
    word = sum((int(v) + 8) << (4 * j) for j, v in enumerate(q[0]))
    packed = torch.tensor([[word]], dtype=torch.int32)
    point = torch.tensor([[zero + 8]], dtype=torch.int32)
    value = dec.decode_int4_packed(packed, torch.tensor([[0.5]]), (1, 4), group=None, zero_point=point)
    assert value.tolist() == [[2.5, -3.0, 4.5, 1.0]]
