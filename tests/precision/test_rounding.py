"""Round trips through number formats against slow ones written number by number."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from harness.precision.rounding import quantised, steps
from harness.precision.scheme import FORMATS, Scheme, parse_scheme


def scheme(text: str) -> Scheme:
    return parse_scheme("weights", text)


def numbers(mantissa: int, least: int, largest: float) -> list[float]:
    """Return all numbers of a small float that are not negative, one by one."""
    found = {m * 2.0 ** (least - mantissa) for m in range(2**mantissa)}
    exponent = least
    while 2.0**exponent <= largest:
        found |= {(1 + m / 2**mantissa) * 2.0**exponent for m in range(2**mantissa)}
        exponent += 1
    return sorted(x for x in found if x <= largest)


def nearest_even(x: float, grid: list[float]) -> float:
    """Return the nearest number; of two alike, the one whose place is even (its last bit is 0)."""
    best = min(range(len(grid)), key=lambda i: (abs(grid[i] - abs(x)), i % 2))
    return math.copysign(grid[best], x)


GRIDS = {
    "float8_e4m3fn": numbers(3, -6, 448.0),
    "float8_e5m2": numbers(2, -14, 57344.0),
    "mxfp8": numbers(3, -6, 448.0),
    "mxfp4": numbers(1, 0, 6.0),
    "nvfp4": numbers(1, 0, 6.0),
    "int8": [float(i) for i in range(128)],
    "int4": [float(i) for i in range(8)],
}


def values(seed: int, *shape: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw) * 10 ** torch.empty(shape).uniform_(-3, 2, generator=draw)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_a_cast_is_torchs_own_cast_but_saturates(name):
    """Without a scale, every value goes where torch's type puts it, ties included, and none becomes infinite."""
    grid = torch.tensor(GRIDS[name])
    ties = torch.cat([(grid[1:] + grid[:-1]) / 2, values(0, 4096), torch.tensor([0.0, -0.0, 1e9, -1e9])])
    largest = FORMATS[name].largest
    expected = ties.clamp(-largest, largest).to(getattr(torch, name)).float()
    assert torch.equal(quantised(ties, scheme(f"{name}:cast")), expected)


@pytest.mark.parametrize("name", sorted(GRIDS))
def test_a_group_is_rounded_as_one_by_one(name):
    """Groups along the last axis, the last one short: scale, nearest number, back, as plain Python does it."""
    text = name if name in ("mxfp8", "mxfp4", "nvfp4") else f"{name}:8"
    size = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}.get(name, 8)
    x = values(1, 3, 44).double()
    found = quantised(x, scheme(text))
    whole = float(x.abs().max()) / 448 / 6
    for row, start in itertools.product(range(3), range(0, 44, size)):
        part = x[row, start : start + size].tolist()
        top = max(abs(v) for v in part)
        scale = top / FORMATS[name].largest
        if name.startswith("mx"):
            scale = 2.0 ** (math.floor(math.log2(top)) - math.floor(math.log2(FORMATS[name].largest)))
        elif name == "nvfp4":
            scale = nearest_even(top / 6 / whole, GRIDS["float8_e4m3fn"]) * whole
        expected = [nearest_even(v / scale, GRIDS[name]) * scale for v in part]
        torch.testing.assert_close(found[row, start : start + size].tolist(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "text",
    ["float8_e4m3fn", "float8_e5m2:tensor", "float8_e4m3fn:16x32", "int8:20", "int8:cast", "int4", "mxfp8", "mxfp4",
     "nvfp4", "float16", "bfloat16"],
)  # fmt: skip
def test_rounding_twice_is_rounding_once(text, dtype):
    """What lies on the grid stays, the error is within half a step (two for cut powers of two), zero stays zero."""
    x = values(2, 40, 72).to(dtype)
    x[3] = 0
    once = quantised(x, scheme(text))
    twice = quantised(once, scheme(text))
    assert once.dtype is dtype
    assert once.shape == x.shape
    if text == "nvfp4":  # its scales are products of two numbers, rounded once more
        torch.testing.assert_close(twice, once, rtol=1e-6, atol=0)
    else:
        assert torch.equal(twice, once)
    assert not once[3].any()
    if text != "int8:cast":
        error = (once.double() - x.double()).abs()
        slack = x.double().abs() * torch.finfo(dtype).eps
        share = 2.0 if text.startswith("mx") else 0.5
        assert bool((error <= share * steps(x, scheme(text)).double() * 1.001 + slack).all())


def test_who_shares_a_scale():
    """A large value coarsens those that share its scale, and no others."""
    x = torch.ones(1, 2, 4, 8) * 0.01
    x[0, 1, 2, 3] = 100
    keys = {g: parse_scheme("cache", f"int8:{g}") for g in ("tensor", "head", "token", "4")}
    lost = {g: (quantised(x, s) == 0).float().sum().item() for g, s in keys.items()}
    assert lost == {"tensor": 63, "head": 31, "token": 7, "4": 3}


def test_not_a_number_stays_one():
    """A NaN is not rounded away; neither are those that share its scale."""
    x = torch.ones(2, 32)
    x[1, 4] = float("nan")
    for text in ("float8_e4m3fn:tensor", "int8:8", "mxfp4", "nvfp4", "float16"):
        assert bool(quantised(x, scheme(text))[1, 4].isnan()), text


def test_what_a_wide_type_cannot_hold_saturates():
    """65520 is infinite in float16 for torch, and the largest number here."""
    assert quantised(torch.tensor([1e6]), scheme("float16")).item() == 65504
