"""Quantised numbers: cast to FP8, and weights of FP8 blocks, MXFP4 and INT4 groups decoded. Must not know devices.

Decoded values are products of a code and a scale: one rounding in the result's dtype where they do not fit. Casts are
equality (to nearest, ties to even, saturating). Source: OCP Microscaling 1.0; OCP FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from harness.ops.arithmetic import Units, powers_of_2
from harness.ops.case import Case, Given, Spec, Want
from harness.ops.inputs import Maker, lay, sweep, values

SOURCE = "OCP FP8 and Microscaling 1.0; DeepSeek-V3 block scales 128x128"
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FP8_LARGEST = 448.0


def to_fp8(x: Tensor) -> Tensor:
    """Return the bytes of a tensor in FP8 E4M3, saturated."""
    return x.clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def from_fp8_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """Return an FP8 matrix times its scales of 128 x 128 blocks, in float32. codes [O, I] uint8."""
    wide = scale.repeat_interleave(128, 0)[: codes.shape[0]].repeat_interleave(128, 1)[:, : codes.shape[1]]
    return codes.contiguous().view(torch.float8_e4m3fn).float() * wide


def from_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Return MXFP4 weights in float32. packed [O, I/2] uint8, the low nibble first; scale [O, I/32] uint8."""
    table = torch.tensor(E2M1, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    return table[codes] * torch.exp2(scale.float() - 127).repeat_interleave(32, -1)


def from_int4_groups(packed: Tensor, scale: Tensor) -> Tensor:
    """Return INT4 weights in groups of 32. packed [O, I/8] int32, element j at bits 4j, stored + 8; scale [O, I/32]."""
    codes = torch.stack([(packed >> (4 * j)) & 15 for j in range(8)], -1).flatten(-2) - 8
    return codes.float() * scale.float().repeat_interleave(32, -1)


def _fp8_inputs(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    x = values(gen, dtype, (0 if content == "empty" else 3, size or 7), content)
    return Given(args=(lay(x * (1 if content == "large" else 2.0**-4), form),))


def _fp8(u: Units, x: Tensor) -> Sequence[Want]:
    """Round to E4M3 by hand: 3 bits of mantissa, exponents from -6, saturated at 448."""
    size = x.abs().clamp(max=FP8_LARGEST)
    exponent = (torch.frexp(size).exponent - 1).clamp(min=-6)
    step = powers_of_2(exponent - 3)
    value = ((size / step).round() * step).clamp(max=FP8_LARGEST)
    exponent = (torch.frexp(value).exponent - 1).clamp(min=-6)
    mantissa = value / powers_of_2(exponent - 3)
    normal = mantissa >= 8
    code = torch.where(normal, (exponent + 7) * 8 + mantissa - 8, mantissa)
    return [Want(value=(code + 128 * torch.signbit(x)).to(torch.uint8), exact=True)]


def _blocks(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    codes = torch.randint(0, 127, (131, size), generator=gen) + 128 * torch.randint(0, 2, (131, size), generator=gen)
    scale = torch.rand(2, -(-size // 128), generator=gen) + 0.01
    return Given(args=(lay(codes.to(torch.uint8), form), scale))


def _blocks_truth(u: Units, codes: Tensor, scale: Tensor) -> Sequence[Want]:
    code = codes.long()
    exponent, mantissa = (code & 127) >> 3, (code & 7).double()
    size = torch.where(exponent > 0, (1 + mantissa / 8) * powers_of_2(exponent - 7), mantissa * 2.0**-9)
    rows, columns = torch.arange(code.shape[0]) // 128, torch.arange(code.shape[1]) // 128
    value = torch.where(code > 127, -size, size) * scale[rows][:, columns]
    return [Want(value=value, slack=u.out * value.abs())]


def _mxfp4(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    groups = max(1, size // 32)
    packed = torch.randint(0, 256, (5, groups * 16), generator=gen).to(torch.uint8)
    scale = torch.randint(110, 140, (5, groups), generator=gen).to(torch.uint8)
    return Given(args=(lay(packed, form), scale))


def _mxfp4_truth(u: Units, packed: Tensor, scale: Tensor) -> Sequence[Want]:
    out = torch.empty(packed.shape[0], packed.shape[1] * 2, dtype=torch.float64)
    table = torch.tensor(E2M1, dtype=torch.float64)
    out[:, 0::2], out[:, 1::2] = table[packed.long() % 16], table[packed.long() // 16]
    return [Want(value=out * 2.0 ** (scale.double() - 127)[:, torch.arange(out.shape[1]) // 32])]


def _int4(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    groups = max(1, size // 32)
    packed = torch.randint(-(2**31), 2**31, (5, groups * 4), generator=gen).to(torch.int32)
    return Given(args=(lay(packed, form), values(gen, dtype, (5, groups))))


def _int4_truth(u: Units, packed: Tensor, scale: Tensor) -> Sequence[Want]:
    words = packed.long() % 2**32
    columns = torch.arange(packed.shape[1] * 8)
    codes = words[:, columns // 8] // 16 ** (columns % 8) % 16 - 8
    value = codes.double() * scale[:, columns // 32]
    return [Want(value=value, slack=u.out * value.abs())]


def _spec(
    name: str, call: Callable[..., Tensor], truth: Callable[..., Sequence[Want]], make: Maker, *contents: str
) -> Spec:
    def cases(full: bool) -> Iterator[Case]:
        return sweep(make, full=full, sizes=(32, 64, 129, 257) if full else (64, 129), base=65, contents=contents)

    return Spec(name=name, family="formats", call=call, truth=truth, source=SOURCE, plain=False, cases=cases)


SPECS = (
    _spec("to_fp8", to_fp8, _fp8, _fp8_inputs, "large", "empty"),
    _spec("from_fp8_blocks", from_fp8_blocks, _blocks_truth, _blocks),
    _spec("from_mxfp4", from_mxfp4, _mxfp4_truth, _mxfp4),
    _spec("from_int4_groups", from_int4_groups, _int4_truth, _int4),
)
