"""A port's loader in numpy, right until one of its steps is exchanged. Knows stored parts; not the harness's decoders.

Each step is a function of its own, so that a mistake is what it is in real loaders: one line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.faults.disk.encode import AWQ_PLACES, E2M1, FLOAT8, widened
from harness.faults.disk.files import Coded, Files, Stored, Values

Array = NDArray[Any]
Steps = Mapping[str, Callable[..., Any]]
NIBBLES = np.concatenate([E2M1, -E2M1])


def pairs(packed: Array) -> Array:
    """Split bytes into codes, the low one first. [.., n] -> [.., 2n]."""
    low, high = packed & 15, packed >> 4
    return np.stack([low, high], axis=-1).reshape(*packed.shape[:-1], -1)


def fields(words: Array) -> Array:
    """Split 32-bit words into eight codes, the first lowest. [.., n] -> [.., 8n]."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    return ((words.view(np.uint32)[..., None] >> shifts) & 15).astype(np.int64).reshape(*words.shape[:-1], -1)


def exponent(byte: Array) -> Array:
    """Return what a scale byte means."""
    return np.asarray(np.exp2(byte.astype(np.float64) - 127))


def float8(codes: Array, dtype: str) -> Array:
    """Return what codes of a small float mean; reserved ones count as zero."""
    table = np.zeros(128)
    table[: len(FLOAT8[dtype])] = FLOAT8[dtype]
    return np.asarray(np.where(codes >> 7 == 1, -1.0, 1.0) * table[codes & 127])


def spread(scale: Array, shape: tuple[int, ...], block: tuple[int, int]) -> Array:
    """Give each element its scale."""
    wide: Array = np.repeat(np.repeat(scale, block[0], axis=-2), block[1], axis=-1)
    return wide[..., : shape[-2], : shape[-1]]


def _same(value: Any, *_: Any) -> Any:
    return value


def load(files: Files, weight: Coded, wrong: Steps | None = None) -> Values:
    """Return the values of a weight; `wrong` exchanges steps by name.

    Steps: pairs, table, exponent, fields, scale (after it is a number), overall, zero, order, block, float8, spread,
    result (of the whole).
    """
    steps: dict[str, Callable[..., Any]] = {
        "pairs": pairs, "table": _same, "exponent": exponent, "fields": fields, "scale": _same, "overall": _same,
        "zero": _same, "order": _same, "block": _same, "float8": float8, "spread": spread, "result": _same,
        **(wrong or {}),
    }  # fmt: skip
    parts = {role: files.get(name) for role, name in weight.parts.items()}
    less_one = files.config.get("quantization_config", {}).get("checkpoint_format") == "gptq"
    found = _decoded(parts, weight, steps, less_one=less_one)
    return np.asarray(steps["result"](found, weight), dtype=np.float32)


def _decoded(parts: Mapping[str, Stored], weight: Coded, steps: Steps, *, less_one: bool) -> Array:
    stored = parts["weight"]
    if "scale" not in parts:
        return weight.truth.astype(np.float64)
    if "zero" in parts:
        return _with_zeros(parts, weight, steps, less_one=less_one)
    shape = weight.truth.shape
    block = steps["block"](_block(parts, shape), shape, parts["scale"].shape)
    scale = steps["scale"](_numbers(parts["scale"], steps), parts["scale"], weight)
    if "global" in parts:
        overall = float(parts["global"].array("<f4").reshape(-1)[0])
        factor = 1 / overall if "packed" in weight.parts["weight"] else overall
        scale = scale * steps["overall"](factor)
    if stored.dtype.startswith("F8"):
        codes = steps["float8"](stored.array("u1"), stored.dtype)
    elif stored.dtype == "I32":
        codes = steps["zero"](steps["fields"](stored.array("<i4"))[..., : shape[-1]] - 8.0)
    else:
        codes = steps["table"](NIBBLES)[steps["pairs"](stored.array("u1").reshape(*shape[:-1], -1))]
    return np.asarray(codes * steps["spread"](_grid(scale, shape), shape, block))


def _grid(scale: Array, shape: tuple[int, ...]) -> Array:
    return scale if scale.ndim == len(shape) else scale.reshape((1,) * len(shape))


def _numbers(scale: Stored, steps: Steps) -> Array:
    if scale.dtype in ("U8", "F8_E8M0"):
        return np.asarray(steps["exponent"](scale.array("u1")))
    if scale.dtype == "BF16":
        return widened(scale.array("<u2")).astype(np.float64)
    if scale.dtype == "F8_E4M3":
        return float8(scale.array("u1"), "F8_E4M3")
    return scale.array({"F32": "<f4", "F16": "<f2"}[scale.dtype]).astype(np.float64)


def _block(parts: Mapping[str, Stored], shape: tuple[int, ...]) -> tuple[int, int]:
    """Return how many rows and columns share a scale."""
    grid = parts["scale"].shape
    if int(np.prod(grid)) == 1 and parts["scale"].dtype in ("F32", "BF16") and "input" in parts:
        return shape[-2], shape[-1]
    if parts["scale"].dtype == "BF16" and grid[-1] == 1:
        return 1, shape[-1]
    if parts["weight"].dtype.startswith("F8") and grid[-2] != shape[-2]:
        return 128, 128
    return 1, 16 if "global" in parts else 32


def _with_zeros(parts: Mapping[str, Stored], weight: Coded, steps: Steps, *, less_one: bool) -> Array:
    """Decode GPTQ and AWQ, which are stored [in, out]; `less_one`: zero points are, in the file."""
    inputs = weight.truth.shape[1]
    scale = parts["scale"].array("<f2").astype(np.float64)
    words, zeros = parts["weight"].array("<i4"), parts["zero"].array("<i4")
    if "group" in parts:
        codes = steps["fields"](np.ascontiguousarray(words.T)).T[:inputs]
        zero = steps["zero"](fields(zeros) + int(less_one))
        group = steps["order"](parts["group"].array("<i4"))
    else:
        place = steps["order"](np.argsort(AWQ_PLACES))
        codes, zero = (fields(x).reshape(len(x), -1, 8)[:, :, place].reshape(len(x), -1) for x in (words, zeros))
        zero, group = steps["zero"](zero), np.arange(inputs) // 32
    scale = steps["scale"](scale, parts["scale"], weight)
    return np.asarray(((codes - zero[group]) * scale[group]).T)
