"""What ports get wrong when they load a right file: one step of a loader, exchanged. Knows steps; no audit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.faults.catalogue import NoPlace
from harness.faults.disk.damage import quantised, weights
from harness.faults.disk.encode import bfloat16, widened
from harness.faults.disk.files import Coded, Files, Values
from harness.faults.disk.loader import Array, float8, load, spread

Loaded = dict[str, Values]
"""What memory holds, by name."""
Load = Callable[[Files], tuple[Loaded, list[str]]]
"""Returns weights of the damaged layer that are held otherwise, and globs of the names to be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One mistake of a loader. `cause`: expressions of which one belongs into what is said; `dtype` of what is held."""

    name: str
    says: str
    cause: tuple[str, ...]
    load: Load
    dtype: str = "bfloat16"


MISTAKES: dict[str, Mistake] = {}


def mistake(cause: str, dtype: str = "bfloat16") -> Callable[[Load], Load]:
    """Add a function as a mistake; `cause` holds expressions separated by `|`."""

    def add(function: Load) -> Load:
        name = function.__name__  # type: ignore[attr-defined]
        says = (function.__doc__ or "").strip().splitlines()[0]
        MISTAKES[name] = Mistake(name=name, says=says, cause=tuple(cause.split("|")), load=function, dtype=dtype)
        return function

    return add


def _one(files: Files, weight: Coded, **steps: Callable[..., Any]) -> tuple[Loaded, list[str]]:
    return {weight.name: load(files, weight, steps)}, [weight.name]


def _stored_as(files: Files, *dtypes: str, role: str = "weight") -> Coded:
    """Return a quantised weight of the layer one of whose parts has one of these dtypes. Raises NoPlace."""
    found = [w for w in weights(files) if "scale" in w.parts and files.get(w.parts[role]).dtype in dtypes]
    if not found:
        raise NoPlace(f"no quantised weight whose {role} is {' or '.join(dtypes)}")
    return found[0]


def _four_bits(files: Files) -> Coded:
    return _stored_as(files, "U8", "I8")


def _bytes(files: Files) -> Coded:
    return _stored_as(files, "U8", "F8_E8M0", role="scale")


# --- codes ---


@mistake("nibble")
def nibbles_exchanged(files: Files) -> tuple[Loaded, list[str]]:
    """The high nibble of a byte is taken as the first element."""

    def pairs(packed: Array) -> Array:
        return np.stack([packed >> 4, packed & 15], axis=-1).reshape(*packed.shape[:-1], -1)

    return _one(files, _four_bits(files), pairs=pairs)


@mistake("low nibbles|halves|by turns")
def nibbles_in_halves(files: Files) -> tuple[Loaded, list[str]]:
    """All low nibbles of a row come first, then all high ones."""
    return _one(files, _four_bits(files), pairs=lambda p: np.concatenate([p & 15, p >> 4], axis=-1))


@mistake("sign")
def sign_bit_lost(files: Files) -> tuple[Loaded, list[str]]:
    """The sign bit of four-bit codes is masked away."""
    return _one(files, _four_bits(files), table=np.abs)


@mistake("sign|shift")
def arithmetic_shift(files: Files) -> tuple[Loaded, list[str]]:
    """Bytes are signed, and the shift for the high nibble drags the sign along: it is taken three times."""

    def pairs(packed: Array) -> Array:
        low, high = packed & 15, packed >> 4
        high = np.where(high > 7, high + 8, high)
        return np.stack([low, high], axis=-1).reshape(*packed.shape[:-1], -1)

    return _one(files, _four_bits(files), pairs=pairs, table=lambda table: np.concatenate([table, 3 * table[:8]]))


@mistake("integers|code|table|linear")
def codes_taken_for_integers(files: Files) -> tuple[Loaded, list[str]]:
    """Four-bit floats are taken for four-bit integers."""
    integers = np.array([*range(8), *range(-8, 0)], dtype=np.float64)
    return _one(files, _four_bits(files), table=lambda _: integers)


@mistake("other end|reversed")
def words_from_the_top(files: Files) -> tuple[Loaded, list[str]]:
    """The highest nibble of a word is taken as the first element."""
    weight = _stored_as(files, "I32")
    if set(weight.parts) == {"weight", "zero", "scale"}:
        raise NoPlace("these words have an order of their own")

    def fields(words: Array) -> Array:
        shifts = np.arange(28, -4, -4, dtype=np.uint32)
        return ((words.view(np.uint32)[..., None] >> shifts) & 15).astype(np.int64).reshape(*words.shape[:-1], -1)

    return _one(files, weight, fields=fields)


@mistake("order")
def words_in_plain_order(files: Files) -> tuple[Loaded, list[str]]:
    """Words of AWQ are read as if their nibbles lay in order."""
    weight = _stored_as(files, "I32")
    if set(weight.parts) != {"weight", "zero", "scale"}:
        raise NoPlace("no words of AWQ")
    return _one(files, weight, order=lambda _: np.arange(8))


@mistake("e5m2|e4m3|dialect")
def float8_of_another_split(files: Files) -> tuple[Loaded, list[str]]:
    """FP8 codes are read with another split of exponent and mantissa."""
    weight = _stored_as(files, "F8_E4M3", "F8_E5M2")
    other = {"F8_E4M3": "F8_E5M2", "F8_E5M2": "F8_E4M3"}
    return _one(files, weight, float8=lambda codes, dtype: float8(codes, other[dtype]))


@mistake("fnuz|FNUZ|half|twice")
def float8_of_the_other_bias(files: Files) -> tuple[Loaded, list[str]]:
    """FP8 codes are taken for those of the dialect with another bias: everything is off by a factor of 2."""
    weight = _stored_as(files, "F8_E4M3", "F8_E4M3FNUZ")
    factor = 2.0 if files.get(weight.parts["weight"]).dtype.endswith("FNUZ") else 0.5
    return _one(files, weight, float8=lambda codes, dtype: float8(codes, dtype) * factor)


# --- scales ---


@mistake("bias|exponent|128")
def exponent_off_by_one(files: Files) -> tuple[Loaded, list[str]]:
    """Scale bytes are read with a bias of 128 instead of 127."""
    return _one(files, _bytes(files), exponent=lambda byte: np.exp2(byte.astype(np.float64) - 128))


@mistake("as a number|number")
def scale_byte_as_a_number(files: Files) -> tuple[Loaded, list[str]]:
    """A scale byte is taken for the scale itself."""
    return _one(files, _bytes(files), exponent=lambda byte: byte.astype(np.float64))


@mistake("bias|without|2\\^")
def exponent_without_bias(files: Files) -> tuple[Loaded, list[str]]:
    """Scale bytes are exponents without their bias."""
    weight = _bytes(files)
    return _one(files, weight, exponent=lambda byte: np.exp2(byte.astype(np.float64)))


@mistake("1 / |reciprocal|inver|divid|upside")
def scale_divided_by(files: Files) -> tuple[Loaded, list[str]]:
    """Codes are divided by their scales."""
    return _one(files, quantised(files), scale=lambda scale, *_: 1 / np.maximum(scale, 1e-30))


@mistake("no scale|as 1|without|scale")
def scale_taken_as_one(files: Files) -> tuple[Loaded, list[str]]:
    """Scales were not found, and 1 is taken."""
    return _one(files, quantised(files), scale=lambda scale, *_: np.ones_like(scale))


@mistake("twice")
def scale_applied_twice(files: Files) -> tuple[Loaded, list[str]]:
    """Scales are applied twice."""
    return _one(files, quantised(files), scale=lambda scale, *_: scale * scale)


def _grid_of(files: Files, least: int = 2) -> Coded:
    for weight in weights(files, role="scale"):
        shape = files.get(weight.parts["scale"]).shape
        if len(shape) >= 2 and min(shape[-2:]) >= least:
            return weight
    raise NoPlace("no grid of scales")


@mistake("transpos|axes")
def scales_transposed(files: Files) -> tuple[Loaded, list[str]]:
    """The grid of scales is read with its axes exchanged."""

    def scale(value: Array, *_: Any) -> Array:
        return np.ascontiguousarray(np.swapaxes(value, -1, -2)).reshape(value.shape)

    return _one(files, _grid_of(files), scale=scale)


@mistake("shift|next|previous|row")
def scales_of_the_next_row(files: Files) -> tuple[Loaded, list[str]]:
    """Each row, or block of rows, has the scales of the next one."""
    return _one(files, _grid_of(files, 1 if "fp8_channel" in files.format else 2),
                scale=lambda value, *_: np.roll(value, -1, axis=-2))  # fmt: skip


@mistake("another|of model|scales of")
def scales_of_another(files: Files) -> tuple[Loaded, list[str]]:
    """A weight has the scales of another of its shape."""
    found = weights(files, role="scale")
    for a in found:
        for b in found:
            if (
                a is not b
                and files.get(a.parts["scale"]).shape == files.get(b.parts["scale"]).shape
                and (a.truth.shape == b.truth.shape)
            ):
                mixed = Coded(name=a.name, kind=a.kind, parts={**a.parts, "scale": b.parts["scale"]}, truth=a.truth)
                return _one(files, mixed)
    raise NoPlace("no two of one shape")


@mistake("from the shape|block size|blocks of")
def block_size_from_the_shape(files: Files) -> tuple[Loaded, list[str]]:
    """The size of a block is taken as rows by rows of scales, as if all were whole."""
    for weight in weights(files, role="scale"):
        grid = files.get(weight.parts["scale"]).shape
        if files.get(weight.parts["weight"]).dtype.startswith("F8") and len(grid) == 2 and max(grid) > 1:
            rows, columns = weight.truth.shape
            if (
                grid[0] != rows
                and (rows % (128 * grid[0]) or columns % (128 * grid[1]))
                and not (rows % grid[0] or columns % grid[1])
            ):
                return _one(files, weight, block=lambda _, shape, grid: (shape[0] // grid[0], shape[1] // grid[1]))
    raise NoPlace("no partial blocks of scales")


@mistake("global")
def global_scale_left_out(files: Files) -> tuple[Loaded, list[str]]:
    """The second scale is left out."""
    return _one(files, quantised(files, "global"), overall=lambda _: 1.0)


@mistake("global|inver|divid|multipl")
def global_scale_inverted(files: Files) -> tuple[Loaded, list[str]]:
    """The second scale is multiplied with where it divides, or the reverse."""
    return _one(files, quantised(files, "global"), overall=lambda value: 1 / value)


@mistake("block|cut")
def cut_through_a_block(files: Files) -> tuple[Loaded, list[str]]:
    """Two ranks cut a weight through a block, and each counts its own blocks from its first row."""
    for weight in weights(files, role="scale"):
        rows = weight.truth.shape[-2]
        if (
            files.get(weight.parts["weight"]).dtype.startswith("F8")
            and rows % 256
            and rows > 130
            and (files.get(weight.parts["scale"]).shape[0] == -(-rows // 128))
        ):
            half = rows // 2

            def cut(scale: Array, shape: tuple[int, ...], block: tuple[int, int], half: int = half) -> Array:
                whole = spread(scale, shape, block)
                second = np.repeat(np.repeat(scale[half // 128 :], 128, axis=0), 128, axis=1)
                whole[half:] = second[: shape[0] - half, : shape[1]]
                return whole

            return _one(files, weight, spread=cut)
    raise NoPlace("no blocks of rows to cut through")


@mistake("scale|rank|cut|first")
def scales_not_cut(files: Files) -> tuple[Loaded, list[str]]:
    """The second rank takes its rows and the first rows of the scales."""
    weight = _grid_of(files)
    half = files.get(weight.parts["scale"]).shape[-2] // 2

    def scale(value: Array, *_: Any) -> Array:
        value = value.copy()
        value[..., half : 2 * half, :] = value[..., :half, :]
        return value

    return _one(files, weight, scale=scale)


# --- zero points and orders ---


@mistake("zero")
def zero_point_of_the_other_version(files: Files) -> tuple[Loaded, list[str]]:
    """Zero points are read as the other version stores them: off by one."""
    weight = quantised(files, "zero")
    step = -1 if files.config["quantization_config"].get("checkpoint_format") == "gptq" else 1
    return _one(files, weight, zero=lambda z: z + step)


@mistake("zero")
def zero_points_left_out(files: Files) -> tuple[Loaded, list[str]]:
    """Zero points are left out."""
    return _one(files, quantised(files, "zero"), zero=np.zeros_like)


@mistake("zero|sign|added")
def zero_points_added(files: Files) -> tuple[Loaded, list[str]]:
    """Zero points are added where they are to be taken away."""
    return _one(files, quantised(files, "zero"), zero=lambda z: -z)


@mistake("zero|scale")
def groups_read_by_rows(files: Files) -> tuple[Loaded, list[str]]:
    """Scales of groups are read row by row, and zero points are added: LD13 of the catalogue of real faults."""

    def scale(value: Array, *_: Any) -> Array:
        return value.reshape(-1).reshape(value.shape[::-1]).T

    return _one(files, quantised(files, "zero"), scale=scale, zero=lambda z: -z)


@mistake("offset|zero|8")
def offset_of_integers_left_out(files: Files) -> tuple[Loaded, list[str]]:
    """Packed integers are read without taking away the 8 that was added."""
    return _one(files, quantised(files, "shape"), zero=lambda q: q + 8)


@mistake("g_idx|order|group|column")
def order_of_inputs_ignored(files: Files) -> tuple[Loaded, list[str]]:
    """The order of inputs is ignored: groups are taken as they come."""
    return _one(files, quantised(files, "group"), order=np.sort)


# --- what has nothing to do with the format ---


@mistake("round|float16|narrow", dtype="float32")
def multiplied_out_in_float16(files: Files) -> tuple[Loaded, list[str]]:
    """Weights are multiplied out in float16."""
    weight = quantised(files)

    def narrow(value: Array, _: Coded) -> Array:
        return value.astype(np.float16).astype(np.float64)

    if np.array_equal(load(files, weight, {"result": narrow}), weight.truth):
        raise NoPlace("float16 holds these values")
    return _one(files, weight, result=narrow)


@mistake("round|bfloat16|narrow", dtype="float32")
def router_bias_rounded(files: Files) -> tuple[Loaded, list[str]]:
    """A correction bias of a router is rounded to bfloat16."""
    bias = weights(files, kinds="kept")[-1]
    return {bias.name: widened(bfloat16(bias.truth))}, [bias.name]


def _first(files: Files, *ends: str) -> Coded:
    found = [w for w in weights(files, kinds="linear router expert") if w.name.endswith(ends) and w.truth.ndim == 2]
    if not found:
        raise NoPlace(f"no {' or '.join(ends)}")
    return found[0]


@mistake("pairs|halves|rotary|rows")
def query_rows_permuted(files: Files) -> tuple[Loaded, list[str]]:
    """The rows of each head's queries are put in the order of the other rotary style."""
    weight = _first(files, "q_proj.weight", "q_b_proj.weight", "attn.wq_b.weight")
    rows = np.arange(len(weight.truth)).reshape(4, 2, -1).transpose(0, 2, 1).reshape(-1)
    return {weight.name: weight.truth[rows]}, [weight.name]


