"""Decode stored small floats to float32. Knows bits, blocks and scales; must not know names, files or models.

Written from the format descriptions, not from any engine's loader, so that an engine and its copy cannot agree on
a mistake. A code times a scale is one float32 rounding at most. A scale that does not fit is an error, never a guess.
Bytes are looked up in tables of 256 entries (of two values where a byte holds two), straight into the result, strip by
strip so that a strip stays in the cache until its scales are multiplied in. `out` takes the result into memory that is
there already: the first touch of new memory costs more than decoding into it.

Sources: OCP Microscaling Formats (MX) 1.0, sections 5.3 (E2M1, E8M0) and 6.3; OCP 8-bit floating point 1.0; the FNUZ
dialect of 8-bit floats (bias one more, no infinities, byte 0x80 the only NaN); the compressed-tensors
`mxfp4-pack-quantized` and `nvfp4-pack-quantized` layouts; the DeepSeek-V3 `weight_scale_inv` convention; gpt-oss
`*_blocks` and `*_scales`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from harness.checkpoint.room import room
from harness.errors import CheckpointError

MX_BLOCK = 32
NVFP4_BLOCK = 16
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""Value of each 4-bit code: bit 3 is the sign."""
_STRIP_ELEMENTS = 1 << 17
_FLOAT8 = {
    torch.float8_e4m3fn: (4, 3, 7, "fn"),
    torch.float8_e5m2: (5, 2, 15, "ieee"),
    torch.float8_e4m3fnuz: (4, 3, 8, "fnuz"),
    torch.float8_e5m2fnuz: (5, 2, 16, "fnuz"),
}
"""Exponent bits, mantissa bits, bias and dialect of each 8-bit float."""


def as_bytes(value: Tensor) -> Tensor:
    """Return the same bytes as uint8, whatever 8-bit type they were stored as (a signed type must never be shifted)."""
    if value.element_size() != 1:
        raise CheckpointError(f"expected one byte an element, found {value.dtype}")
    return value.view(torch.uint8)


@cache
def _e8m0_values() -> Tensor:
    exponent = torch.arange(256, dtype=torch.float64) - 127
    table = torch.pow(torch.tensor(2.0, dtype=torch.float64), exponent).to(torch.float32)
    table[255] = float("nan")
    return table


def decode_e8m0(scale: Tensor) -> Tensor:
    """Turn E8M0 bytes s into 2^(s - 127), float32; 255 is NaN, 0 is 2^-127 (a denormal of float32)."""
    codes = as_bytes(scale)
    return _e8m0_values().index_select(0, codes.flatten().int()).reshape(codes.shape)


def float8_value(code: int, dtype: torch.dtype) -> float:
    """Return the value of one 8-bit float code, worked out from its bits."""
    exponent_bits, mantissa_bits, bias, dialect = _FLOAT8[dtype]
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    last = (1 << exponent_bits) - 1
    if dialect == "fnuz" and code == 0x80:
        return float("nan")
    if dialect == "fn" and code & 0x7F == 0x7F:
        return float("nan")
    if dialect == "ieee" and exponent == last:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * float(mantissa) * 2.0 ** (1 - bias - mantissa_bits)
    return sign * float(mantissa + (1 << mantissa_bits)) * 2.0 ** (exponent - bias - mantissa_bits)


@cache
def _float8_table(dtype: torch.dtype) -> Tensor:
    """Return the value of each byte."""
    return byte_table(tuple(float8_value(code, dtype) for code in range(256)))


