"""How tensors of the built-in checkpoint are drawn and stored. Knows distributions and formats; must not know the
model's names, files or code.

Everything is drawn with the frozen legacy generator of numpy, each tensor from a seed of its own, and only by additions
and products, so that the bytes are the same on every machine.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from reference_impl import encoders
from reference_impl.encoders import Floats

SEED = 24
OUTLIERS = (3.5, 0.1, -1.8)
"""Values of the three channels of every norm that are far from 1."""
FP8_BLOCK = (128, 128)

Stored = dict[str, tuple[str, npt.NDArray[Any]]]
"""Tensors as the file holds them: safetensors dtype and raw array by name."""


class Drawing:
    """Draws tensors by name and stores them in their format."""

    def __init__(self) -> None:
        self.stored: Stored = {}

    def _draw(self, name: str) -> np.random.RandomState:
        return np.random.RandomState(zlib.crc32(f"{SEED}:{name}".encode()))

    def normal(self, name: str, *shape: int) -> Floats:
        """Draw values of mean 0 and variance 1: twelve uniform draws summed, so that no libm is involved."""
        total: Floats = self._draw(name).random_sample((12, *shape)).sum(axis=0)
        return total - 6.0

    def uniform(self, name: str, *shape: int) -> Floats:
        """Draw values from [0, 1)."""
        return self._draw(name).random_sample(shape)

    def spread(self, name: str, count: int) -> Floats:
        """Draw a permutation of evenly spaced values of mean 0 and variance 1: no value is far from the others."""
        even = np.arange(count) - (count - 1) / 2
        return self._draw(name).permutation(even / np.sqrt(np.mean(even**2)))

    def dealt(self, name: str, groups: int, size: int) -> Floats:
        """Draw values as `spread` does, to and fro over groups, so that no group is worth more than another."""
        values, draw = np.sort(self.spread(name, groups * size)).reshape(size, groups), self._draw(f"{name}.dealt")
        values[1::2] = values[1::2, ::-1]
        return np.concatenate([draw.permutation(group) for group in draw.permutation(values.T)])

    def bf16(self, name: str, value: Floats) -> None:
        """Add a tensor in bfloat16."""
        self.stored[name] = ("BF16", encoders.encode_bf16(value))

    def f32(self, name: str, value: Floats) -> None:
        """Add a tensor in float32."""
        self.stored[name] = ("F32", value.astype("<f4"))

    def matrix(self, name: str, rows: int, columns: int, gain: float = 1.0) -> Floats:
        """Draw a matrix that keeps the size of its input, times a gain."""
        return self.normal(name, rows, columns) * float(gain / np.sqrt(columns))

    def linear(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """Add a bfloat16 matrix and its bias."""
        self.bf16(f"{name}.weight", self.matrix(name, rows, columns, gain))
        self.bias(name, rows)

    def bias(self, name: str, size: int) -> None:
        """Add a small bias."""
        self.bf16(f"{name}.bias", 0.1 * self.normal(f"{name}.bias", size))

    def layer_norm(self, name: str, size: int) -> None:
        """Add the weight and the bias of a layer norm."""
        self.norm(name, size)
        self.bias(name, size)

    def norm(self, name: str, size: int) -> None:
        """Add the weight of a norm: about 1, with outliers."""
        weight = 1 + 0.2 * self.normal(name, size)
        weight[self._draw(f"{name}.outliers").permutation(size)[: len(OUTLIERS)]] = OUTLIERS
        self.bf16(f"{name}.weight", weight)

    def fp8(self, name: str, value: Floats) -> None:
        """Add a matrix in FP8 with its scales."""
        codes, scale_inv = encoders.encode_fp8_block(value, FP8_BLOCK)
        self.stored[f"{name}.weight"] = ("F8_E4M3", codes)
        self.stored[f"{name}.weight_scale_inv"] = ("F32", scale_inv)

    def mxfp4(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """Add a matrix whose blocks of 32 differ in size by up to 2^3, with the variance of the whole kept."""
        choices = np.array([0.25, 0.5, 1.0, 2.0])
        gains = choices[self._draw(f"{name}.gains").randint(0, 4, (rows, columns // 32))] / np.sqrt(np.mean(choices**2))
        packed, scale = encoders.encode_mxfp4(self.matrix(name, rows, columns, gain) * np.repeat(gains, 32, axis=1))
        self.stored[f"{name}.weight_packed"] = ("U8", packed)
        self.stored[f"{name}.weight_scale"] = ("U8", scale)
