from __future__ import annotations

import pytest
import torch

from accel_impl import formats


def test_every_scale_byte_is_its_power_of_two() -> None:
    """An E8M0 byte s means 2^(s - 127), down to the subnormal end; 255 is not a number and not used."""
    values = formats.exp2_of(torch.arange(255, dtype=torch.uint8)).double()
    assert values.tolist() == [2.0 ** (s - 127) for s in range(255)]


def test_the_low_nibble_is_the_even_element() -> None:
    """An MXFP4 byte 0xA3 holds code 3 (1.5) first and code 10 (-1.0) second."""
    packed = torch.full((1, 16), 0xA3, dtype=torch.uint8)
    out = torch.empty(1, 32)
    formats.decode_mxfp4(packed, torch.tensor([[128]], dtype=torch.uint8), out)
    assert out[0, :4].tolist() == [3.0, -2.0, 3.0, -2.0]


def mxfp4(spread: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (24, 80), generator=draw, dtype=torch.uint8)
    scale = torch.randint(110, 111 + spread, (24, 5), generator=draw, dtype=torch.uint8)
    scale[:, 0], scale[:, 1] = 110, 110 + spread
    return formats.decode_mxfp4(packed, scale, torch.empty(24, 160))


def test_mxfp4_survives_fp8_while_exponents_lie_within_fourteen() -> None:
    """Groups of one FP8 block whose exponents spread by at most 14 convert without any loss."""
    values = mxfp4(14)
    held, lossy = formats.fp8_from_values(values)
    assert lossy == 0
    assert torch.equal(held.decode(torch.float32), values)


def test_a_wider_spread_is_reported_block_by_block() -> None:
    """Blocks that cannot hold their small groups are counted, and only they lose something."""
    values = mxfp4(20)
    held, lossy = formats.fp8_from_values(values)
    wrong = (held.decode(torch.float32) != values)[:, :128].any(-1).sum()
    assert lossy == wrong
    assert 0 < lossy <= 24
    assert torch.equal(held.decode(torch.float32)[:, 128:], values[:, 128:])


def test_zero_blocks_stay_zero() -> None:
    """A block of zeros has no largest exponent and still decodes to zeros."""
    held, lossy = formats.fp8_from_values(torch.zeros(3, 130))
    assert lossy == 0
    assert not held.decode(torch.float32).any()


@pytest.mark.parametrize(("rows", "cols"), [(range(120), range(96)), (range(120, 200), range(96, 224))])
def test_a_cut_inside_a_block_takes_its_scale_along(rows: range, cols: range) -> None:
    """A shard that starts or ends inside a 128-block decodes to the same values as the whole, cut afterwards."""
    draw = torch.Generator().manual_seed(1)
    q = torch.randn(200, 224, generator=draw).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2, generator=draw) + 0.5
    whole = formats.Fp8(q=q, scale=scale, block=(128, 128)).decode(torch.float32)
    shard = formats.fp8_shard(q, scale, (128, 128), rows, cols).decode(torch.float32)
    assert torch.equal(shard, whole[rows.start : rows.stop, cols.start : cols.stop])
    expanded = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :224]
    assert torch.equal(whole, q.float() * expanded)
