"""Decode stored weights to float32. Knows bits, blocks and scales; must not know names, files or models.

Written from the format descriptions, not from any engine's loader, so that an engine and its copy cannot agree on
a mistake. Everything is computed in float32: a code times a scale is one rounding at most. A scale that does not fit is
an error, never a guess.

Sources: OCP Microscaling Formats (MX) 1.0, sections 5.3 (E2M1, E8M0) and 6.3; the compressed-tensors `pack-quantized`,
`mxfp4-pack-quantized` and `nvfp4-pack-quantized` layouts; the DeepSeek-V3 `weight_scale_inv` convention; gpt-oss
`*_blocks` and `*_scales`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.errors import CheckpointError

MX_BLOCK = 32
NVFP4_BLOCK = 16
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""Value of each 4-bit code: bit 3 is the sign."""


def as_bytes(value: Tensor) -> Tensor:
    """Return the same bytes as uint8, whatever 8-bit type they were stored as (a signed type must never be shifted)."""
    if value.element_size() != 1:
        raise CheckpointError(f"expected one byte an element, found {value.dtype}")
    return value.view(torch.uint8)


def decode_e8m0(scale: Tensor) -> Tensor:
    """Turn E8M0 bytes s into 2^(s - 127), float32; 255 is NaN, 0 is 2^-127 (a denormal of float32)."""
    exponent = torch.arange(256, dtype=torch.float64) - 127
    table = torch.pow(torch.tensor(2.0, dtype=torch.float64), exponent).to(torch.float32)
    table[255] = float("nan")
    return table[as_bytes(scale).long()]


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Unpack two 4-bit codes a byte, the low nibble first. [..., n] uint8 or int8 -> [..., 2n] float32."""
    codes = as_bytes(packed)
    pairs = torch.stack((codes & 0xF, codes >> 4), dim=-1)
    return E2M1[pairs.flatten(-2).long()]


def _expect(shape: tuple[int, ...], found: Tensor, what: str) -> None:
    if tuple(found.shape) != shape:
        raise CheckpointError(
            f"expected {what} of shape {list(shape)}, found {list(found.shape)}: the scales do not belong to this "
            "weight, or their grid is transposed"
        )


def _ceil(size: int, block: int) -> int:
    return -(-size // block)


def decode_fp8_block(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply an FP8 matrix by its grid of block scales; edge blocks are partial.

    Shapes: weight [..., O, I], scale [..., ceil(O / block[0]), ceil(I / block[1])] (float, or E8M0 bytes).
    """
    *lead, rows, columns = weight.shape
    _expect((*lead, _ceil(rows, block[0]), _ceil(columns, block[1])), scale, f"block scales {block[0]}x{block[1]}")
    grid = decode_e8m0(scale) if scale.element_size() == 1 else scale.to(torch.float32)
    grid = grid.repeat_interleave(block[0], dim=-2)[..., :rows, :]
    grid = grid.repeat_interleave(block[1], dim=-1)[..., :columns]
    return weight.to(torch.float32) * grid


def decode_fp8_channel(weight: Tensor, scale: Tensor) -> Tensor:
    """Multiply an FP8 tensor by one scale, or by one scale for each row. scale [], [1], [O] or [..., O, 1]."""
    scale = scale.to(torch.float32)
    if scale.numel() == 1:
        return weight.to(torch.float32) * scale.reshape(())
    if scale.dim() == weight.dim() - 1:
        scale = scale.unsqueeze(-1)
    _expect((*weight.shape[:-1], 1), scale, "one scale for each row")
    return weight.to(torch.float32) * scale


def decode_mxfp8(weight: Tensor, scale: Tensor) -> Tensor:
    """Multiply FP8 elements by one E8M0 scale for each 32 along the input. scale [..., O, ceil(I / 32)]."""
    return decode_fp8_block(weight, as_bytes(scale), (1, MX_BLOCK))


def decode_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Decode E2M1 codes with one E8M0 scale for each 32 along the input.

    Shapes: packed [..., O, I / 2] bytes, scale [..., O, I / 32] bytes -> [..., O, I].
    """
    values = unpack_e2m1(packed)
    *lead, columns = values.shape
    _expect((*lead, _ceil(columns, MX_BLOCK)), scale, "one scale byte for each 32 elements")
    return values * decode_e8m0(scale).repeat_interleave(MX_BLOCK, dim=-1)[..., :columns]


def decode_mxfp4_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decode the gpt-oss layout. blocks [..., out, in / 32, 16], scales [..., out, in / 32] -> [..., out, in]."""
    if blocks.shape[-1] != MX_BLOCK // 2:
        raise CheckpointError(f"expected blocks of {MX_BLOCK // 2} bytes, found {list(blocks.shape)}")
    return decode_mxfp4(blocks.flatten(-2), scales)


def decode_nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor, *, divisor: bool) -> Tensor:
    """Decode E2M1 codes with an FP8 scale for each 16 along the input and one float32 scale for the whole.

    Shapes: packed [..., O, I / 2] bytes, scale [..., O, I / 16] F8_E4M3, global_scale of one element, or one a matrix.
    `divisor`: compressed-tensors divides by the global scale, ModelOpt multiplies with it.
    """
    values = unpack_e2m1(packed)
    *lead, columns = values.shape
    _expect((*lead, _ceil(columns, NVFP4_BLOCK)), scale, "one FP8 scale for each 16 elements")
    overall = global_scale.to(torch.float32)
    overall = overall.reshape(()) if overall.numel() == 1 else overall.reshape(*values.shape[:-2], 1, 1)
    local = scale.to(torch.float32)
    local = local / overall if divisor else local * overall
    return values * local.repeat_interleave(NVFP4_BLOCK, dim=-1)[..., :columns]


def decode_int4_packed(
    packed: Tensor, scale: Tensor, shape: tuple[int, int], *, group: int | None, zero_point: Tensor | None = None
) -> Tensor:
    """Decode eight 4-bit integers a word, element j at bits 4j, stored as q + 8 (`pack-quantized`).

    Shapes: packed [O, ceil(I / 8)] int32, scale [O, groups], zero_point [ceil(O / 8), groups] int32 packed by rows.
    `shape` is [O, I] as stored beside it; `group` the configured size, or None for one scale a row.
    """
    rows, columns = shape
    _expect((rows, _ceil(columns, 8)), packed, "packed words of eight elements")
    group = group if group is not None else columns
    _expect((rows, _ceil(columns, group)), scale, f"scales for groups of {group}")
    q = _nibbles(packed)[:, :columns] - 8
    if zero_point is not None:
        _expect((_ceil(rows, 8), scale.shape[1]), zero_point, "packed zero points")
        zero = _nibbles(zero_point.t().contiguous())[:, :rows].t() - 8
        q = q - zero.repeat_interleave(group, dim=1)[:, :columns]
    return q.to(torch.float32) * scale.to(torch.float32).repeat_interleave(group, dim=1)[:, :columns]


def _nibbles(words: Tensor) -> Tensor:
    """Return the eight unsigned nibbles of each 32-bit word, lowest first. [R, n] -> [R, 8n] int32."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 0xF).flatten(-2)
