"""Cut one stored tensor into runs of whole rows that decode alone. Knows shapes and blocks; must not know files.

A piece is decoded with the rows of the scales that belong to it. Formats whose rows do not lie one after the other are
one piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.checkpoint.decoders import MX_BLOCK, NVFP4_BLOCK
from harness.checkpoint.formats import Logical
from harness.checkpoint.header import TensorRef, dtype_bits, torch_dtype

PIECE_ELEMENTS = 1 << 20
"""Decoded elements of one piece: 4 MiB in float32. Larger ones leave the caches, smaller ones pay more by operation."""
PIECE_BYTES = 1 << 19
"""Bytes of a piece that is not decoded: it is digested and looked at while it is in the cache."""
SMALL_MATRIX = 1 << 12
"""Elements below which the matrices of a stack (kernels of a convolution) are no matter of their own."""
MX_FOUR_BIT = frozenset({"mxfp4", "mxfp4_blocks"})
_PER_BYTE = {"mxfp4": 2, "mxfp4_blocks": 2, "nvfp4_multiplier": 2, "nvfp4_divisor": 2}
_BY_ROWS = frozenset({"plain", "fp8_block", "fp8_channel", "mxfp8", "int4_packed", *_PER_BYTE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows [start, stop) of one matrix of a stack; `nbytes` as stored."""

    matrix: int
    start: int
    stop: int
    nbytes: int


class Pieces:
    """The pieces of one stored tensor, in the order of the file. `logical` is the weight whose body it is, or None."""

    def __init__(self, ref: TensorRef, logical: Logical | None) -> None:
        self.ref, self.logical = ref, _by_row(logical)
        self.format = logical.format if logical is not None else ""
        self.block = _block(logical)
        self.zeros_a_word = 32 // int(logical.options.get("bits") or 4) if logical is not None else 8
        row_axes = 2 if self.format == "mxfp4_blocks" else 1
        lead, rows = ref.shape[: -row_axes - 1], ref.shape[-row_axes - 1 :][:1]
        self.matrices, self.rows = math.prod(lead), (rows[0] if rows else 1)
        by_rows = logical is not None and self.format in _BY_ROWS
        small = self.format in ("", "plain") and ref.numel < self.matrices * SMALL_MATRIX
        if small or not by_rows:
            self.matrices, self.rows = 1, math.prod((*lead, self.rows))
        count = self.matrices * self.rows
        self.row_bytes = ref.nbytes // count if count else 0
        if self.row_bytes * count != ref.nbytes:  # elements of less than a byte, side by side
            self.matrices, self.rows, self.row_bytes = 1, 1, ref.nbytes
        self.step = self._step(logical, by_rows)

    def _step(self, logical: Logical | None, by_rows: bool) -> int:
        """Return the rows of a piece: as many as fit."""
        if logical is None:
            return max(1, PIECE_BYTES // max(1, self.row_bytes))
        if not by_rows:
            return max(1, self.rows)
        aligned = self.zeros_a_word if self.format == "int4_packed" else 1
        elements = max(1, logical.numel // max(1, self.matrices * self.rows))
        return max(1, PIECE_ELEMENTS // elements // aligned) * aligned

    def __iter__(self) -> Iterator[Piece]:
        if not self.ref.nbytes:
            return
        for matrix in range(self.matrices):
            for start in range(0, self.rows, self.step):
                stop = min(self.rows, start + self.step)
                yield Piece(matrix=matrix, start=start, stop=stop, nbytes=(stop - start) * self.row_bytes)

    def parts(self, view: memoryview, piece: Piece, sides: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the stored parts of one piece by role, to be decoded as `logical`: its codes, its rows of scales."""
        codes = torch.frombuffer(view, dtype=torch.uint8).view(torch_dtype(self.ref.dtype))
        if self.format not in _BY_ROWS:
            packed = dtype_bits(self.ref.dtype) < 8
            return {"weight": codes.reshape((*self.ref.shape[:-1], -1) if packed else self.ref.shape), **sides}
        rows = piece.stop - piece.start
        inner = self.ref.shape[-2:] if self.format == "mxfp4_blocks" else (-1,)
        weight = codes.reshape(rows, *inner)
        return {"weight": weight, **{role: self._side(role, side, piece, rows) for role, side in sides.items()}}

    def _side(self, role: str, side: Tensor, piece: Piece, rows: int) -> Tensor:
        """Return the rows of a scale that belong to a piece."""
        if role == "shape":
            return torch.tensor([rows, int(side[-1])])
        if side.numel() == 1 and self.format != "fp8_block":
            return side
        if role == "global":
            return side.reshape(-1)[piece.matrix : piece.matrix + 1] if side.numel() == self.matrices else side
        per = self.block[0] if self.format == "fp8_block" else self.zeros_a_word if role == "zero" else 1
        expected = self.matrices * -(-self.rows // per)
        if side.numel() % expected:
            return side  # it does not fit, which decoding tells
        grid = side.reshape(self.matrices, -(-self.rows // per), -1)[piece.matrix]
        if self.format == "fp8_block":
            return grid.index_select(0, torch.arange(piece.start, piece.stop) // per)
        part = grid[piece.start // per : -(-piece.stop // per)]
        return part if self.format != "fp8_channel" else part.reshape(rows, -1)


def _by_row(logical: Logical | None) -> Logical | None:
    """Return a weight for whose rows scales are given one by one, so that a piece may end anywhere in a block."""
    if logical is None or logical.format != "fp8_block":
        return logical
    return replace(logical, options={**logical.options, "block": (1, logical.options["block"][1])})


def _block(logical: Logical | None) -> tuple[int, int]:
    """Return how many rows and columns of decoded values share one scale; (0, 0) where there is no such thing."""
    if logical is None:
        return (0, 0)
    if logical.format == "fp8_block":
        block = logical.options.get("block") or (0, 0)
        return int(block[0]), int(block[1])
    if logical.format in ("mxfp8", *MX_FOUR_BIT):
        return 1, MX_BLOCK
    if logical.format.startswith("nvfp4"):
        return 1, NVFP4_BLOCK
    return (1, int(logical.options["group"])) if logical.options.get("group") else (0, 0)
