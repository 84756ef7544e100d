"""Values in a file that are no numbers, not there, or scaled by what is not theirs. Knows bits; not their reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.faults.catalogue import NoPlace
from harness.faults.disk.damage import a_matrix, answers, damage, quantised, weights
from harness.faults.disk.files import Coded, Files, Stored

NUMPY = {"F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E4M3FNUZ": "u1", "F8_E8M0": "u1", "U8": "u1", "I8": "u1", "BF16": "<u2",
         "F16": "<f2", "F32": "<f4", "I32": "<i4", "I64": "<i8"}  # fmt: skip
_NAN = {"BF16": 0x7FC0, "F8_E4M3": 0x7F, "F8_E5M2": 0x7E, "F8_E4M3FNUZ": 0x80, "F8_E8M0": 255, "F16": np.nan,
        "F32": np.nan}  # fmt: skip
_INFINITE = {"BF16": 0x7F80, "F8_E5M2": 0x7C, "F16": np.inf, "F32": np.inf}
_FINITE = "NaN|infinite|reserved|finite"


def change(files: Files, name: str, edit: Callable[[NDArray[np.generic]], NDArray[np.generic] | None]) -> None:
    """Edit a stored tensor's numbers (bits, where numpy has no such type), in place or by returning others."""
    value = files.get(name)
    array = value.array(NUMPY[value.dtype])
    other = edit(array)
    files.put(name, value.holding(array if other is None else other))


