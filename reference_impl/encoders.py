"""Writers of the small number formats. Knows bits and numpy; must not know the model, files or the loader's decoder."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

FP8_MAX = 448.0
MXFP4_BLOCK = 32


def _e4m3_magnitudes() -> Floats:
    """Return the 127 finite magnitudes of E4M3 in the order of their codes 0..126 (127 is NaN)."""
    codes = np.arange(127)
    exponent, fraction = codes >> 3, codes & 7
    subnormal = fraction / 8 * 2.0**-6
    return np.where(exponent == 0, subnormal, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))


E4M3_MAGNITUDES = _e4m3_magnitudes()
E2M1_MAGNITUDES: Floats = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)


def _nearest_code(magnitude: Floats, table: Floats) -> npt.NDArray[np.uint8]:
    """Return the code of the nearest table entry, ties to the even code, saturating at the largest."""
    above = np.clip(np.searchsorted(table, magnitude), 1, len(table) - 1)
    below = above - 1
    to_below, to_above = magnitude - table[below], table[above] - magnitude
    take_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return np.where(take_above, above, below).astype(np.uint8)


def _with_sign(code: npt.NDArray[np.uint8], value: Floats, bit: int) -> npt.NDArray[np.uint8]:
    """Set the sign bit of negative values; a zero keeps a plus."""
    return np.where((value < 0) & (code > 0), code | np.uint8(bit), code).astype(np.uint8)


def encode_bf16(value: Floats) -> npt.NDArray[np.uint16]:
    """Round to bfloat16 bits, to nearest even. The values must be finite."""
    bits = value.astype("<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def encode_fp8_block(value: Floats, block: tuple[int, int]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Encode a matrix as E4M3 codes and one float32 multiplier per block; edge blocks are partial.

    Shapes: value [O, I] -> codes [O, I], scale_inv [ceil(O / block[0]), ceil(I / block[1])].
    """
    rows, columns = block
    codes = np.zeros(value.shape, dtype=np.uint8)
    scale_inv = np.zeros((-(-value.shape[0] // rows), -(-value.shape[1] // columns)), dtype="<f4")
    for i, j in np.ndindex(*scale_inv.shape):
        place = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scale_inv[i, j] = np.abs(value[place]).max() / FP8_MAX
        scaled = value[place] / np.float64(scale_inv[i, j])
        codes[place] = _with_sign(_nearest_code(np.abs(scaled), E4M3_MAGNITUDES), scaled, 0x80)
    return codes, scale_inv


def encode_mxfp4(value: Floats) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Encode a matrix as packed E2M1 (low nibble = even element) and one E8M0 scale byte per 32 inputs.

    Shapes: value [O, I] -> packed [O, I/2], scale [O, I/32].
    Source: OCP Microscaling Formats v1.0, section 6.3 (shared exponent = floor(log2 amax) - 2, bias 127).
    """
    blocks = value.reshape(value.shape[0], -1, MXFP4_BLOCK)
    _, exponent = np.frexp(np.abs(blocks).max(axis=-1))  # amax = m * 2^exponent with m in [0.5, 1)
    shared = exponent - 1 - 2
    scaled = np.ldexp(blocks, -shared[..., None])
    codes = _with_sign(_nearest_code(np.abs(scaled), E2M1_MAGNITUDES), scaled, 0x8).reshape(value.shape)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed.astype(np.uint8), (shared + 127).astype(np.uint8)
