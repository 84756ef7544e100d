"""A quantised weight as codes, their values, and factors by place. Knows layouts of stored parts; no mistake, no file.

Every format is (value of the code - zero point) times a factor, and differs only in where these stand. Written out so,
one of them can be exchanged for what a mistaken reader takes, and any few rows can be decoded without the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from harness.checkpoint.decoders import E2M1, MX_BLOCK, NVFP4_BLOCK, as_bytes, decode_e8m0, float8_value
from harness.checkpoint.integers import AWQ_ORDER
from harness.checkpoint.recognise import Logical

Fields = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Numbers by block: element [r, c] has `values[row[r], column[c]]`. Shapes: [Gr, Gc], [R], [C]."""

    values: Tensor
    row: Tensor
    column: Tensor

    def of(self, rows: Tensor) -> Tensor:
        """Return the numbers of whole rows. [n] -> [n, C]."""
        return self.values.index_select(0, self.row[rows]).index_select(1, self.column)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A weight [.., O, I] as a matrix of R = .. O rows and C = I columns.

    `fields` gives the codes of rows [n] as uint8 [n, C]; `values` what each code is worth. `scale` holds the scales as
    stored, [matrices, Gr, Gc], and `grid` the factors read from them; `overall` one more factor a row [R], `zeros` the
    zero points. `kind`: e2m1, float8 or integer. `each` codes share a byte or word, `along` the columns or the rows.
    `narrow`: the dtype in which factors and products are rounded, None for float32.
    """

    kind: str
    shape: tuple[int, int]
    matrices: int
    fields: Fields
    values: Tensor
    scale: Tensor
    grid: Grid
    block: tuple[int, int]
    each: int = 1
    along: str = "columns"
    dtype: torch.dtype = torch.uint8
    overall: Tensor | None = None
    zeros: Grid | None = None
    narrow: torch.dtype | None = None
    bits: int = 8
    version: str = ""

    def rows(self, rows: Tensor) -> Tensor:
        """Decode whole rows. [n] -> float32 [n, C]."""
        value = self.values[self.fields(rows).int()]
        if self.zeros is not None:
            value = value - self.zeros.of(rows)
        factor = self.grid.of(rows)
        if self.overall is not None:
            factor = factor * self.overall[rows][:, None]
        if self.narrow is not None:
            return (value.to(self.narrow) * factor.to(self.narrow)).to(torch.float32)
        return value * factor


def stored_weight(logical: Logical, parts: Mapping[str, Tensor]) -> Stored | None:
    """Write a weight out by place, or None where it has no codes and scales."""
    if "scale" not in parts or logical.problem:
        return None
    kind = logical.format
    if kind in ("fp8_block", "fp8_channel", "mxfp8"):
        return _float8(logical, parts)
    if kind in ("mxfp4", "mxfp4_blocks", "nvfp4_multiplier", "nvfp4_divisor"):
        return _e2m1(logical, parts)
    if kind == "int4_packed":
        return _packed(logical, parts)
    return _words(logical, parts) if kind in ("gptq_v1", "gptq_v2", "awq") else None


def numbers(scale: Tensor) -> Tensor:
    """Return what scales are worth, float32: bytes are exponents of two."""
    bytes_of_exponent = scale.dtype in (torch.uint8, torch.int8, getattr(torch, "float8_e8m0fnu", torch.uint8))
    return decode_e8m0(scale) if bytes_of_exponent else scale.to(torch.float32)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return matrices, rows of each, and columns."""
    columns = shape[-1] if shape else 1
    rows = shape[-2] if len(shape) > 1 else 1
    return torch.Size(shape[:-2]).numel(), rows, columns


