"""Number formats in memory: FP8 with block scales, MXFP4, and the way from one to the other. Knows no names, no model.

Source of the layouts: OCP Microscaling Formats v1.0 (E2M1, E8M0); DeepSeek-V3's `weight_scale_inv` (it multiplies).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

FP8_MAX_EXPONENT = 8
"""The largest power of two in e4m3fn is 2^8; its largest value is 448 = 1.75 * 2^8."""
E8M0_BIAS = 127
MX_BLOCK = 32
STRIP_ROWS = 64
"""Rows that are converted at once: what a conversion needs beside its workspace does not grow with the matrix."""
EXPERT_BLOCK = (1, 128)
"""Rows and columns that share one power-of-two scale in a converted expert."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor(_MAGNITUDES + tuple(-m for m in _MAGNITUDES))
PAIRS = torch.stack([E2M1.repeat(16), E2M1.repeat_interleave(16)], dim=1)
"""Both values of each byte [256, 2], that of the low nibble first."""


@dataclass(slots=True, kw_only=True)
class Plain:
    """A weight resident as it is computed with."""

    tensor: Tensor

    def parts(self) -> dict[str, Tensor]:
        """Return what lies in memory, by what is put behind the name."""
        return {"": self.tensor}

    @property
    def exact_dtype(self) -> torch.dtype:
        """The dtype that `decode` gives without rounding."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded weight."""
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        """Resident bytes."""
        return self.tensor.numel() * self.tensor.element_size()

    def to(self, device: torch.device | str) -> Plain:
        """Return it on a device."""
        return Plain(tensor=self.tensor.to(device))

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the values in `dtype`."""
        return self.tensor.to(dtype)


@dataclass(slots=True, kw_only=True)
class Fp8:
    """A weight resident in e4m3fn with one scale per block; `scale` is float32, or E8M0 bytes (uint8).

    A shard keeps its place in the whole matrix (`row0`, `col0`), so that a cut inside a block takes the right scale.
    Shapes: q [rows, cols]; scale [blocks of rows, blocks of cols] that the shard touches.
    """

    q: Tensor
    scale: Tensor
    block: tuple[int, int]
    row0: int = 0
    col0: int = 0

    def parts(self) -> dict[str, Tensor]:
        """Return what lies in memory, by what is put behind the name."""
        return {"": self.q, ".scale": self.scale}

    @property
    def exact_dtype(self) -> torch.dtype:
        """The dtype that `decode` gives without rounding: scales that are powers of two add no digits."""
        return torch.bfloat16 if self.scale.dtype == torch.uint8 else torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded weight."""
        return tuple(self.q.shape)

    @property
    def nbytes(self) -> int:
        """Resident bytes, scales included."""
        return self.q.numel() + self.scale.numel() * self.scale.element_size()

    def to(self, device: torch.device | str) -> Fp8:
        """Return it on a device."""
        return replace(self, q=self.q.to(device), scale=self.scale.to(device))

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return q * scale, multiplied in float32."""
        scale = exp2_of(self.scale) if self.scale.dtype == torch.uint8 else self.scale
        for axis, start in enumerate((self.row0, self.col0)):
            if self.block[axis] > 1 and scale.shape[axis] > 1:
                blocks = block_of(start, self.q.shape[axis], self.block[axis])
                scale = scale.index_select(axis, blocks.to(scale.device))
        return (self.q.float() * scale).to(dtype)


Resident = Plain | Fp8


def block_of(start: int, count: int, block: int) -> Tensor:
    """Return for `count` places from `start` on the block each lies in, counted from the first block touched."""
    return torch.arange(start, start + count) // block - start // block


def exp2_of(byte: Tensor) -> Tensor:
    """Return 2^(byte - 127) as float32."""
    return torch.ldexp(torch.ones(byte.shape, device=byte.device), byte.to(torch.int32) - E8M0_BIAS)


def fp8_shard(q: Tensor, scale: Tensor, block: tuple[int, int], rows: range, cols: range) -> Fp8:
    """Cut rows and columns out of an FP8 matrix, together with every scale that they need."""
    scale_rows = slice(rows.start // block[0], (rows.stop - 1) // block[0] + 1)
    scale_cols = slice(cols.start // block[1], (cols.stop - 1) // block[1] + 1)
    return Fp8(
        q=q[rows.start : rows.stop, cols.start : cols.stop].clone(),
        scale=scale[scale_rows, scale_cols].clone(),
        block=block,
        row0=rows.start,
        col0=cols.start,
    )


def decode_mxfp4(packed: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Write the values of an MXFP4 matrix into `out`.

    Shapes: packed [O, I / 2] uint8, low nibble first; scale [O, I / 32] uint8 (E8M0); out [O, I] float32.
    """
    rows, pairs = len(packed), PAIRS.to(packed.device)
    for first in range(0, rows, STRIP_ROWS):
        strip = slice(first, first + STRIP_ROWS)
        out[strip] = pairs.index_select(0, packed[strip].flatten().int()).view(-1, out.shape[1])
        out.view(rows, -1, MX_BLOCK)[strip].mul_(exp2_of(scale[strip])[..., None])
    return out


def fp8_from_values(values: Tensor) -> tuple[Fp8, int]:
    """Turn values into FP8 with a power-of-two scale per block; return it and the number of blocks that lost something.

    The block's largest value is put at the top of e4m3fn's range, so MXFP4 groups whose exponents lie within 14 of each
    other survive exactly. Shapes: values [O, I] float32.
    """
    rows, cols = values.shape
    wide = EXPERT_BLOCK[1]
    blocks = -(-cols // wide)
    q = torch.empty(rows, cols, dtype=torch.float8_e4m3fn, device=values.device)
    byte = torch.empty(rows, blocks, dtype=torch.uint8, device=values.device)
    padded = values.new_zeros(min(rows, STRIP_ROWS), blocks * wide)
    lossy = 0
    for first in range(0, rows, STRIP_ROWS):
        strip = slice(first, min(rows, first + STRIP_ROWS))
        part = padded[: strip.stop - first]
        part[:, :cols] = values[strip]
        lossy += _to_fp8(part.view(-1, blocks, wide), q[strip], byte[strip])
    return Fp8(q=q, scale=byte, block=EXPERT_BLOCK), lossy


def _to_fp8(values: Tensor, q: Tensor, byte: Tensor) -> int:
    """Write codes and scales of some rows [rows, blocks, width]; return the number of blocks that lost something."""
    _, exponent = torch.frexp(values.abs().amax(-1))  # amax = m * 2^exponent, m in [0.5, 1)
    byte.copy_((exponent - 1 - FP8_MAX_EXPONENT + E8M0_BIAS).clamp(0, 254))
    scale = exp2_of(byte)[..., None]
    codes = (values / scale).to(torch.float8_e4m3fn)
    q.copy_(codes.view(len(values), -1)[:, : q.shape[1]])
    return int((codes.float() * scale != values).any(-1).sum())
