"""The writers of number formats against torch's conversions and against the loader's own decoders."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reference_impl import encoders
from reference_impl.loader import decode_fp8_block, decode_mxfp4


@pytest.fixture
def values() -> encoders.Floats:
    return np.random.RandomState(1).standard_normal((70, 96)) * np.random.RandomState(2).choice([0.01, 1, 30], (70, 1))


def test_bf16_rounds_as_torch_does(values):
    """encode_bf16 gives the bits of torch's own rounding, ties to even included."""
    ties = np.array([[1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 0.0]])
    for case in (values, ties):
        expected = torch.from_numpy(case.astype(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(encoders.encode_bf16(case), expected)


def test_fp8_codes_round_as_torch_does(values):
    """With one block, the FP8 values are torch's rounding of the scaled ones, and only the multiplier is ours."""
    codes, scale_inv = encoders.encode_fp8_block(values, (128, 128))
    scaled = torch.from_numpy(values / np.float64(scale_inv[0, 0])).float()
    assert scale_inv.shape == (1, 1)
    found = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    assert torch.equal(found, scaled.to(torch.float8_e4m3fn).float())


def test_fp8_decoder_knows_every_code():
    """The loader's decoder gives torch's value for each of the 256 bytes, NaN where torch has NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    expected = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(decode_fp8_block(codes, torch.ones(1, 1), (128, 128)).nan_to_num(7e7), expected.nan_to_num(7e7))


def test_fp8_edge_blocks_are_partial(values):
    """Blocks that the matrix does not fill keep their own multiplier; a transposed grid would not fit."""
    codes, scale_inv = encoders.encode_fp8_block(values, (32, 64))
    assert scale_inv.shape == (3, 2)
    decoded = decode_fp8_block(torch.from_numpy(codes), torch.from_numpy(scale_inv), (32, 64)).numpy()
    half_step = np.repeat(np.repeat(scale_inv * 16.0001, 32, 0)[:70], 64, 1)[:, :96]
    assert (np.abs(decoded - values) <= half_step).all()
    assert np.abs(decoded - values).max() > 0


def test_mxfp4_bytes_are_read_low_nibble_first():
    """A hand-written block decodes to the values of the standard; swapped nibbles would give others."""
    packed = torch.tensor([[0x21, 0xF3] + [0] * 14], dtype=torch.uint8)
    decoded = decode_mxfp4(packed, torch.tensor([[128]], dtype=torch.uint8))
    assert decoded.shape == (1, 32)
    assert decoded[0, :4].tolist() == [1.0, 2.0, 3.0, -12.0]


def test_mxfp4_keeps_what_it_can_hold(values):
    """Encoding decoded MXFP4 values again gives them back exactly; the first encoding errs by half a step at most."""
    decoded = decode_mxfp4(*map(torch.from_numpy, encoders.encode_mxfp4(values))).double().numpy()
    again = decode_mxfp4(*map(torch.from_numpy, encoders.encode_mxfp4(decoded))).double().numpy()
    assert np.array_equal(again, decoded)
    top = np.abs(values.reshape(70, 3, 32)).max(-1, keepdims=True)
    unit = 2.0 ** (np.floor(np.log2(top)) - 2)
    assert (np.abs(decoded.reshape(70, 3, 32) - values.reshape(70, 3, 32)) <= np.maximum(unit, top - 6 * unit)).all()
