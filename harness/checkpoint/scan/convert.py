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
    """Counts the blocks of one matrix: by its scales alone where those lie close together, else by a round trip.

    `scale` [rows, I / 32], as bytes. The codes are fed in pieces of rows.
    """

    def __init__(self, scale: Tensor) -> None:
        self._scale = as_bytes(scale)
        self._blocks = self._lossy = 0
        self._worst = 0.0
        self._wide: dict[int, list[int]] = {}
        self._kept: list[Tensor] = []
        if scale.numel():
            self._look()

    def _look(self) -> None:
        """Find the blocks whose scales spread too far for all codes to survive."""
        per, exponent = COLUMNS // MX_BLOCK, self._scale.to(torch.int16)
        high = _blockwise(exponent, per, -1).amax(dim=(1, 3))
        low = _blockwise(exponent, per, 999).amin(dim=(1, 3))
        self._blocks = high.numel()
        for row, column in ((high - low) > SAFE_SPREAD).nonzero().tolist():
            self._wide.setdefault(row, []).append(column)

    def take(self, packed: Tensor, start: int) -> None:
        """Look at the codes of rows from `start` on, in order. Shape: [rows, I / 2] or [rows, I / 32, 16], as bytes."""
        if not self._wide:
            return
        codes = as_bytes(packed).reshape(len(packed), -1)
        at = 0
        while at < len(codes):
            row, inside = divmod(start + at, ROWS)
            stop = min(len(codes), at + ROWS - inside)
            if row in self._wide:
                self._kept.append(codes[at:stop].clone())
                if sum(len(k) for k in self._kept) == min(ROWS, len(self._scale) - row * ROWS):
                    self._convert(torch.cat(self._kept), row)
                    self._kept = []
            at = stop

    def _convert(self, codes: Tensor, row: int) -> None:
        """Convert the doubtful blocks of one row of blocks, and look at what became of their values."""
        for column in self._wide[row]:
            groups = slice(column * COLUMNS // MX_BLOCK, (column + 1) * COLUMNS // MX_BLOCK)
            here = codes[:, groups.start * MX_BLOCK // 2 : groups.stop * MX_BLOCK // 2]
            used = (here.reshape(len(here), -1, MX_BLOCK // 2) & 0x77).amax(dim=-1) > 0
            exponent = self._scale[row * ROWS : (row + 1) * ROWS, groups].double()
            top = float(torch.where(used, exponent, -1.0).max())
            factor = torch.exp2(torch.where(used, exponent - top + TOP, 0.0))
            values = unpack_e2m1(here.contiguous()).double() * factor.repeat_interleave(MX_BLOCK, dim=1)
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