def blocks(
    matrices: int, shape: tuple[int, int], grid: tuple[int, int], block: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the block of each row and column: `grid` blocks of `block` for each matrix, the last ones go on."""
    each = shape[0] // matrices
    row = (torch.arange(each) // block[0]).clamp(max=grid[0] - 1)
    offsets = torch.arange(matrices)[:, None] * grid[0]
    return (row + offsets).flatten(), (torch.arange(shape[1]) // block[1]).clamp(max=grid[1] - 1)


def _gridded(values: Tensor, matrices: int, shape: tuple[int, int], block: tuple[int, int]) -> Grid:
    """Return a grid [matrices, Gr, Gc] with its places."""
    row, column = blocks(matrices, shape, (values.shape[1], values.shape[2]), block)
    return Grid(values=values.reshape(-1, values.shape[-1]), row=row, column=column)


def _bytes(raw: Tensor, rows: Tensor) -> Tensor:
    return raw.index_select(0, rows)


def _nibbles(raw: Tensor, rows: Tensor) -> Tensor:
    """Return the codes of rows, the low nibble first."""
    taken = raw.index_select(0, rows)
    return torch.stack((taken & 0xF, taken >> 4), dim=-1).flatten(-2)


def _bits(words: Tensor, bits: int, columns: int, rows: Tensor) -> Tensor:
    return fields_of(words.index_select(0, rows), bits)[:, :columns]


def fields_of(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned fields of 32-bit words, lowest first. [R, n] -> uint8 [R, n 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def float8_table(dtype: torch.dtype) -> Tensor:
    """Return the value of each of the 256 codes."""
    return torch.tensor([float8_value(code, dtype) for code in range(256)])


def _float8(logical: Logical, parts: Mapping[str, Tensor]) -> Stored:
    weight, scale = parts["weight"], parts["scale"]
    matrices, each, columns = _matrix(tuple(weight.shape))
    shape = (matrices * each, columns)
    if logical.format == "fp8_channel":
        count = scale.numel()
        block = (1 if count == shape[0] else each, columns)
        stacked = scale.reshape(1 if count == 1 else matrices, -1, 1)
    else:
        block = (1, MX_BLOCK) if logical.format == "mxfp8" else logical.options["block"]
        stacked = scale.reshape(matrices, -1, scale.shape[-1])
    if stacked.shape[0] == matrices:
        grid = _gridded(numbers(stacked), matrices, shape, block)
    else:
        one = torch.zeros(shape[0], dtype=torch.int64)
        grid = Grid(values=numbers(stacked)[0], row=one, column=torch.zeros(columns, dtype=torch.int64))
    return Stored(
        kind="float8", shape=shape, matrices=matrices, fields=partial(_bytes, as_bytes(weight).reshape(shape)),
        values=float8_table(weight.dtype), scale=stacked, grid=grid, block=block, dtype=weight.dtype,
    )  # fmt: skip


def _e2m1(logical: Logical, parts: Mapping[str, Tensor]) -> Stored:
    weight, scale = parts["weight"], parts["scale"]
    matrices, each, columns = _matrix(logical.shape)
    shape = (matrices * each, columns)
    block = (1, NVFP4_BLOCK if logical.format.startswith("nvfp4") else MX_BLOCK)
    stacked = scale.reshape(matrices, each, scale.shape[-1])
    overall = None
    if "global" in parts:
        whole = parts["global"].to(torch.float32).flatten()
        whole = 1 / whole if logical.format == "nvfp4_divisor" else whole
        overall = whole.repeat_interleave(shape[0] // whole.numel())
    return Stored(
        kind="e2m1", shape=shape, matrices=matrices, fields=partial(_nibbles, as_bytes(weight).reshape(shape[0], -1)),
        values=E2M1.clone(), scale=stacked, grid=_gridded(numbers(stacked), matrices, shape, block), block=block,
        each=2, dtype=weight.dtype, overall=overall, bits=4, version=logical.format,
    )  # fmt: skip


def _packed(logical: Logical, parts: Mapping[str, Tensor]) -> Stored:
    shape, bits = (logical.shape[0], logical.shape[1]), int(logical.options["bits"])
    block = (1, int(logical.options["group"] or max(1, shape[1])))
    stacked = parts["scale"].reshape(1, shape[0], -1)
    zeros = None
    offset = float(1 << (bits - 1))
    if "zero" in parts:
        zero = fields_of(parts["zero"].t().contiguous(), bits)[:, : shape[0]].t().float() - offset
        zeros = _gridded(zero[None].contiguous(), 1, shape, block)
    return Stored(
        kind="integer", shape=shape, matrices=1, fields=partial(_bits, parts["weight"], bits, shape[1]),
        values=torch.arange(1 << bits).float() - offset, scale=stacked,
        grid=_gridded(numbers(stacked), 1, shape, block), block=block, each=32 // bits, zeros=zeros, bits=bits,
        version=logical.format,
    )  # fmt: skip


def _words(logical: Logical, parts: Mapping[str, Tensor]) -> Stored:
    """Write out GPTQ and AWQ, whose words are stored [in, out]."""
    shape, bits, awq = (logical.shape[0], logical.shape[1]), int(logical.options["bits"]), logical.format == "awq"
    stacked = parts["scale"].t().contiguous()[None]
    block = (1, int(logical.options["group"] or max(1, shape[1])))
    grid = _gridded(numbers(stacked), 1, shape, block)
    if "group" in parts:
        grid = Grid(values=grid.values, row=grid.row, column=parts["group"].long())
    if awq:
        codes = in_awq_order(fields_of(parts["weight"], bits)).t().contiguous()
        zero = in_awq_order(fields_of(parts["zero"], bits)).t().float()
    else:
        codes = fields_of(parts["weight"].t().contiguous(), bits)
        zero = fields_of(parts["zero"], bits)[:, : shape[0]].t().float()
        zero = (zero + 1) % (1 << bits) if logical.format == "gptq_v1" else zero
    return Stored(
        kind="integer", shape=shape, matrices=1, fields=partial(_bytes, codes),
        values=torch.arange(1 << bits).float(), scale=stacked, grid=grid, block=block, each=32 // bits,
        along="rows" if awq else "columns", zeros=Grid(values=zero, row=grid.row, column=grid.column), bits=bits,
        version=logical.format,
    )  # fmt: skip


def in_awq_order(fields: Tensor) -> Tensor:
    """Put the fields of each word, as they lie there, in the order of the outputs."""
    place = torch.tensor([AWQ_ORDER.index(j) for j in range(8)])
    return fields.reshape(*fields.shape[:-1], -1, 8).index_select(-1, place).flatten(-2)
