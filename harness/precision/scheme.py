"""`format[:granularity]` as a record. Knows names of formats; must not know torch or where a declaration stands.

    weights = "float8_e4m3fn:128x128"   activations = "int8:token"   cache = "float8_e4m3fn:head"   state = "bfloat16"
    keep = "*lm_head*,*router*"         globs of weights and caches that stay as they are

Granularity says who shares a scale: `tensor`, `channel` (a row of a weight), `token` (a row of activations, a key),
`head`, `RxC` (a block of a weight), `N` (a group along the last axis), or `cast` (no scale; too large saturates).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.errors import SpecError, nearest

KEEP = (
    "*embed*", "*lm_head*", "*norm*", "*router*", "*gate", "*.gate.weight", "*shared_expert_gate*", "*visual*",
    "*vision*", "*.indexer.weights_proj*",
)  # fmt: skip
"""What ports leave as it is unless they say otherwise: embedding, head, norms, routers and gates of experts, vision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A number format. Floats: `mantissa` bits, the least exponent, the largest value; integers: `mantissa` None."""

    name: str
    largest: float
    mantissa: int | None = None
    least_exponent: int = 0
    wide: bool = False


_E4M3 = Format(name="float8_e4m3fn", largest=448.0, mantissa=3, least_exponent=-6)
_E2M1 = Format(name="float4_e2m1fn", largest=6.0, mantissa=1, least_exponent=0)
FORMATS = {
    "float8_e4m3fn": _E4M3,
    "float8_e5m2": Format(name="float8_e5m2", largest=57344.0, mantissa=2, least_exponent=-14),
    "int8": Format(name="int8", largest=127.0),
    "int4": Format(name="int4", largest=7.0),
    "mxfp8": _E4M3,
    "mxfp4": _E2M1,
    "nvfp4": _E2M1,
    "bfloat16": Format(name="bfloat16", largest=3.3895313892515355e38, mantissa=7, least_exponent=-126, wide=True),
    "float16": Format(name="float16", largest=65504.0, mantissa=10, least_exponent=-14, wide=True),
    "float32": Format(name="float32", largest=3.4028234663852886e38, mantissa=23, least_exponent=-126, wide=True),
}
"""Formats by the name that a port declares. Source: OCP 8-bit floating point 1.0, OCP Microscaling 1.0, IEEE 754."""

_GROUPS = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
_BLOCK = re.compile(r"(\d+)x(\d+)")
_ROLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "weights": ("channel", ("tensor", "channel", "RxC", "N", "cast")),
    "activations": ("token", ("tensor", "token", "N", "cast")),
    "cache": ("tensor", ("tensor", "head", "token", "N", "cast")),
    "state": ("tensor", ("tensor", "head", "token", "N", "cast")),
}
"""What can be declared, the granularity where none is named, and those that make sense."""
KEYS = (*_ROLES, "keep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One format with its granularity; `rows` x `columns` is the block that shares a scale, 0 where it is no block."""

    declared: str
    format: Format
    granularity: str
    rows: int = 0
    columns: int = 0

    @property
    def power_of_two(self) -> bool:
        """Say whether scales are powers of two (E8M0)."""
        return self.declared.startswith("mx")

    @property
    def two_scales(self) -> bool:
        """Say whether the scale of a group is itself an FP8 number under one scale for the whole tensor."""
        return self.declared.startswith("nvfp4")

    def __str__(self) -> str:
        return self.declared


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What a port declares of its numbers beside its dtype; None is the dtype itself."""

    weights: Scheme | None = None
    activations: Scheme | None = None
    cache: Scheme | None = None
    state: Scheme | None = None
    keep: tuple[str, ...] = KEEP

    def keeps(self, name: str) -> bool:
        """Say whether a weight, or what a cache holds, stays as it is."""
        return any(fnmatch.fnmatchcase(name, glob) for glob in self.keep)

    def words(self) -> dict[str, str]:
        """Return the declaration spelt out, one spelling for each meaning; empty where nothing is declared."""
        found = {key: str(scheme) for key in _ROLES if (scheme := getattr(self, key)) is not None}
        return {**found, "keep": ",".join(self.keep)} if found and self.keep != KEEP else found


def parse_precision(words: Mapping[str, str | Sequence[str]]) -> Precision:
    """Parse what a port declares. Raises SpecError naming the nearest valid word, and the valid ones."""
    for key in words:
        if key not in KEYS:
            raise SpecError(f"unknown key {key!r} of a precision{nearest(key, list(KEYS))}; it has {', '.join(KEYS)}")
    told = words.get("keep", KEEP)
    globs = told.split(",") if isinstance(told, str) else told
    weights, activations, cache, state = (parse_scheme(k, words[k]) if words.get(k) else None for k in _ROLES)
    return Precision(
        weights=weights, activations=activations, cache=cache, state=state,
        keep=tuple(g.strip() for g in globs if g.strip()),
    )  # fmt: skip


def parse_scheme(key: str, text: object) -> Scheme:
    """Parse `format[:granularity]` for weights, activations, cache or state. Raises SpecError."""
    if not isinstance(text, str):
        raise SpecError(f"expected {key} like 'float8_e4m3fn:{_ROLES[key][0]}', found {text!r}")
    name, _, grain = text.partition(":")
    if name not in FORMATS:
        raise SpecError(f"unknown format {name!r} of {key}{nearest(name, list(FORMATS))}; one of {', '.join(FORMATS)}")
    form, usual, sensible = FORMATS[name], *_ROLES[key]
    if name in _GROUPS:
        if grain not in ("", str(_GROUPS[name])):
            raise SpecError(f"{name} shares a scale among {_GROUPS[name]} elements, found {grain!r} in {text!r}")
        return Scheme(declared=name, format=form, granularity="N", rows=1, columns=_GROUPS[name])
    grain = grain or ("cast" if form.wide else usual)
    if form.wide and grain != "cast":
        raise SpecError(f"{name} has no scale to share, found {grain!r} in {text!r}; say {name!r}")
    block = _BLOCK.fullmatch(grain)
    rows, columns = (int(block[1]), int(block[2])) if block else (1, int(grain)) if grain.isdigit() else (0, 0)
    kind = "RxC" if block else "N" if grain.isdigit() else grain
    if kind not in sensible or (kind in ("RxC", "N") and not rows * columns):
        valid = ", ".join({"RxC": "RxC (as 128x128)", "N": "N (as 128)"}.get(g, g) for g in sensible)
        raise SpecError(f"unknown granularity {grain!r} of {key}{nearest(grain, list(sensible))}; one of {valid}")
    declared = name if form.wide else f"{name}:{grain}"
    return Scheme(declared=declared, format=form, granularity=kind, rows=rows, columns=columns)
