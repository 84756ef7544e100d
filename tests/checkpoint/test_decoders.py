"""Decoders against values worked out by hand, on shapes that are neither square nor whole blocks."""

from __future__ import annotations

import math

import pytest
import slow_decoders as slow
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


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Say whether two float32 tensors are equal bit for bit, any NaN like any other."""
    a, b = actual.nan_to_num(12345.0, math.inf, -math.inf), expected.nan_to_num(12345.0, math.inf, -math.inf)
    return a.dtype == b.dtype and torch.equal(a, b) and torch.equal(torch.signbit(a), torch.signbit(b))


EIGHT_BIT = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@pytest.mark.parametrize("dtype", EIGHT_BIT)
def test_every_code_of_every_8_bit_float(dtype):
    """All 256 codes of each dialect, worked out from their bits, are what torch makes of them; FNUZ has one NaN."""
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 256)
    value = dec.decode_fp8_channel(codes.view(dtype), torch.tensor(1.0))
    assert same(value, codes.view(dtype).to(torch.float32))
    if "fnuz" in str(dtype):
        assert torch.nonzero(value.isnan()).tolist() == [[0, 128]]


def test_every_code_and_every_scale_byte_of_mxfp4():
    """256 scale bytes times 16 codes are what the formula gives, in float32 and in bfloat16, both nibbles."""
    packed = torch.tensor([c | ((15 - c) << 4) for c in range(16)], dtype=torch.uint8).expand(256, 16).contiguous()
    scale = torch.arange(256, dtype=torch.uint8).reshape(256, 1)
    expected = slow.mxfp4(packed, scale)
    assert same(dec.decode_mxfp4(packed, scale), expected)
    assert same(dec.decode_mxfp4(packed, scale, dtype=torch.bfloat16).to(torch.float32), expected)


@pytest.mark.parametrize(("rows", "half"), [(3, 16), (5, 23), (1, 1), (2, 33), (0, 16), (3, 0)])
def test_mxfp4_of_odd_shapes(rows, half):
    """Widths that are no whole number of blocks, odd numbers of bytes and empty weights decode as the formula says."""
    draw = torch.Generator().manual_seed(rows + half)
    packed = torch.randint(0, 256, (rows, half), generator=draw, dtype=torch.uint8)
    scale = torch.randint(100, 150, (rows, -(-2 * half // 32)), generator=draw, dtype=torch.uint8)
    assert same(dec.decode_mxfp4(packed, scale), slow.mxfp4(packed, scale))


def test_a_slice_at_an_odd_byte_decodes():
    """Bytes that start at an odd place of their buffer decode like a copy of them."""
    draw = torch.Generator().manual_seed(7)
    packed = torch.randint(0, 256, (97,), generator=draw, dtype=torch.uint8)[1:].reshape(3, 32)
    scale = torch.full((3, 2), 130, dtype=torch.uint8)
    assert same(dec.decode_mxfp4(packed, scale), slow.mxfp4(packed, scale))


@pytest.mark.parametrize("strip", [1, 7, 40, 1 << 17])
@pytest.mark.parametrize("dtype", EIGHT_BIT)
def test_blocks_do_not_depend_on_strips(monkeypatch, strip, dtype):
    """Block scales of a stack of matrices are right however many rows are decoded at once; edge blocks are partial."""
    monkeypatch.setattr(dec, "_STRIP_ELEMENTS", strip)
    draw = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 256, (2, 7, 11), generator=draw, dtype=torch.uint8).view(dtype)
    scale = torch.randn(2, 3, 3, generator=draw)
    value = dec.decode_fp8_block(codes, scale, (3, 4))
    for matrix in range(2):
        assert same(value[matrix], slow.blocks(codes[matrix].to(torch.float32), scale[matrix], (3, 4)))


def test_half_precision_and_byte_scales_of_blocks():
    """Scales in bfloat16 and as E8M0 bytes multiply as the numbers that they stand for."""
    codes = torch.arange(35, dtype=torch.uint8).reshape(5, 7).view(torch.float8_e4m3fn)
    grid = torch.tensor([[1.5, 0.25], [3.0, 7.0], [0.5, 0.125]])
    expected = slow.blocks(codes.to(torch.float32), grid, (2, 4))
    assert same(dec.decode_fp8_block(codes, grid.to(torch.bfloat16), (2, 4)), expected)
    bytes_ = torch.tensor([[127, 128], [120, 255], [0, 254]], dtype=torch.uint8)
    meant = torch.tensor([[slow.e8m0(int(b)) for b in row] for row in bytes_])
    value = dec.decode_fp8_block(codes, bytes_.view(torch.float8_e8m0fnu), (2, 4))
    assert same(value, slow.blocks(codes.to(torch.float32), meant, (2, 4)))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 1)])
def test_fnuz_with_scales_of_tensor_and_channel(dtype, shape):
    """The FNUZ dialects take one scale, or one a row, like the others."""
    codes = torch.arange(15, dtype=torch.uint8).reshape(3, 5).view(dtype)
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    by_row = scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(1, 1)
    expected = slow.blocks(codes.to(torch.float32), by_row, (1 if scale.numel() > 1 else 3, 5))
    assert same(dec.decode_fp8_channel(codes, scale), expected)


def test_a_stack_takes_one_scale_a_matrix():
    """[E, O, I] with scales [E] or [E, 1, 1] has one scale for each matrix; [E] is not one for each row of a matrix."""
    codes = torch.full((2, 3, 4), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for shape in ((2,), (2, 1, 1)):
        value = dec.decode_fp8_channel(codes, torch.tensor([2.0, 3.0]).reshape(shape))
        assert value[:, 2, 3].tolist() == [2.0, 3.0]
    with pytest.raises(CheckpointError):
        dec.decode_fp8_channel(codes, torch.ones(3))


@pytest.mark.parametrize("divisor", [True, False])
def test_nvfp4_against_the_formula(divisor):
    """Every scale code and a width of one and a half blocks: scales are multiplied first, then the codes."""
    draw = torch.Generator().manual_seed(4)
    packed = torch.randint(0, 256, (64, 12), generator=draw, dtype=torch.uint8)
    scale = (torch.arange(128, dtype=torch.uint8) % 127).reshape(64, 2).view(torch.float8_e4m3fn)
    value = dec.decode_nvfp4(packed, scale, torch.tensor([0.37]), divisor=divisor)
    overall = float(torch.tensor(0.37))
    assert same(value, slow.nvfp4(packed, scale, overall, divisor=divisor))


def test_gpt_oss_blocks_as_transformers_loads_them():
    """The gpt-oss layout decodes to what transformers makes of it, which holds it as [E, in, out]."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    draw = torch.Generator().manual_seed(6)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(110, 140, (2, 6, 3), generator=draw, dtype=torch.uint8)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert same(dec.decode_mxfp4_blocks(blocks, scales), theirs.transpose(1, 2).contiguous())
