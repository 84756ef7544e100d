"""Decoders one element at a time, in Python numbers, written from the formulas. Import nothing of the decoders."""

from __future__ import annotations

import math

import torch

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def e2m1(code: int) -> float:
    """Return a 4-bit code's value."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    magnitude = 0.5 * mantissa if exponent == 0 else (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1)
    return -magnitude if code & 8 else magnitude


def e8m0(byte: int) -> float:
    """Return a scale byte's value."""
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


def float32(value: float) -> torch.Tensor:
    """Round once to float32."""
    return torch.tensor(value, dtype=torch.float64).to(torch.float32)


def mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[O, n] bytes and [O, blocks] bytes -> [O, 2n]."""
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    out = torch.empty(rows, columns)
    for r in range(rows):
        for c in range(columns):
            byte = int(packed[r, c // 2]) & 0xFF
            code = byte >> 4 if c % 2 else byte & 15
            out[r, c] = float32(e2m1(code) * e8m0(int(scale[r, c // 32])))
    return out


def nvfp4(packed: torch.Tensor, scale: torch.Tensor, overall: float, *, divisor: bool) -> torch.Tensor:
    """[O, n] bytes, [O, blocks] numbers -> [O, 2n]."""
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    out = torch.empty(rows, columns)
    for r in range(rows):
        for c in range(columns):
            byte = int(packed[r, c // 2])
            code = byte >> 4 if c % 2 else byte & 15
            number = float(scale[r, c // 16].to(torch.float32))
            local = float32(number / overall if divisor else number * overall)
            out[r, c] = float32(e2m1(code) * float(local))
    return out


def blocks(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """[O, I] numbers and a grid of numbers -> [O, I]."""
    out = torch.empty(values.shape)
    for r in range(values.shape[0]):
        for c in range(values.shape[1]):
            out[r, c] = float32(float(values[r, c]) * float(scale[r // block[0], c // block[1]]))
    return out


def gptq(qweight, qzeros, scales, group_of, *, bits: int, v1: bool) -> torch.Tensor:
    """Return [O, I]."""
    each, mask = 32 // bits, (1 << bits) - 1
    inputs, outputs = qweight.shape[0] * each, qweight.shape[1]
    out = torch.empty(outputs, inputs)
    for o in range(outputs):
        for i in range(inputs):
            g = int(group_of[i])
            q = (int(qweight[i // each, o]) & 0xFFFFFFFF) >> (bits * (i % each)) & mask
            z = (int(qzeros[g, o // each]) & 0xFFFFFFFF) >> (bits * (o % each)) & mask
            z = (z + 1) & mask if v1 else z
            out[o, i] = float32((q - z) * float(scales[g, o]))
    return out


def awq(qweight, qzeros, scales, group: int) -> torch.Tensor:
    """Return [O, I]."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    inputs, outputs = qweight.shape[0], qweight.shape[1] * 8
    out = torch.empty(outputs, inputs)
    for i in range(inputs):
        for word in range(outputs // 8):
            for nibble in range(8):
                o = word * 8 + order[nibble]
                q = (int(qweight[i, word]) & 0xFFFFFFFF) >> (4 * nibble) & 15
                z = (int(qzeros[i // group, word]) & 0xFFFFFFFF) >> (4 * nibble) & 15
                out[o, i] = float32((q - z) * float(scales[i // group, o]))
    return out
