"""Whether MXFP4 blocks survive a conversion to FP8 with one scale for each 128x128. Knows bits; must not know files.

A code times 2^k is exact in E4M3 for k from -8 to 6, so a block whose scale exponents (of groups with any value) spread
by at most 14 converts without loss; a block that spreads further is converted and looked at. Source: E2M1 magnitudes
need one bit of mantissa, E4M3 holds 2^-9 (denormal) to 448.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.checkpoint.decoders import MX_BLOCK, as_bytes, unpack_e2m1

ROWS, COLUMNS = 128, 128
SAFE_SPREAD, TOP = 14, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Blocks of one matrix, how many change their values in FP8, and by how much of the block's largest at most."""

    name: str
    blocks: int
    lossy: int
    worst: float


class Fp8Blocks:
    """Counts the blocks of one matrix, fed in pieces of whole blocks of rows."""

    def __init__(self) -> None:
        self._blocks = self._lossy = 0
        self._worst = 0.0

    def take(self, packed: Tensor, scale: Tensor) -> None:
        """Look at some rows. Shapes: packed [rows, I / 2] (or [rows, I / 32, 16]), scale [rows, I / 32], as bytes."""
        codes, scale = as_bytes(packed).reshape(len(packed), -1), as_bytes(scale).reshape(len(packed), -1)
        if codes.shape[1] * 2 != scale.shape[1] * MX_BLOCK or not codes.numel():
            return
        per = COLUMNS // MX_BLOCK
        used = (codes.reshape(len(codes), -1, MX_BLOCK // 2) & 0x77).amax(dim=-1) > 0
        exponent = scale.to(torch.int16)
        high = _blockwise(torch.where(used, exponent, -1), per, -1).amax(dim=(1, 3))
        low = _blockwise(torch.where(used, exponent, 999), per, 999).amin(dim=(1, 3))
        self._blocks += int((high >= 0).sum())
        for row, column in ((high - low) > SAFE_SPREAD).nonzero().tolist():
            self._convert(codes, exponent, row, column, int(high[row, column]))

    def _convert(self, codes: Tensor, exponent: Tensor, row: int, column: int, top: int) -> None:
        rows = slice(row * ROWS, (row + 1) * ROWS)
        groups = slice(column * COLUMNS // MX_BLOCK, (column + 1) * COLUMNS // MX_BLOCK)
        here = exponent[rows, groups].double() - top + TOP
        bytes_ = codes[rows, groups.start * MX_BLOCK // 2 : groups.stop * MX_BLOCK // 2]
        values = unpack_e2m1(bytes_).double() * torch.exp2(here).repeat_interleave(MX_BLOCK, dim=1)
        kept = values.float().to(torch.float8_e4m3fn).double()
        error = float((kept - values).abs().max() / values.abs().max().clamp(min=1e-300))
        if error:
            self._lossy += 1
            self._worst = max(self._worst, error)

    def result(self, name: str) -> Conversion:
        """Return what was counted."""
        return Conversion(name=name, blocks=self._blocks, lossy=self._lossy, worst=self._worst)


def _blockwise(value: Tensor, per: int, fill: int) -> Tensor:
    """Return [block rows, 128, block columns, per], partial blocks filled up."""
    rows, columns = value.shape
    pad = (0, -columns % per, 0, -rows % ROWS)
    full = torch.nn.functional.pad(value, pad, value=fill)
    return full.reshape(-1, ROWS, full.shape[1] // per, per)
