"""MXFP4 decoded by a kernel: two values a byte, a power of two for 32 of them. Knows bits; must not know names.

Source: OCP Microscaling Formats v1.0 (E2M1, E8M0).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
"""Bytes that one program decodes."""


def decode_mxfp4(packed: Tensor, scale: Tensor, out: Tensor, *, block: int = BLOCK) -> Tensor:
    """Write an MXFP4 matrix into `out`. Shapes: as in `accel_impl.ops`; `out` contiguous."""
    rows, half = packed.shape
    packed, scale = packed.contiguous(), scale.contiguous()
    if rows and half:
        _decode[(rows, triton.cdiv(half, block))](packed, scale, out, half, scale.shape[1], BLOCK=block)
    return out


@triton.jit
def _value(code):
    """Return what four bits stand for: a sign, and twice the magnitude as a small whole number."""
    size = code & 7
    twice = tl.where(size < 2, size, (2 + (size & 1)) << tl.maximum((size >> 1) - 1, 0))
    value = twice.to(tl.float32) * 0.5
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def _decode(packed, scale, out, half, groups, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < half
    byte = tl.load(packed + row * half + at, mask=inside, other=0).to(tl.int32)
    exponent = tl.load(scale + row * groups + at // 16, mask=inside, other=127).to(tl.int32)
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)  # 2^-127 is below the normal numbers
    factor = bits.to(tl.float32, bitcast=True)
    first = out + (row * half + at) * 2
    tl.store(first, _value(byte & 15) * factor, mask=inside)
    tl.store(first + 1, _value(byte >> 4) * factor, mask=inside)