@mistake("random|initial|drawn|no checkpoint|unlike")
def left_as_it_was_made(files: Files) -> tuple[Loaded, list[str]]:
    """A matrix was passed over and keeps its first random values."""
    weight = weights(files, kinds="linear router")[0]
    draw = np.random.default_rng(11).standard_normal(weight.truth.shape).astype(np.float32)
    return {weight.name: draw * np.float32(0.02)}, [weight.name]


@mistake("zero|never written")
def rows_of_the_last_rank_lost(files: Files) -> tuple[Loaded, list[str]]:
    """The rows of the last rank were never written."""
    weight = weights(files, kinds="linear router")[0]
    value = weight.truth.copy()
    value[-len(value) // 4 :] = 0
    return {weight.name: value}, [weight.name]


@mistake("another|otherwise|of model|of layers|up_proj|w3|order")
def gate_and_up_exchanged(files: Files) -> tuple[Loaded, list[str]]:
    """Gate and up are loaded into each other's place."""
    names = {w.name: w for w in weights(files)}
    for name, weight in names.items():
        for gate, up in ((".gate_proj.", ".up_proj."), (".w1.", ".w3.")):
            other = names.get(name.replace(gate, up))
            if gate in name and other is not None:
                return {name: other.truth, other.name: weight.truth}, [name, other.name]
    raise NoPlace("gate and up are one here")


def _merged(files: Files) -> tuple[str, list[tuple[Coded, Coded]]]:
    """Return the name of a merged parameter, and gate and up of each expert that it is made of. Raises NoPlace."""
    names = {w.name: w for w in weights(files, kinds="expert")}
    found = []
    for name, weight in names.items():
        for gate, up in ((".gate_proj.", ".up_proj."), (".w1.", ".w3.")):
            if gate in name and name.replace(gate, up) in names:
                found.append((weight, names[name.replace(gate, up)]))
    if not found:
        raise NoPlace("no numbered experts")
    return f"{found[0][0].name.split('.experts.')[0]}.experts.gate_up_proj", found


@mistake("expert")
def merged_experts_exchanged(files: Files) -> tuple[Loaded, list[str]]:
    """Two experts change places while all are merged into one parameter."""
    name, experts = _merged(files)
    order = [0, 2, 1, 3]
    value = np.stack([np.concatenate([experts[i][0].truth, experts[i][1].truth]) for i in order])
    return {name: value}, [name]


@mistake("gate|up")
def merged_gate_after_up(files: Files) -> tuple[Loaded, list[str]]:
    """Up comes before gate in one merged expert."""
    name, experts = _merged(files)
    value = np.stack([
        np.concatenate([a.truth, b.truth] if i != 2 else [b.truth, a.truth]) for i, (a, b) in enumerate(experts)
    ])  # fmt: skip
    return {name: value}, [name]


@mistake("half|scale")
def merged_expert_misread(files: Files) -> tuple[Loaded, list[str]]:
    """One expert of a merged parameter has scales half as large."""
    name, experts = _merged(files)
    if "scale" not in experts[0][0].parts:
        raise NoPlace("no scales here")
    halves = {"scale": lambda scale, *_: scale * 0.5}
    value = np.stack([
        np.concatenate([load(files, a, halves if i == 1 else None), b.truth]) for i, (a, b) in enumerate(experts)
    ])  # fmt: skip
    return {name: value}, [name]
