"""Integer decoders against slow ones written from the formula, on shapes that are neither square nor whole groups."""

from __future__ import annotations

import pytest
import slow_decoders as slow
import torch

from harness.checkpoint import integers
from harness.errors import CheckpointError


def words(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return random 32-bit words, the sign bit as often set as not."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=draw).to(torch.int32)


def test_int4_packed():
    """Element j of a word is at bits 4j and stored as q + 8; the last word and the last group are partial."""
    q = (torch.arange(2 * 20).reshape(2, 20) * 7) % 16 - 8
    words = torch.zeros(2, 3, dtype=torch.int64)
    for row in range(2):
        for column in range(20):
            words[row, column // 8] |= (int(q[row, column]) + 8) << (4 * (column % 8))
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    scale = torch.tensor([[0.5, 3.0, 0.25], [2.0, 1.0, 0.125]]).to(torch.bfloat16)
    value = integers.decode_int4_packed(packed, scale, (2, 20), group=8)
    expected = q * scale.to(torch.float32).repeat_interleave(8, dim=1)[:, :20]
    assert torch.equal(value, expected)
    with pytest.raises(CheckpointError, match="groups of 4"):
        integers.decode_int4_packed(packed, scale, (2, 20), group=4)


def test_int4_zero_points():
    """A packed zero point is taken from the codes before they are scaled: (q - z) s."""
    q, zero = torch.tensor([[3, -8, 7, 0]]), -2
    word = sum((int(v) + 8) << (4 * j) for j, v in enumerate(q[0]))
    packed = torch.tensor([[word]], dtype=torch.int32)
    point = torch.tensor([[zero + 8]], dtype=torch.int32)
    value = integers.decode_int4_packed(packed, torch.tensor([[0.5]]), (1, 4), group=None, zero_point=point)
    assert value.tolist() == [[2.5, -3.0, 4.5, 1.0]]


def test_eight_bits_a_field():
    """`pack-quantized` with eight bits has four fields a word, stored as q + 128."""
    q = torch.tensor([[-128, 127, 0, 5, -1, 3]])
    packed = torch.zeros(1, 2, dtype=torch.int64)
    for j in range(6):
        packed[0, j // 4] |= (int(q[0, j]) + 128) << (8 * (j % 4))
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    value = integers.decode_int4_packed(packed, torch.tensor([[0.5, 2.0]]), (1, 6), group=3, bits=8)
    assert value.tolist() == [[-64.0, 63.5, 0.0, 10.0, -2.0, 6.0]]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("v1", [True, False])
@pytest.mark.parametrize("order", ["none", "act"])
def test_gptq(bits, v1, order):
    """Both versions, all widths, groups in file order or after act-order, on a 48x32 weight with a partial group."""
    inputs, outputs, group = 48, 32, 20
    qweight, qzeros = words((inputs * bits // 32, outputs), bits), words((3, outputs * bits // 32), bits + 9)
    draw = torch.Generator().manual_seed(3)
    scales = (torch.rand(3, outputs, generator=draw) + 0.1).to(torch.float16)
    plain = torch.arange(inputs) // group
    group_of = plain if order == "none" else plain[torch.randperm(inputs, generator=draw)]
    expected = slow.gptq(qweight, qzeros, scales, group_of, bits=bits, v1=v1)
    given = None if order == "none" else group_of.to(torch.int32)
    value = integers.decode_gptq(qweight, qzeros, scales, given, group=group, bits=bits, v1=v1)
    assert value.shape == (outputs, inputs)
    assert torch.equal(value, expected)


def test_gptq_refuses_what_does_not_fit():
    """A group index outside the scales, another number of groups, and three bits are errors."""
    qweight, qzeros, scales = words((2, 8), 1), words((2, 1), 2), torch.ones(2, 8)
    with pytest.raises(CheckpointError, match="indices"):
        integers.decode_gptq(qweight, qzeros, scales, torch.full((16,), 2), group=8, bits=4, v1=True)
    with pytest.raises(CheckpointError, match="groups of 4"):
        integers.decode_gptq(qweight, qzeros, scales, None, group=4, bits=4, v1=True)
    with pytest.raises(CheckpointError, match="bits"):
        integers.decode_gptq(qweight, qzeros, scales, None, group=8, bits=3, v1=True)


@pytest.mark.parametrize(("inputs", "outputs", "group"), [(20, 16, 8), (7, 24, 7), (32, 8, 16)])
def test_awq(inputs, outputs, group):
    """Outputs lie in the nibbles in the order 0 2 4 6 1 3 5 7, zero points alike; the last group may be partial."""
    groups = -(-inputs // group)
    qweight, qzeros = words((inputs, outputs // 8), 5), words((groups, outputs // 8), 6)
    scales = (torch.rand(groups, outputs, generator=torch.Generator().manual_seed(1)) + 0.1).to(torch.float16)
    value = integers.decode_awq(qweight, qzeros, scales, group=group)
    assert torch.equal(value, slow.awq(qweight, qzeros, scales, group))
