"""What stored codes and scales can show before anything is decoded. Knows bits of number formats; must not know files.

Extremes of the bits are enough: a NaN, an infinity or a reserved byte has the largest pattern of its sign, so that two
reductions without a copy look at every element. Sources: IEEE 754 (float16, float32, float64), bfloat16 as its upper
half, OCP 8-bit floating point 1.0 (E4M3: S.1111.111 is NaN; E5M2 as IEEE), OCP MX 1.0 5.4 (E8M0: 255 is NaN).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

_BITS: dict[str, tuple[int, int]] = {
    "BF16": (16, 0x7F80),
    "F16": (16, 0x7C00),
    "F32": (32, 0x7F800000),
    "F64": (64, 0x7FF0000000000000),
    "F8_E4M3": (8, 0x7F),
    "F8_E5M2": (8, 0x7C),
}
"""Width, and the smallest positive pattern that is not a finite number."""
_FNUZ = ("F8_E4M3FNUZ", "F8_E5M2FNUZ")
_NORM = re.compile(r"norm\w*\.weight$")
WILD_OCTAVES = 48
"""Powers of two between the least and the greatest scale of one tensor beyond which they are not of one weight.
Source: a bf16 matrix of a trained model spans 20 octaves between its smallest and largest block of 32 at most."""


@dataclass(slots=True)
class Codes:
    """The extremes of one tensor's bits, signed and unsigned, fed piece by piece; `first` is where one was reserved."""

    dtype: str
    scale: bool = False
    count: int = 0
    reserved: int = 0
    first: int = -1
    high: int = 0
    zeros: int = 0
    negative: int = 0
    least: float = math.inf
    greatest: float = 0.0

    def take(self, data: memoryview) -> None:
        """Look at the next bytes of the tensor."""
        width, limit = _BITS.get(self.dtype, (8, 0))
        unsigned = np.frombuffer(data, dtype=f"<u{width // 8}")
        if not unsigned.size:
            return
        signed = unsigned.view(f"<i{width // 8}")
        high, top = int(unsigned.max()), int(signed.max()) if limit else 0
        if self._is_exponent:
            bad = high == 255
        elif self.dtype in _FNUZ:
            bad = int(signed.min()) == -128
        else:
            bad = bool(limit) and (top >= limit or high >= limit + (1 << (width - 1)))
        if bad:
            self._reserve(unsigned, width, limit)
        if self.scale:
            self._scales(unsigned, high)
        self.high = max(self.high, high & ~(1 << (width - 1)) if limit else high, top)
        self.count += unsigned.size

    @property
    def _is_exponent(self) -> bool:
        return self.dtype == "F8_E8M0" or (self.scale and self.dtype in ("U8", "I8"))

    def _reserve(self, unsigned: Any, width: int, limit: int) -> None:
        if self._is_exponent:
            mask = unsigned == 255
        elif self.dtype in _FNUZ:
            mask = unsigned == 0x80
        else:
            mask = (unsigned & ((1 << (width - 1)) - 1)) >= limit
        if self.first < 0:
            self.first = self.count + int(mask.argmax())
        self.reserved += int(mask.sum())

    def _scales(self, unsigned: Any, high: int) -> None:
        """Look at scales as the numbers they are; of powers of two, the extremes say everything."""
        if self._is_exponent and high < 255:
            unsigned = np.array([unsigned.min(), high], dtype=np.uint8)
        values = _numbers(unsigned, self.dtype, exponent=self._is_exponent)
        values = values[np.isfinite(values)]
        self.zeros += int((values == 0).sum())
        self.negative += int((values < 0).sum())
        some = np.abs(values[values != 0])
        if some.size:
            self.least, self.greatest = min(self.least, float(some.min())), max(self.greatest, float(some.max()))


@cache
def _e4m3() -> Any:
    codes = np.arange(256)
    magnitude = codes & 0x7F
    fine = np.where(
        magnitude < 8, np.ldexp(magnitude / 8.0, -6), np.ldexp(1 + (magnitude % 8) / 8.0, magnitude // 8 - 7)
    )
    return np.where(magnitude == 0x7F, np.nan, np.where(codes >= 0x80, -fine, fine)).astype(np.float32)


def _numbers(unsigned: Any, dtype: str, *, exponent: bool) -> Any:
    if exponent:
        return np.where(unsigned == 255, np.nan, np.ldexp(1.0, unsigned.astype(np.int64) - 127))
    if dtype == "BF16":
        return (unsigned.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E4M3":
        return _e4m3()[unsigned]
    kinds = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
    return unsigned.view(kinds[dtype]) if dtype in kinds else np.zeros(0)


def code_problems(codes: Codes, shape: Sequence[int], name: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield what is wrong with a tensor's codes, as kind, what was expected, what was found.

    A vector may be zero (a bias); the weights of a norm, which its `name` tells, are not.
    """
    if codes.reserved:
        at = (
            [int(i) for i in np.unravel_index(codes.first, tuple(shape))]
            if math.prod(shape) == codes.count
            else codes.first
        )
        kind = "reserved_scale" if codes.scale else "nonfinite"
        what = "scales" if codes.scale else "values"
        yield kind, f"finite {what}", f"{codes.reserved} of {codes.count} NaN, infinite or reserved, the first at {at}"
    full = len(shape) >= 2 or (_NORM.search(name) is not None and codes.count > 1)
    if not codes.scale and full and codes.count and not codes.high and codes.dtype != "BOOL":
        what = "a matrix" if len(shape) >= 2 else "a norm"
        yield "all_zero", f"{what} with values", f"zero in all of {codes.count} elements"
    if codes.scale and codes.zeros:
        yield "zero_scale", "scales above zero", f"{codes.zeros} of {codes.count} are zero: what they scale is lost"
    if codes.scale and codes.negative:
        yield "negative_scale", "scales above zero", f"{codes.negative} of {codes.count} are negative"
    if codes.scale and codes.least < math.inf and codes.greatest > 0:
        octaves = math.log2(codes.greatest / codes.least)
        if octaves > WILD_OCTAVES:
            found = f"from {codes.least:.3g} to {codes.greatest:.3g}, {octaves:.0f} powers of two apart"
            yield "wild_scale", f"scales within {WILD_OCTAVES} powers of two", found
