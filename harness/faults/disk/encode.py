"""Encode matrices in each stored format, and say what the stored numbers are. Knows formulas; no decoder is used.

Everything is worked out in numpy from the definitions of the formats: a code's value from its bits, an encoding by the
nearest value. The truth that is returned beside the parts is code by scale, rounded once to float32.

Sources: OCP 8-bit floating point 1.0; OCP MX 1.0, 5.3 and 6.3; the FNUZ dialect (bias one more, no infinity, 0x80 NaN);
the published layouts of gpt-oss, compressed-tensors, ModelOpt, DeepSeek, GPTQ and AWQ.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.faults.disk.files import Stored, Values, stored

Parts = dict[str, tuple[str, Stored]]
"""Role -> the end of the stored name after the module's own, and the tensor."""
Encoded = tuple[Parts, Values]
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
Ints = NDArray[np.int64]


def magnitudes(exponent_bits: int, mantissa_bits: int, bias: int, largest_code: int) -> NDArray[np.float64]:
    """Return the values of the non-negative finite codes of a small float, in order."""
    found = []
    for code in range(largest_code + 1):
        exponent, fraction = code >> mantissa_bits, (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
        found.append(math.ldexp(fraction, 1 - bias) if exponent == 0 else math.ldexp(1 + fraction, exponent - bias))
    return np.array(found)


FLOAT8 = {
    "F8_E4M3": magnitudes(4, 3, 7, 0x7E),
    "F8_E5M2": magnitudes(5, 2, 15, 0x7B),
    "F8_E4M3FNUZ": magnitudes(4, 3, 8, 0x7F),
    "F8_E5M2FNUZ": magnitudes(5, 2, 16, 0x7F),
}


def _nearest(values: NDArray[Any], table: NDArray[np.float64]) -> Ints:
    """Return the places of the nearest magnitudes; what is beyond the last saturates."""
    found: Ints = np.searchsorted((table[1:] + table[:-1]) / 2, np.abs(values)).astype(np.int64)
    return found


def float8_codes(values: NDArray[Any], dtype: str) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Return codes and what they stand for."""
    table = FLOAT8[dtype]
    at = _nearest(values, table)
    negative = np.signbit(values) & ~(dtype.endswith("FNUZ") & (at == 0))
    found = np.where(negative, -table[at], table[at])
    return (at | (negative.astype(np.int64) << 7)).astype(np.uint8), found


def _e2m1_codes(values: NDArray[Any]) -> tuple[Ints, NDArray[np.float64]]:
    at = _nearest(values, E2M1)
    negative = np.signbit(values)
    return at | (negative.astype(np.int64) << 3), np.where(negative, -E2M1[at], E2M1[at])


def _nibbles(codes: Ints) -> NDArray[np.uint8]:
    """Pack two codes a byte along the last axis, the even one low."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Round to bfloat16, ties to even, and return the bits."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widened(bits: NDArray[np.uint16]) -> Values:
    """Return the values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def plain(values: Values, dtype: str) -> tuple[Stored, Values]:
    """Store values as they are, in a usual float type."""
    if dtype == "BF16":
        bits = bfloat16(values)
        return stored(dtype, bits), widened(bits)
    kept = values.astype({"F16": np.float16, "F32": np.float32}[dtype])
    return stored(dtype, kept), kept.astype(np.float32)


def _spread(scale: NDArray[Any], shape: tuple[int, ...], block: tuple[int, int]) -> NDArray[Any]:
    """Repeat a grid of scales over the elements of a matrix; the last blocks may be partial."""
    wide = np.repeat(np.repeat(scale, block[0], axis=-2), block[1], axis=-1)
    return wide[..., : shape[-2], : shape[-1]]


def _largest(values: Values, block: tuple[int, int]) -> NDArray[np.float64]:
    """Return the largest magnitude of each block. [.., O, I] -> [.., ceil(O / b0), ceil(I / b1)]."""
    *lead, rows, columns = values.shape
    high, wide = -(-rows // block[0]), -(-columns // block[1])
    full = np.zeros((*lead, high * block[0], wide * block[1]))
    full[..., :rows, :columns] = np.abs(values)
    cells = full.reshape(*lead, high, block[0], wide, block[1])
    found: NDArray[np.float64] = cells.max(axis=(-3, -1))
    return np.maximum(found, 1e-12)


def _power(largest: NDArray[np.float64], top: int) -> Ints:
    """Return the shared exponent as its byte: floor(log2(largest)), less that of the format's largest, plus 127."""
    return (np.floor(np.log2(largest)).astype(np.int64) - top + 127).clip(0, 254)


# --- formats: each takes [.., O, I] and returns parts and truth ---


def fp8_block(values: Values, *, suffix: str = "weight_scale_inv", dtype: str = "F8_E4M3") -> Encoded:
    """FP8 with a float32 scale for each 128x128 (the DeepSeek layout); it multiplies."""
    scale = (_largest(values, (128, 128)) / FLOAT8[dtype][-1]).astype(np.float32)
    codes, kept = float8_codes(values / _spread(scale, values.shape, (128, 128)), dtype)
    truth = (kept * _spread(scale, values.shape, (128, 128)).astype(np.float64)).astype(np.float32)
    return {"weight": ("weight", stored(dtype, codes)), "scale": (suffix, stored("F32", scale))}, truth


def fp8_power(values: Values) -> Encoded:
    """FP8 with a scale for each 128x128 that is a power of two, stored as its exponent (DeepSeek V4)."""
    byte = _power(_largest(values, (128, 128)), 8)
    factor = _spread(np.exp2(byte - 127.0), values.shape, (128, 128))
    codes, kept = float8_codes(values / factor, "F8_E4M3")
    parts = {"weight": ("weight", stored("F8_E4M3", codes)), "scale": ("scale", stored("F8_E8M0", byte.astype("u1")))}
    return parts, (kept * factor).astype(np.float32)


def fp8_rows(values: Values, *, dtype: str = "F8_E4M3") -> Encoded:
    """FP8 with a bfloat16 scale for each row."""
    bits = bfloat16(np.abs(values).max(axis=-1, keepdims=True) / FLOAT8[dtype][-1])
    scale = widened(bits)
    codes, kept = float8_codes(values / scale, dtype)
    truth = (kept * scale.astype(np.float64)).astype(np.float32)
    return {"weight": ("weight", stored(dtype, codes)), "scale": ("weight_scale", stored("BF16", bits))}, truth


def fp8_tensor(
    values: Values, *, dtype: str = "F8_E4M3", scale_name: str = "weight_scale", input_name: str = "input_scale"
) -> Encoded:
    """FP8 with one float32 scale, and one for the activations beside it."""
    scale = np.float32(np.abs(values).max() / FLOAT8[dtype][-1])
    codes, kept = float8_codes(values / scale, dtype)
    parts = {
        "weight": ("weight", stored(dtype, codes)),
        "scale": (scale_name, stored("F32", np.array([scale], dtype=np.float32))),
        "input": (input_name, stored("F32", np.array([0.02], dtype=np.float32))),
    }
    return parts, (kept * np.float64(scale)).astype(np.float32)


def mxfp8(values: Values) -> Encoded:
    """FP8 with a scale byte for each 32 along the input."""
    byte = _power(_largest(values, (1, 32)), 8)
    factor = _spread(np.exp2(byte - 127.0), values.shape, (1, 32))
    codes, kept = float8_codes(values / factor, "F8_E4M3")
    parts = {"weight": ("weight", stored("F8_E4M3", codes)), "scale": ("weight_scale", stored("U8", byte.astype("u1")))}
    return parts, (kept * factor).astype(np.float32)


def mxfp4(
    values: Values,
    *,
    names: tuple[str, str] = ("weight_packed", "weight_scale"),
    dtypes: tuple[str, str] = ("U8", "U8"),
) -> Encoded:
    """E2M1, two a byte, with a scale byte for each 32 along the input."""
    byte = _power(_largest(values, (1, 32)), 2)
    factor = _spread(np.exp2(byte - 127.0), values.shape, (1, 32))
    codes, kept = _e2m1_codes(values / factor)
    packed = _nibbles(codes)
    parts = {
        "weight": (names[0], stored(dtypes[0], packed)),
        "scale": (names[1], stored(dtypes[1], byte.astype("u1"))),
    }
    return parts, (kept * factor).astype(np.float32)


def mxfp4_blocks(values: Values) -> Encoded:
    """Lay E2M1 out as gpt-oss does: blocks of 16 bytes on an axis of their own, named after the parameter."""
    parts, truth = mxfp4(values, names=("_blocks", "_scales"))
    packed = parts["weight"][1]
    shape = (*packed.shape[:-1], packed.shape[-1] // 16, 16)
    return {"weight": ("_blocks", packed.labelled(shape=shape)), "scale": parts["scale"]}, truth


def nvfp4(values: Values, *, divisor: bool) -> Encoded:
    """E2M1 with an E4M3 scale for each 16 and one float32 for all: a divisor (compressed-tensors) or a multiplier."""
    overall = np.float32(448 * 6 / np.abs(values).max())
    local = _largest(values, (1, 16)) / 6 * overall
    scale_codes, scale = float8_codes(local, "F8_E4M3")
    other = overall if divisor else np.float32(1 / overall)
    factor = (scale / np.float64(other) if divisor else scale * np.float64(other)).astype(np.float32)
    wide = _spread(factor, values.shape, (1, 16)).astype(np.float64)
    codes, kept = _e2m1_codes(values / np.maximum(wide, 1e-30))
    names = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale") if divisor else (
        "weight", "weight_scale", "weight_scale_2", "input_scale")  # fmt: skip
    shape = (1,) if divisor else ()
    parts = {
        "weight": (names[0], stored("U8", _nibbles(codes))),
        "scale": (names[1], stored("F8_E4M3", scale_codes)),
        "global": (names[2], stored("F32", np.full(shape, other, dtype=np.float32))),
        "input": (names[3], stored("F32", np.full(shape, 0.01, dtype=np.float32))),
    }
    return parts, (kept * wide).astype(np.float32)


def _words(fields: Ints, bits: int = 4) -> NDArray[np.int32]:
    """Pack fields along the last axis into 32-bit words, the first lowest."""
    each = 32 // bits
    pad = -fields.shape[-1] % each
    fields = np.pad(fields, [(0, 0)] * (fields.ndim - 1) + [(0, pad)]).reshape(*fields.shape[:-1], -1, each)
    words = (fields.astype(np.uint64) << (np.arange(each, dtype=np.uint64) * np.uint64(bits))).sum(axis=-1)
    found: NDArray[np.int32] = words.astype(np.uint32).view(np.int32)
    return found


def int4(values: Values, *, group: int = 32) -> Encoded:
    """Signed integers of four bits plus 8, eight a word along the input, with a bfloat16 scale for each group."""
    bits = bfloat16(_largest(values, (1, group)) / 7)
    wide = _spread(widened(bits), values.shape, (1, group)).astype(np.float64)
    q = np.rint(values / wide).clip(-8, 7).astype(np.int64)
    parts = {
        "weight": ("weight_packed", stored("I32", _words(q + 8))),
        "scale": ("weight_scale", stored("BF16", bits)),
        "shape": ("weight_shape", stored("I64", np.array(values.shape, dtype=np.int64))),
    }
    return parts, (q * wide).astype(np.float32)


def gptq(values: Values, *, v1: bool, group: int = 32, seed: int = 3) -> Encoded:
    """Write GPTQ of four bits: words along the input, zero points less one in version 1, inputs in another order."""
    inputs = values.shape[1]
    group_of = np.random.default_rng(seed).permutation(np.arange(inputs) // group)
    groups = -(-inputs // group)
    low = np.stack([values[:, group_of == g].min(axis=1) for g in range(groups)])
    high = np.stack([values[:, group_of == g].max(axis=1) for g in range(groups)])
    scale = np.maximum((high - low) / 15, 1e-6).astype(np.float16)
    zero = np.rint(-low / scale.astype(np.float64)).clip(1, 15).astype(np.int64)
    wide, offset = scale.astype(np.float64)[group_of].T, zero[group_of].T
    q = (np.rint(values / wide) + offset).clip(0, 15).astype(np.int64)
    parts = {
        "weight": ("qweight", stored("I32", np.ascontiguousarray(_words(q).T))),
        "zero": ("qzeros", stored("I32", _words(zero - 1 if v1 else zero))),
        "scale": ("scales", stored("F16", scale)),
        "group": ("g_idx", stored("I32", group_of.astype(np.int32))),
    }
    return parts, ((q - offset) * wide).astype(np.float32)


def awq(values: Values, *, group: int = 32) -> Encoded:
    """Write AWQ gemm: words along the output, whose nibbles hold outputs 0 2 4 6 1 3 5 7."""
    _, inputs = values.shape
    rows = values.T
    low = np.stack([rows[g : g + group].min(axis=0) for g in range(0, inputs, group)])
    high = np.stack([rows[g : g + group].max(axis=0) for g in range(0, inputs, group)])
    scale = np.maximum((high - low) / 15, 1e-6).astype(np.float16)
    zero = np.rint(-low / scale.astype(np.float64)).clip(0, 15).astype(np.int64)
    wide, offset = (np.repeat(x, group, axis=0)[:inputs] for x in (scale.astype(np.float64), zero))
    q = (np.rint(rows / wide) + offset).clip(0, 15).astype(np.int64)

    def ordered(fields: Ints) -> Ints:
        return fields.reshape(len(fields), -1, 8)[:, :, list(AWQ_PLACES)].reshape(len(fields), -1)

    parts = {
        "weight": ("qweight", stored("I32", _words(ordered(q)))),
        "zero": ("qzeros", stored("I32", _words(ordered(zero)))),
        "scale": ("scales", stored("F16", scale)),
    }
    return parts, ((q - offset) * wide).T.astype(np.float32)
