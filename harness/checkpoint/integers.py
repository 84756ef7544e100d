"""Decode stored integer weights to float32: pack-quantized, GPTQ, AWQ. Knows bits, groups, zero points; no names.

Written from the format descriptions, not from any engine's loader. Every result is [out, in], as a linear layer holds
it, although GPTQ and AWQ store [in, out].

Sources: the compressed-tensors `pack-quantized` layout; the GPTQ `qweight/qzeros/scales/g_idx` layout, whose version 1
stores each zero point less one; the AWQ `gemm` layout, whose nibbles hold outputs 0 2 4 6 1 3 5 7.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.checkpoint.decoders import by_groups, by_strips, byte_table, ceil_div, expect_shape
from harness.checkpoint.room import room
from harness.errors import CheckpointError

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
WORD_BITS = (2, 4, 8)
"""Widths of which a 32-bit word holds a whole number."""


def decode_int4_packed(
    packed: Tensor,
    scale: Tensor,
    shape: tuple[int, int],
    *,
    group: int | None,
    zero_point: Tensor | None = None,
    bits: int = 4,
    out: Tensor | None = None,
) -> Tensor:
    """Decode integers packed into words along the input, the first lowest, stored as q + 2^(bits - 1).

    Shapes: packed [O, ceil(I bits / 32)] int32, scale [O, groups], zero_point [ceil(O bits / 32), groups] int32 packed
    by rows. `shape` is [O, I] as stored beside it; `group` the configured size, or None for one scale a row.
    """
    rows, columns = shape
    each, offset = _per_word(bits), 1 << (bits - 1)
    expect_shape((rows, ceil_div(columns, each)), packed, f"packed words of {each} elements")
    group = group if group is not None else max(1, columns)
    expect_shape((rows, ceil_div(columns, group)), scale, f"scales for groups of {group}")
    zero = None
    if zero_point is not None:
        expect_shape((ceil_div(rows, each), scale.shape[1]), zero_point, "packed zero points")
        zero = _fields(zero_point.t().contiguous(), bits)[:, :rows].t() - offset
    return _scaled(packed, columns, bits, offset, _Groups(scale, zero, group), out)


class _Groups:
    """Scales and zero points of groups of columns. Shapes: scale, zero [O, groups]; `index` the group of a column."""

    def __init__(self, scale: Tensor, zero: Tensor | None, size: int, index: Tensor | None = None) -> None:
        self.size, self.index = size, index
        self.scale = scale.to(torch.float32)
        self.zero = None if zero is None else zero.to(torch.float32)

    def apply(self, strip: Tensor, start: int, stop: int) -> None:
        """Take off zero points and multiply, in place: (q - z) s, of which the difference is exact."""
        for value, work in ((self.zero, Tensor.sub_), (self.scale, Tensor.mul_)):
            if value is not None and self.index is not None:
                work(strip, value[start:stop].index_select(1, self.index))
            elif value is not None:
                by_groups(strip, value[start:stop], self.size, work)


def _scaled(words: Tensor, columns: int, bits: int, offset: int, groups: _Groups, out: Tensor | None) -> Tensor:
    """Decode words [O, n], packed along the columns, with the scales of their groups. Returns [O, columns]."""
    shape = (len(words), words.shape[1] * 32 // bits)
    table = byte_table(tuple(float(code - offset) for code in range(1 << bits)))
    raw = words.contiguous().view(torch.uint8)

    def multiply(strip: Tensor, start: int, stop: int) -> None:
        groups.apply(strip[:, :columns], start, stop)

    found = by_strips(raw, table, shape, multiply, out=out)
    return found if columns == shape[1] else found[:, :columns].contiguous()


def decode_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, group_of: Tensor | None, *, group: int | None, bits: int, v1: bool
) -> Tensor:
    """Decode GPTQ: w[o, i] = (q[i, o] - z[g, o]) s[g, o], where g is the group of input i. Returns [O, I].

    Shapes: qweight [I bits / 32, O] int32 packed along the input, qzeros [groups, O bits / 32] packed along the output,
    scales [groups, O], group_of [I] (`g_idx`, in any order after act-order; None: i // group). `v1`: zero points are
    stored less one. A zero point lies in 0 .. 2^bits - 1, so a stored 2^bits - 1 is a zero point of 0 in version 1.
    """
    each = _per_word(bits)
    inputs, outputs, groups = qweight.shape[0] * each, qweight.shape[1], scales.shape[0]
    expect_shape((groups, outputs), scales, "one scale for each group and output")
    expect_shape((groups, ceil_div(outputs, each)), qzeros, "packed zero points")
    zero = _fields(qzeros, bits)[:, :outputs]
    if v1:
        zero = (zero + 1) & ((1 << bits) - 1)
    if group_of is None:
        size = group if group is not None else max(1, inputs)
        expect_shape((ceil_div(inputs, size), outputs), scales, f"scales for groups of {size}")
        group_of = torch.arange(inputs) // size
    expect_shape((inputs,), group_of, "one group index for each input")
    index = group_of.long()
    if inputs and not 0 <= int(index.min()) <= int(index.max()) < groups:
        raise CheckpointError(
            f"expected group indices in 0 .. {groups - 1}, found {int(index.min())} .. {int(index.max())}"
        )
    return _scaled(qweight.t(), inputs, bits, 0, _Groups(scales.t(), zero.t(), inputs, index), None)


def decode_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, *, group: int | None) -> Tensor:
    """Decode AWQ gemm: w[o, i] = (q[i, o] - z[g, o]) s[g, o], where g = i // group. Returns [O, I].

    Shapes: qweight [I, O / 8] int32 packed along the output in the order 0 2 4 6 1 3 5 7, qzeros [groups, O / 8] packed
    alike, scales [groups, O].
    """
    inputs, outputs = qweight.shape[0], qweight.shape[1] * 8
    size = group if group is not None else max(1, inputs)
    expect_shape((ceil_div(inputs, size), outputs), scales, f"scales for groups of {size}")
    expect_shape((scales.shape[0], qweight.shape[1]), qzeros, "packed zero points")
    table = byte_table(tuple(float(code) for code in range(16)))
    q = by_strips(qweight.contiguous().view(torch.uint8), table, (inputs, outputs), lambda strip, start, stop: None)
    result = room((outputs, inputs), torch.float32)
    # of the eight nibbles of a word, the one at 4 a + 2 b + c is of output 4 b + 2 c + a
    result.view(-1, 2, 2, 2, inputs).copy_(q.view(inputs, -1, 2, 2, 2).permute(1, 3, 4, 2, 0))
    _Groups(scales.t(), _awq_fields(qzeros).t(), size).apply(result, 0, outputs)
    return result


def _per_word(bits: int) -> int:
    if bits not in WORD_BITS:
        raise CheckpointError(f"expected integers of {WORD_BITS} bits, found {bits}: for these there is no decoder")
    return 32 // bits


def _fields(words: Tensor, bits: int = 4) -> Tensor:
    """Return the unsigned fields of each 32-bit word, lowest first. [R, n] -> [R, n 32 / bits] int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _awq_fields(words: Tensor) -> Tensor:
    """Return the nibbles of each word in the order of the outputs."""
    place = torch.tensor([AWQ_ORDER.index(j) for j in range(8)])
    return _fields(words).reshape(*words.shape, 8).index_select(-1, place).flatten(-2)
