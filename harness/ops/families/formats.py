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


def to_e5m2(x: Tensor) -> Tensor:
    """Return the bytes of a tensor in FP8 E5M2: to infinity beyond its largest number."""
    return x.to(torch.float8_e5m2).view(torch.uint8)


def to_int8(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale as codes of 8 bits, in float32. x [T, I]; scale [T, 1] float32."""
    return (x.float() / scale).round().clamp(-128, 127)


def from_int8(codes: Tensor, scale: Tensor) -> Tensor:
    """Return INT8 weights in float32. codes [O, I] int8, scale [O, 1] float32."""
    return codes.float() * scale


def from_nvfp4(packed: Tensor, scale: Tensor, whole: Tensor) -> Tensor:
    """Return NVFP4 weights in float32. packed [O, I/2] uint8; scale [O, I/16] uint8 as E4M3; whole [] float32."""
    table = torch.tensor(E2M1, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    return table[codes] * (scale.view(torch.float8_e4m3fn).float() * whole).repeat_interleave(16, -1)


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
    if content == "halves":  # in the middle between two codes, of normal and of subnormal ones: ties go to even
        x = ((2 * torch.arange(3 * size) + 1) * 2.0**-4).view(3, size).clamp(max=31 / 16)
        x = (x * 2.0 ** -torch.arange(3.0)[:, None] * 2.0**-5).to(dtype)
        return Given(args=(lay(x, form),))
    return Given(args=(lay(x * {"large": 1, "beyond": 2.0**16}.get(content, 2.0**-4), form),))


def _rounded(x: Tensor, mantissa: int, bias: int, largest: float) -> Tensor:
    """Return codes of 8 bits without sign, rounded to nearest, ties to even, by hand; at most that of `largest`."""
    size = x.abs()
    exponent = (torch.frexp(size).exponent - 1).clamp(min=1 - bias)
    step = powers_of_2(exponent - mantissa)
    value = ((size / step).round() * step).clamp(max=largest)
    exponent = (torch.frexp(value).exponent - 1).clamp(min=1 - bias)
    steps, ones = value / powers_of_2(exponent - mantissa), 2**mantissa
    return torch.where(steps >= ones, (exponent + bias) * ones + steps - ones, steps)


def _fp8(u: Units, x: Tensor) -> Sequence[Want]:
    code = _rounded(x, 3, 7, FP8_LARGEST)
    return [Want(value=(code + 128 * torch.signbit(x)).to(torch.uint8), exact=True)]


def _e5m2(u: Units, x: Tensor) -> Sequence[Want]:
    code = _rounded(x, 2, 15, 2.0**16)  # the code of 2^16 is infinity's
    return [Want(value=(code + 128 * torch.signbit(x)).to(torch.uint8), exact=True)]


def _int8_inputs(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    x = values(gen, dtype, (0 if content == "empty" else 3, size or 7))
    scale = torch.rand(x.shape[0], 1, generator=gen) * 0.01 + 0.01
    if content == "halves":  # in the middle between two codes
        x, scale = (torch.arange(3 * size).view(3, size) % 200 - 100 + 0.5).to(dtype), torch.ones(3, 1)
    return Given(args=(lay(x, form), scale))


def _int8_truth(u: Units, x: Tensor, scale: Tensor) -> Sequence[Want]:
    """A quotient within its own rounding of the middle may go either way; at the middle itself to even."""
    value = x / scale
    near = ((value - value.floor() - 0.5).abs() <= 2.0**-23 * value.abs()) & (value != value.floor() + 0.5)
    return [Want(value=value.round().clamp(-128, 127), slack=near.double())]


def _int8_codes(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    codes = torch.randint(-128, 128, (5, size), generator=gen).to(torch.int8)
    return Given(args=(lay(codes, form), torch.rand(5, 1, generator=gen) + 0.01))


def _from_int8_truth(u: Units, codes: Tensor, scale: Tensor) -> Sequence[Want]:
    return [Want(value=codes.double() * scale, slack=u.out * (codes.double() * scale).abs())]


def _nvfp4(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    groups = max(1, size // 16)
    packed = torch.randint(0, 256, (5, groups * 8), generator=gen).to(torch.uint8)
    scale = torch.randint(1, 126, (5, groups), generator=gen).to(torch.uint8)
    return Given(args=(lay(packed, form), scale, torch.rand((), generator=gen) + 0.01))


def _nvfp4_truth(u: Units, packed: Tensor, scale: Tensor, whole: Tensor) -> Sequence[Want]:
    out = torch.empty(packed.shape[0], packed.shape[1] * 2, dtype=torch.float64)
    table = torch.tensor(E2M1, dtype=torch.float64)
    out[:, 0::2], out[:, 1::2] = table[packed.long() % 16], table[packed.long() // 16]
    value = out * (_e4m3(scale) * whole)[:, torch.arange(out.shape[1]) // 16]
    return [Want(value=value, slack=2 * 2.0**-24 * value.abs())]


def _blocks(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    codes = torch.randint(0, 127, (131, size), generator=gen) + 128 * torch.randint(0, 2, (131, size), generator=gen)
    scale = torch.rand(2, -(-size // 128), generator=gen) + 0.01
    return Given(args=(lay(codes.to(torch.uint8), form), scale))


def _blocks_truth(u: Units, codes: Tensor, scale: Tensor) -> Sequence[Want]:
    rows, columns = torch.arange(codes.shape[0]) // 128, torch.arange(codes.shape[1]) // 128
    value = _e4m3(codes) * scale[rows][:, columns]
    return [Want(value=value, slack=u.out * value.abs())]


def _e4m3(codes: Tensor) -> Tensor:
    """Return what bytes are as E4M3, in float64, by hand."""
    code = codes.long()
    exponent, mantissa = (code & 127) >> 3, (code & 7).double()
    size = torch.where(exponent > 0, (1 + mantissa / 8) * powers_of_2(exponent - 7), mantissa * 2.0**-9)
    return torch.where(code > 127, -size, size)


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
    _spec("to_fp8", to_fp8, _fp8, _fp8_inputs, "large", "beyond", "halves", "empty"),
    _spec("to_e5m2", to_e5m2, _e5m2, _fp8_inputs, "large", "beyond", "halves", "empty"),
    _spec("to_int8", to_int8, _int8_truth, _int8_inputs, "halves", "empty"),
    _spec("from_int8", from_int8, _from_int8_truth, _int8_codes),
    _spec("from_nvfp4", from_nvfp4, _nvfp4_truth, _nvfp4),
    _spec("from_fp8_blocks", from_fp8_blocks, _blocks_truth, _blocks),
    _spec("from_mxfp4", from_mxfp4, _mxfp4_truth, _mxfp4),
    _spec("from_int4_groups", from_int4_groups, _int4_truth, _int4),
)