def _one(files: Files, weight: Coded, role: str, value: float) -> list[str]:
    def edit(array: NDArray[np.generic]) -> None:
        flat = array.reshape(-1)
        flat[len(flat) * 2 // 3] = np.array(value).astype(array.dtype)

    change(files, weight.parts[role], edit)
    return answers(weight)


def _code(files: Files, table: dict[str, float], weight: Coded, role: str) -> float:
    dtype = files.get(weight.parts[role]).dtype
    if role != "weight" and dtype == "U8":
        return 255
    if dtype not in table:
        raise NoPlace(f"{dtype} has no such value")
    return table[dtype]


@damage("content", _FINITE)
def one_value_not_a_number(files: Files) -> list[str]:
    """One element of a matrix is NaN."""
    weight = a_matrix(files)
    return _one(files, weight, "weight", _code(files, _NAN, weight, "weight"))


@damage("content", _FINITE)
def one_value_infinite(files: Files) -> list[str]:
    """One element of a matrix is infinite."""
    weight = a_matrix(files)
    return _one(files, weight, "weight", _code(files, _INFINITE, weight, "weight"))


@damage("content", _FINITE)
def embedding_not_a_number(files: Files) -> list[str]:
    """One element of the embedding is NaN: only a prompt with that token shows it."""
    weight = weights(files, kinds="embedding", layer=None)[0]
    return _one(files, weight, "weight", _code(files, _NAN, weight, "weight"))


@damage("content", _FINITE)
def norm_not_a_number(files: Files) -> list[str]:
    """One element of a norm is NaN."""
    weight = weights(files, kinds="norm")[0]
    return _one(files, weight, "weight", _code(files, _NAN, weight, "weight"))


@damage("content", _FINITE)
def scale_not_a_number(files: Files) -> list[str]:
    """One scale is NaN, or the byte that is reserved for it."""
    weight = quantised(files)
    return _one(files, weight, "scale", _code(files, _NAN, weight, "scale"))


@damage("content", _FINITE)
def global_scale_not_a_number(files: Files) -> list[str]:
    """A second scale is NaN."""
    weight = quantised(files, "global")
    return _one(files, weight, "global", np.nan)


def _by_byte(files: Files, weight: Coded) -> bool:
    return files.get(weight.parts["scale"]).dtype in ("U8", "F8_E8M0")


@damage("content", "zero")
def scale_zero(files: Files) -> list[str]:
    """One scale is zero: what it scales is lost."""
    weight = quantised(files)
    if _by_byte(files, weight):
        raise NoPlace("a scale byte has no zero")
    return _one(files, weight, "scale", 0)


@damage("content", "powers of two|apart")
def scale_byte_zero(files: Files) -> list[str]:
    """One scale byte is zero, which is 2^-127."""
    weight = quantised(files)
    if not _by_byte(files, weight):
        raise NoPlace("scales are no bytes")
    return _one(files, weight, "scale", 0)


@damage("content", "negative")
def scale_negative(files: Files) -> list[str]:
    """One scale is negative: its block has the other sign."""
    weight = quantised(files)
    if _by_byte(files, weight):
        raise NoPlace("a scale byte has no sign")
    dtype = files.get(weight.parts["scale"]).dtype
    name = weight.parts["scale"]

    def edit(array: NDArray[np.generic]) -> None:
        flat = array.reshape(-1)
        top = {"BF16": 0x8000, "F8_E4M3": 0x80}.get(dtype)
        flat[0] = flat[0] | array.dtype.type(top) if top else -flat[0]  # type: ignore[operator]

    change(files, name, edit)
    return answers(weight)


@damage("content", "zero")
def global_scale_zero(files: Files) -> list[str]:
    """A second scale is zero."""
    weight = quantised(files, "global")
    return _one(files, weight, "global", 0.0)


@damage("content", "zero")
def matrix_zero(files: Files) -> list[str]:
    """A matrix is zero in all its elements."""
    weight = a_matrix(files)
    change(files, weight.parts["weight"], lambda a: np.zeros_like(a))
    return answers(weight)


@damage("suspicion", "zero|0 times|size")
def scales_zero(files: Files) -> list[str]:
    """All scales of a matrix are zero."""
    weight = quantised(files)
    change(files, weight.parts["scale"], lambda a: np.zeros_like(a))
    return answers(weight)


@damage("content", "zero")
def norm_zero(files: Files) -> list[str]:
    """All elements of a norm are zero."""
    weight = weights(files, kinds="norm")[-1]
    change(files, weight.parts["weight"], lambda a: np.zeros_like(a))
    return [*answers(weight), files.file_of(weight.parts["weight"])]


@damage("content", "zero|\\[0, 0\\]")
def end_of_file_zero(files: Files) -> list[str]:
    """The last part of a file is zero, and its size right: it was made before it was written."""
    file = files.file_of(a_matrix(files).parts["weight"])

    def act(folder: Path) -> None:
        raw = (folder / file).read_bytes()
        (folder / file).write_bytes(raw[: len(raw) * 2 // 3].ljust(len(raw), b"\0"))

    files.after.append(act)
    own = [n for n, w in files.weights.items() if not {*w.parts.values()}.isdisjoint(files.shards[file])]
    return [file, *files.shards[file], *own]


# --- scales that are not theirs ---


@damage("headers", "shape|transposed|fit|scales")
def scales_transposed(files: Files) -> list[str]:
    """The grid of scales of a matrix that is not square is transposed."""
    for weight in weights(files, role="scale"):
        shape = files.get(weight.parts["scale"]).shape
        if len(shape) >= 2 and shape[-1] != shape[-2] and min(shape[-2:]) > 0:
            change(files, weight.parts["scale"], lambda a: np.ascontiguousarray(np.swapaxes(a, -1, -2)))
            return answers(weight)
    raise NoPlace("no grid of scales that is not square")


@damage("headers", "shape|fit|scales|layout")
def scales_one_short(files: Files) -> list[str]:
    """The last row of scales is missing."""
    weight = quantised(files)
    shape = files.get(weight.parts["scale"]).shape
    if not shape or shape[0] < 2:
        raise NoPlace("no rows of scales")
    change(files, weight.parts["scale"], lambda a: a[:-1])
    return answers(weight)


@damage("headers", "shape|fit|scale|strategy")
def scales_of_another_kind(files: Files) -> list[str]:
    """One weight has a single scale where its siblings have many."""
    weight = quantised(files)
    if int(np.prod(files.get(weight.parts["scale"]).shape)) < 2:
        raise NoPlace("one scale is all there is")
    change(files, weight.parts["scale"], lambda a: a.reshape(-1)[:1])
    return answers(weight)


def inverted(stored: Stored) -> Stored:
    """Return scales turned into their inverse."""
    if stored.dtype in ("U8", "F8_E8M0"):
        return stored.holding((254 - stored.array("u1").astype(int)).clip(0, 254).astype("u1"))
    if stored.dtype == "BF16":
        wide = (stored.array("<u2").astype(np.uint32) << 16).view("<f4")
        return stored.holding(((1 / wide).view(np.uint32) >> 16).astype("<u2"))
    if stored.dtype == "F8_E4M3":
        codes = stored.array("u1").astype(int)
        return stored.holding((112 - codes).clip(1, 126).astype("u1"))  # about 1 / x: the exponent's bias is 7
    kind = NUMPY[stored.dtype]
    with np.errstate(over="ignore"):
        return stored.holding((1 / stored.array(kind)).clip(-6e4, 6e4).astype(kind))


def _upside_down(files: Files, role: str, chosen: Sequence[Coded]) -> list[str]:
    """Put 1 / value in the place of a part of each weight; return what answers for the first."""
    for weight in chosen:
        files.put(weight.parts[role], inverted(files.get(weight.parts[role])))
    return answers(chosen[0])


@damage("suspicion", "upside down|times as large|size|scale")
def scales_inverted(files: Files) -> list[str]:
    """The scales of one weight are 1 / scale."""
    return _upside_down(files, "scale", [quantised(files)])


@damage("suspicion", "upside down|size|scale")
def all_scales_inverted(files: Files) -> list[str]:
    """The scales of all weights are 1 / scale."""
    _upside_down(files, "scale", weights(files, role="scale", layer=None))
    return ["*"]


@damage("suspicion", "upside down|size|scale")
def global_scale_inverted(files: Files) -> list[str]:
    """The second scale of one weight is the other exporter's: a divisor for a multiplier."""
    return _upside_down(files, "global", [quantised(files, "global")])


@damage("suspicion", "upside down|size|scale")
def all_global_scales_inverted(files: Files) -> list[str]:
    """The second scales of all weights are the other exporter's."""
    _upside_down(files, "global", weights(files, role="global", layer=None))
    return ["*"]


@damage("suspicion", "times as large|size|reserved")
def scales_doubled(files: Files) -> list[str]:
    """The scales of one weight are twice as large, as for another dialect of FP8."""
    weight = quantised(files)
    value = files.get(weight.parts["scale"])
    step = {"U8": 1, "F8_E8M0": 1, "BF16": 0x80, "F8_E4M3": 8}.get(value.dtype)
    if step is None:
        change(files, weight.parts["scale"], lambda a: (a * 2).astype(a.dtype))  # type: ignore[operator]
    else:
        change(files, weight.parts["scale"], lambda a: (a + a.dtype.type(step)).astype(a.dtype))  # type: ignore[operator]
    return answers(weight)


@damage("suspicion", "times as large|size")
def matrix_doubled(files: Files) -> list[str]:
    """A plainly stored matrix is twice as large as it should be."""
    weight = next((w for w in weights(files) if files.get(w.parts["weight"]).dtype == "BF16"), None)
    if weight is None:
        raise NoPlace("no matrix in bfloat16")
    change(files, weight.parts["weight"], lambda a: np.where(a & 0x7F80, a + 0x80, a).astype("<u2"))  # type: ignore[operator]
    return answers(weight)


@damage("suspicion", "mean|zero")
def zero_points_lost(files: Files) -> list[str]:
    """The zero points of one weight are zero."""
    weight = quantised(files, "zero")
    change(files, weight.parts["zero"], lambda a: np.zeros_like(a))
    return answers(weight)
