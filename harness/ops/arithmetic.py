"""How a device computes, as it declares it, and what roundings that allows. Must not know operators.

A budget here is a bound of the formula's own rounding, not a limit: limits (a ratio of 1) are in the checklists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from harness.errors import SpecError, nearest

UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "tf32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff: half the distance from 1 to the next number. Source: IEEE 754; bfloat16, tf32: their mantissas."""
_BITS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
FLOATS = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """What a device declares. The default is what libraries promise: float32 inside, one rounding at the end.

    `accumulate`: where sums of products are kept; `factors`: what the factors of a product are rounded to first;
    `compute`: where elementwise work happens; `subnormals`: kept or flushed; `exp_ulps`: of exp, erf, tanh, log.
    """

    accumulate: str = "float32"
    factors: str = ""
    compute: str = "float32"
    subnormals: str = "kept"
    exp_ulps: float = 4.0

    def words(self) -> dict[str, str]:
        """Return what differs from the default, as words."""
        plain = Arithmetic()
        names = [f.name for f in fields(self)]
        return {n: str(getattr(self, n)) for n in names if getattr(self, n) != getattr(plain, n)}


def parse_arithmetic(words: Mapping[str, str]) -> Arithmetic:
    """Read a declaration. Raises SpecError for a word that is not in the language."""
    known = {
        "accumulate": tuple(UNITS), "factors": ("", *UNITS), "compute": tuple(UNITS), "subnormals": ("kept", "flushed"),
    }  # fmt: skip
    found: dict[str, str | float] = {}
    for key, value in words.items():
        if key == "exp_ulps":
            found[key] = float(value)
        elif key not in known:
            raise SpecError(f"arithmetic: unknown key {key!r}{nearest(key, [*known, 'exp_ulps'])}")
        elif value not in known[key]:
            raise SpecError(f"arithmetic {key}: expected {', '.join(known[key])}, found {value!r}")
        else:
            found[key] = value
    return Arithmetic(**found)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Unit roundoffs for a dtype on a device: of the result, of sums, of factors, inside, of exp and the like."""

    out: float
    acc: float
    factor: float
    inside: float
    exp: float


def units(arithmetic: Arithmetic, dtype: torch.dtype) -> Units:
    """Return the unit roundoffs that an operator in a dtype may make. float64 is computed in float64."""
    own = UNITS[str(dtype).removeprefix("torch.")] if dtype.is_floating_point else 0.0
    wide = dtype is torch.float64
    inside = own if wide else UNITS[arithmetic.compute]
    return Units(
        out=own,
        acc=own if wide else UNITS[arithmetic.accumulate],
        factor=UNITS[arithmetic.factors] if arithmetic.factors and UNITS[arithmetic.factors] > own else 0.0,
        inside=inside,
        exp=inside * arithmetic.exp_ulps,
    )


def half_ulp(expected: Tensor, dtype: torch.dtype, arithmetic: Arithmetic) -> Tensor:
    """Return half the distance between neighbouring numbers of a dtype at each expected value, in float64.

    Where subnormals are flushed, what is below the smallest normal number may as well become 0.
    """
    size = expected.abs().nan_to_num(0.0, 0.0, 0.0).to(torch.float64)
    exponent = torch.frexp(size).exponent - 1
    smallest = torch.finfo(dtype).smallest_normal
    least = math.frexp(smallest)[1] - 1
    half = powers_of_2(exponent.clamp(min=least) - _BITS[dtype] - 1)
    if arithmetic.subnormals == "flushed":
        return torch.where(size <= smallest * (1 + 2.0**-6), size.clamp(min=smallest), half)
    return half


def powers_of_2(exponent: Tensor) -> Tensor:
    """Return 2^exponent in float64, exactly."""
    return torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64), exponent)