@cache
def byte_table(values: tuple[float, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return for each byte the values of its fields, the lowest first, side by side in one word as wide as all of them.

    `values` of each code: 4, 16 or 256 of them, for fields of 2, 4 or 8 bits.
    """
    bits = (len(values) - 1).bit_length()
    byte, value = torch.arange(256), torch.tensor(values).to(dtype)
    fields = torch.stack([value[(byte >> shift) & (len(values) - 1)] for shift in range(0, 8, bits)], dim=-1)
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[fields.shape[1] * dtype.itemsize]
    return fields.contiguous().view(word).flatten()


def _e2m1_table(dtype: torch.dtype) -> Tensor:
    return byte_table(tuple(E2M1.tolist()), dtype)


def widened(value: Tensor, out: Tensor | None = None) -> Tensor:
    """Return values as float32."""
    return _place(out, tuple(value.shape), torch.float32).copy_(value)


def _rows(value: Tensor) -> Tensor:
    """Return a tensor as a matrix of its last axis."""
    last = value.shape[-1] if value.dim() else 1
    return value.reshape(value.numel() // max(1, last), last)


def by_strips(
    raw: Tensor,
    table: Tensor,
    shape: tuple[int, ...],
    multiply: Callable[[Tensor, int, int], None],
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """Decode bytes [..., n] to `shape`, letting `multiply(strip, start, stop)` scale rows [start, stop) in place.

    `table` has one entry for each byte: as many values as there are columns for a byte.
    """
    result = _place(out, shape, dtype)
    if not result.numel():
        return result
    rows, raw = _rows(result), _rows(as_bytes(raw))
    step = max(1, _STRIP_ELEMENTS // shape[-1])
    index = torch.empty(min(step, len(rows)) * raw.shape[1], dtype=torch.int32)
    for start in range(0, len(rows), step):
        strip, codes = rows[start : start + step], raw[start : start + step]
        here = index[: codes.numel()]
        here.view(codes.shape).copy_(codes)
        torch.index_select(table, 0, here, out=strip.view(table.dtype).flatten())
        multiply(strip, start, start + len(strip))
    return result


def _place(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory for a result: the given one where it is of that type, large enough and not strided."""
    count = torch.Size(shape).numel()
    usable = out is not None and out.dtype is dtype and out.is_contiguous() and not out.storage_offset() % 2
    if out is None or not usable or out.numel() < count:
        return room(shape, dtype)
    return out.flatten()[:count].view(shape)


def by_groups(strip: Tensor, value: Tensor, group: int, work: Callable[[Tensor, Tensor], Tensor] = Tensor.mul_) -> None:
    """Multiply, in place, each `group` columns by one factor. strip [R, C], value [R or 1, ceil(C / group)]."""
    whole = strip.shape[1] // group
    if whole:
        work(strip[:, : whole * group].view(len(strip), whole, group), value[:, :whole, None])
    if whole * group < strip.shape[1]:
        work(strip[:, whole * group :], value[:, whole:])


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Unpack two 4-bit codes a byte, the low nibble first. [..., n] uint8 or int8 -> [..., 2n] float32."""
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    return by_strips(packed, _e2m1_table(torch.float32), shape, lambda strip, start, stop: None)


def expect_shape(shape: tuple[int, ...], found: Tensor, what: str) -> None:
    """Refuse scales of another shape.

    Raises:
        CheckpointError: `found` has not that shape.
    """
    if tuple(found.shape) != shape:
        raise CheckpointError(
            f"expected {what} of shape {list(shape)}, found {list(found.shape)}: the scales do not belong to this "
            "weight, or their grid is transposed"
        )


def ceil_div(size: int, block: int) -> int:
    """Return how many blocks cover `size`; the last may be partial."""
    return -(-size // block)


def _float8(weight: Tensor, multiply: Callable[[Tensor, int, int], None], out: Tensor | None) -> Tensor:
    if weight.dtype in _FLOAT8:
        return by_strips(weight, _float8_table(weight.dtype), tuple(weight.shape), multiply, out=out)
    result = widened(weight, out)
    multiply(_rows(result), 0, len(_rows(result)))
    return result


def decode_fp8_block(weight: Tensor, scale: Tensor, block: tuple[int, int], *, out: Tensor | None = None) -> Tensor:
    """Multiply an FP8 matrix by its grid of block scales; edge blocks are partial.

    Shapes: weight [..., O, I], scale [..., ceil(O / block[0]), ceil(I / block[1])] (float, or E8M0 bytes).
    """
    *lead, rows, columns = weight.shape
    high, wide = ceil_div(rows, block[0]), ceil_div(columns, block[1])
    expect_shape((*lead, high, wide), scale, f"block scales {block[0]}x{block[1]}")
    grid = _rows(decode_e8m0(scale) if scale.element_size() == 1 else scale.to(torch.float32))

    def multiply(strip: Tensor, start: int, stop: int) -> None:
        while start < stop:
            matrix, row = divmod(start, rows)
            until = min(stop, matrix * rows + min(rows, (row // block[0] + 1) * block[0]))
            at = matrix * high + row // block[0]
            by_groups(strip[: until - start], grid[at : at + 1], block[1])
            strip, start = strip[until - start :], until

    return _float8(weight, by_rows(grid, block[1]) if block[0] == 1 else multiply, out)


def by_rows(scale: Tensor, group: int) -> Callable[[Tensor, int, int], None]:
    """Return what multiplies a strip by row-wise scales [rows, groups]."""
    return lambda strip, start, stop: by_groups(strip, scale[start:stop], group)


def _times(strip: Tensor, factor: Tensor) -> None:
    strip.mul_(factor)


def decode_fp8_channel(weight: Tensor, scale: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Multiply an FP8 tensor by one scale, by one for each row, or by one for each matrix of a stack.

    Shapes: weight [..., O, I]; scale [], [1], [..., O], [..., O, 1], or [...] and [..., 1, 1] for a stack of matrices.
    """
    scale = scale.to(torch.float32)
    if scale.numel() == 1:
        return _float8(weight, lambda strip, start, stop: _times(strip, scale.reshape(())), out)
    if weight.dim() >= 3 and tuple(scale.shape) == tuple(weight.shape[:-2]):
        scale = scale[..., None, None]
    elif scale.dim() == weight.dim() - 1:
        scale = scale.unsqueeze(-1)
    if weight.dim() < 3 or tuple(scale.shape) != (*weight.shape[:-2], 1, 1):
        expect_shape((*weight.shape[:-1], 1), scale, "one scale for each row")
    by_row = scale.expand(*weight.shape[:-1], 1).reshape(-1, 1)
    return _float8(weight, lambda strip, start, stop: _times(strip, by_row[start:stop]), out)


def decode_mxfp8(weight: Tensor, scale: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Multiply FP8 elements by one E8M0 scale for each 32 along the input. scale [..., O, ceil(I / 32)]."""
    return decode_fp8_block(weight, as_bytes(scale), (1, MX_BLOCK), out=out)


def decode_mxfp4(
    packed: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor:
    """Decode E2M1 codes with one E8M0 scale for each 32 along the input; bfloat16 holds the values exactly too.

    Shapes: packed [..., O, I / 2] bytes, scale [..., O, I / 32] bytes -> [..., O, I].
    """
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    blocks = ceil_div(shape[-1], MX_BLOCK)
    expect_shape((*shape[:-1], blocks), scale, "one scale byte for each 32 elements")
    factors = _rows(decode_e8m0(scale)).to(dtype)
    return by_strips(packed, _e2m1_table(dtype), shape, by_rows(factors, MX_BLOCK), dtype, out)


def decode_mxfp4_blocks(blocks: Tensor, scales: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Decode the gpt-oss layout. blocks [..., out, in / 32, 16], scales [..., out, in / 32] -> [..., out, in]."""
    if blocks.shape[-1] != MX_BLOCK // 2:
        raise CheckpointError(f"expected blocks of {MX_BLOCK // 2} bytes, found {list(blocks.shape)}")
    return decode_mxfp4(blocks.flatten(-2), scales, out=out)


def decode_nvfp4(
    packed: Tensor, scale: Tensor, global_scale: Tensor, *, divisor: bool, out: Tensor | None = None
) -> Tensor:
    """Decode E2M1 codes with an FP8 scale for each 16 along the input and one float32 scale for the whole.

    Shapes: packed [..., O, I / 2] bytes, scale [..., O, I / 16] F8_E4M3, global_scale of one element, or one a matrix.
    `divisor`: compressed-tensors divides by the global scale, ModelOpt multiplies with it.
    """
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    blocks = ceil_div(shape[-1], NVFP4_BLOCK)
    expect_shape((*shape[:-1], blocks), scale, "one FP8 scale for each 16 elements")
    overall = global_scale.to(torch.float32)
    if overall.numel() not in (1, math.prod(shape[:-2])):
        raise CheckpointError(f"expected one global scale, or one a matrix, found {list(global_scale.shape)}")
    overall = overall.reshape(()) if overall.numel() == 1 else overall.reshape(*shape[:-2], 1, 1)
    local = scale.to(torch.float32)
    local = _rows(local / overall if divisor else local * overall)
    return by_strips(packed, _e2m1_table(torch.float32), shape, by_rows(local, NVFP4_BLOCK), out=out)
