"""Random tensors, in rows as they are written, plain or in a format of fewer bits. Knows names and bytes; no models.

Noise is bytes of a generator that is seeded by the tensor's name, looked up in a table of the normal distribution: the
same everywhere, and as fast as a disk. Sources of the formats: OCP Microscaling Formats 1.0, section 6.3 (the shared
exponent is floor(log2) of the largest, less 2); DeepSeek-V3's `weight_scale_inv`; gpt-oss's `*_blocks` and `*_scales`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.checkpoint.cut import Piece
from harness.checkpoint.declared import ignores
from harness.checkpoint.header import dtype_bits, torch_dtype
from harness.checkpoint.names import tower
from harness.unreleased.rough import rough

SEED = 20
CHUNK_ELEMENTS = 1 << 22
FP8_MAX = 448.0
MX_BLOCK = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_KEPT = re.compile(r"embed|(^|\.)(lm_head|wte|unembed|output)\.|norm|conv|(^|\.)(gate|router)\.|shared_expert_gate")
"""Matrices that no format of few bits takes: embedding and head, routers, what is no product with a vector."""

Write = Callable[[str, str, tuple[int, ...]], list[Piece]]
"""Name, dtype and shape of a tensor as transformers has it -> the tensors that are written for it."""


@cache
def _normal() -> Tensor:
    places = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    quantiles: Tensor = torch.special.ndtri(places)
    return quantiles.float()


def rows_of(name: str, shape: Sequence[int], unit: int = 1) -> Iterator[Tensor]:
    """Yield a tensor's values as float32 [rows, columns], some rows at a time, a multiple of `unit` of them."""
    columns = shape[-1] if len(shape) > 1 else math.prod(shape)
    rows = math.prod(shape[:-1]) if len(shape) > 1 else 1
    step = max(unit, CHUNK_ELEMENTS // max(1, columns) // unit * unit)
    for number, first in enumerate(range(0, rows, step)):
        count = min(step, rows - first)
        seed = hashlib.blake2b(f"{SEED}/{name}/{number}".encode(), digest_size=8).digest()
        draw = np.random.Generator(np.random.SFC64(int.from_bytes(seed, "little")))
        codes = np.frombuffer(draw.bytes(2 * count * columns), dtype="<u2").astype(np.int32)
        if len(shape) > 1:  # everything that is made of a matrix is made element by element
            table = rough(name, _normal().clone(), shape)
            yield table.index_select(0, torch.from_numpy(codes)).view(count, columns)
        else:
            yield rough(name, _normal().index_select(0, torch.from_numpy(codes)), shape)[None]


def _bytes(value: Tensor) -> memoryview:
    flat = value.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)  # type: ignore[arg-type]


def piece(name: str, dtype: str, shape: tuple[int, ...], make: Callable[[], Iterator[Tensor]]) -> Piece:
    """Return a tensor to write, whose values are made when it is."""
    nbytes = math.prod(shape) * dtype_bits(dtype) // 8
    return Piece(name=name, dtype=dtype, shape=shape, nbytes=nbytes, make=lambda: map(_bytes, make()))


def plain(name: str, dtype: str, shape: tuple[int, ...]) -> list[Piece]:
    """Write a tensor as it is."""
    held = torch_dtype(dtype)
    if not held.is_floating_point:
        return [piece(name, dtype, shape, lambda: iter([torch.zeros(shape, dtype=held)]))]
    return [piece(name, dtype, shape, lambda: (rows.to(held) for rows in rows_of(name, shape)))]


def _fp8(
    name: str, dtype: str, shape: tuple[int, ...], *, block: tuple[int, int], quantised: Callable[[str], bool]
) -> list[Piece]:
    """Write a matrix as E4M3 codes and one float32 for each block, whose edges are partial."""
    if len(shape) != 2 or not quantised(name):
        return plain(name, dtype, shape)

    def both() -> Iterator[tuple[Tensor, Tensor]]:
        for rows in rows_of(name, shape, unit=block[0]):
            grid = tuple(-(-n // b) for n, b in zip(rows.shape, block, strict=True))
            padded = rows.new_zeros(grid[0] * block[0], grid[1] * block[1])
            padded[: rows.shape[0], : rows.shape[1]] = rows
            blocks = padded.view(grid[0], block[0], grid[1], block[1])
            scale = blocks.abs().amax(dim=(1, 3)).clamp_min(1e-12) / FP8_MAX
            codes = (blocks / scale[:, None, :, None]).view_as(padded)[: rows.shape[0], : rows.shape[1]]
            yield codes.to(torch.float8_e4m3fn), scale

    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    return [
        piece(name, "F8_E4M3", shape, lambda: (codes for codes, _ in both())),
        piece(f"{name}_scale_inv", "F32", grid, lambda: (scale for _, scale in both())),
    ]


def _mxfp4(name: str, dtype: str, shape: tuple[int, ...]) -> list[Piece]:
    """Write merged experts [E, in, out] as gpt-oss does: [E, out, in / 32] blocks of 16 bytes, and their scales."""
    experts, into, out = (*shape, 0, 0)[:3]
    if not re.search(r"experts\.(gate_up_proj|down_proj)$", name) or len(shape) != 3 or into % MX_BLOCK:
        return plain(name, dtype, shape)

    def both() -> Iterator[tuple[Tensor, Tensor]]:
        levels = torch.tensor(_E2M1)
        for rows in rows_of(name, (experts, out, into)):
            blocks = rows.view(rows.shape[0], -1, MX_BLOCK)
            _, exponent = torch.frexp(blocks.abs().amax(-1))
            shared = exponent - 3
            scaled = torch.ldexp(blocks, -shared[..., None])
            codes = torch.bucketize(scaled.abs(), (levels[1:] + levels[:-1]) / 2) + 8 * (scaled < 0)
            yield (
                (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8),
                (shared + 127).clamp(0, 254).to(torch.uint8),
            )

    groups = into // MX_BLOCK
    return [
        piece(f"{name}_blocks", "U8", (experts, out, groups, MX_BLOCK // 2), lambda: (b for b, _ in both())),
        piece(f"{name}_scales", "U8", (experts, out, groups), lambda: (s for _, s in both())),
    ]


def writer_of(config: Mapping[str, Any], scales: Set[str], notes: list[str]) -> tuple[dict[str, Any], Write]:
    """Return what writes tensors in the configured format, and the configuration as it then is.

    `scales` are names of scales that an index tells; without, what is quantised follows the configuration and names.
    """
    said = config.get("quantization_config")
    if not isinstance(said, dict):
        return dict(config), plain
    method, block = said.get("quant_method"), said.get("weight_block_size")
    if method == "fp8" and isinstance(block, list) and len(block) == 2:
        kept = ignores(tuple(p for p in said.get("modules_to_not_convert") or () if isinstance(p, str)))

        def quantised(name: str) -> bool:
            if scales:
                return f"{name}_scale_inv" in scales
            module = name.removesuffix(".weight")
            text = tower(name) == "text" and not _KEPT.search(name)
            return text and name.endswith(".weight") and not kept(module)

        return dict(config), partial(_fp8, block=(int(block[0]), int(block[1])), quantised=quantised)
    if method == "mxfp4":
        return dict(config), _mxfp4
    notes.append(f"the configured format ({method}) is not written: the weights are plain, without quantization_config")
    return {k: v for k, v in config.items() if k != "quantization_config"}, plain
