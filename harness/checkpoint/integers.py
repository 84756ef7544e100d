"""Decode stored integer weights to float32: pack-quantized, GPTQ, AWQ. Knows bits, groups, zero points; no names.

Written from the format descriptions, not from any engine's loader. Every result is [out, in], as a linear layer holds
it, although GPTQ and AWQ store [in, out].

Sources: the compressed-tensors `pack-quantized` layout; the GPTQ `qweight/qzeros/scales/g_idx` layout, whose version 1
stores each zero point less one; the AWQ `gemm` layout, whose nibbles hold outputs 0 2 4 6 1 3 5 7.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.checkpoint.decoders import ceil_div, expect_shape
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
    q = _fields(packed, bits)[:, :columns] - offset
    if zero_point is not None:
        expect_shape((ceil_div(rows, each), scale.shape[1]), zero_point, "packed zero points")
        zero = _fields(zero_point.t().contiguous(), bits)[:, :rows].t() - offset
        q = q - zero.repeat_interleave(group, dim=1)[:, :columns]
    return q.to(torch.float32) * scale.to(torch.float32).repeat_interleave(group, dim=1)[:, :columns]


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
    q = _fields(qweight.t().contiguous(), bits)
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
    return (q - zero.t()[:, index]).to(torch.float32) * scales.to(torch.float32).t()[:, index]


def decode_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, *, group: int | None) -> Tensor:
    """Decode AWQ gemm: w[o, i] = (q[i, o] - z[g, o]) s[g, o], where g = i // group. Returns [O, I].

    Shapes: qweight [I, O / 8] int32 packed along the output in the order 0 2 4 6 1 3 5 7, qzeros [groups, O / 8] packed
    alike, scales [groups, O].
    """
    inputs, outputs = qweight.shape[0], qweight.shape[1] * 8
    size = group if group is not None else max(1, inputs)
    expect_shape((ceil_div(inputs, size), outputs), scales, f"scales for groups of {size}")
    expect_shape((scales.shape[0], qweight.shape[1]), qzeros, "packed zero points")
    index = torch.arange(inputs) // size
    q, zero = _awq_fields(qweight), _awq_fields(qzeros)
    return ((q - zero[index]).to(torch.float32) * scales.to(torch.float32)[index]).t().contiguous()


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
