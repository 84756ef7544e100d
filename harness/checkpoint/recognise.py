"""Recognise which stored tensors make one quantised weight. Knows names, dtypes, shapes; no content, no model code.

A layout is recognised by the structure of names and dtypes beside a tensor, never by an architecture's name. Whatever
looks quantised and has no scale is refused: a missing scale is never taken as 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from harness.checkpoint import decoders as dec
from harness.checkpoint.container import Checkpoint
from harness.checkpoint.declared import Declared, declared
from harness.checkpoint.header import TensorRef
from harness.checkpoint.integers import WORD_BITS
from harness.errors import CheckpointError

FP8 = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
BYTES = frozenset({"U8", "I8", "F4"})
E8M0 = frozenset({"U8", "F8_E8M0"})
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})

SCALE_SUFFIXES = ("_scale_inv", "_scale", "_qscale")
GLOBAL_SUFFIXES = ("_global_scale", "_scale_2")
_ORPHANS = (
    "_scale_inv", ".weight_scale", ".weight_scale_2", ".weight_global_scale", ".weight_shape", ".weight_zero_point",
    ".qzeros", ".g_idx",
)  # fmt: skip
_BESIDE = ("input_scale", "input_global_scale", "input_amax", "weight_g_idx", "qscale_act")
_ROWS = (64, 128, 256, 512)
"""Sizes of blocks that are looked for where a grid does not fit the configured one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logical:
    """One weight as a model sees it. `parts` maps a role (weight, scale, global, shape, zero, group) to stored names.

    `extra` holds stored tensors that belong to it and do not change its values (activation scales). `problem` is why it
    cannot be decoded, empty if it can. `format`: plain, fp8_block, fp8_channel, mxfp8, mxfp4, mxfp4_blocks,
    nvfp4_multiplier, nvfp4_divisor, int4_packed, gptq_v1, gptq_v2, awq, unknown.
    """

    name: str
    format: str
    parts: Mapping[str, str]
    shape: tuple[int, ...]
    dtype: str
    extra: tuple[str, ...] = ()
    problem: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def quantised(self) -> bool:
        """True if values come from codes and scales."""
        return self.format != "plain"

    @property
    def numel(self) -> int:
        """Elements after decoding."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Folder:
    """What recognition looks at: the tensors, what the configuration says, and the checkpoint for its few contents.

    `beside` are the names of activation scales that occur anywhere in it; `has_global` says whether any global scale
    does: half a million look-ups of what is nowhere are saved.
    """

    tensors: Mapping[str, TensorRef]
    says: Declared
    checkpoint: Checkpoint
    beside: tuple[str, ...]
    has_global: bool


Recogniser = Callable[[Folder, str, TensorRef], Logical]


def folder_of(checkpoint: Checkpoint) -> Folder:
    """Return what recognition needs of a checkpoint."""
    last = {name[name.rfind(".") + 1 :] for name in checkpoint.tensors}
    has_global = any(name.endswith("_global_scale") for name in last)
    beside = tuple(n for n in _BESIDE if n in last)
    return Folder(checkpoint.tensors, declared(checkpoint), checkpoint, beside, has_global)


def route(last: str, dtype: str) -> Recogniser | None:
    """Return what recognises a weight by the last part of its main tensor's name and its dtype; None for the rest."""
    if last.endswith("_blocks") and dtype == "U8":
        return _gpt_oss
    if last.endswith("weight_packed"):
        return _packed
    if last == "qweight":
        return _words
    if last == "absmax":
        return _foreign
    if _is_scale(last):
        return None
    if dtype in FP8:
        return _fp8
    return _four_bit if dtype in BYTES else None


def main_part(folder: Folder, name: str, ref: TensorRef, recogniser: Recogniser) -> Logical | None:
    """Recognise a quantised weight by its main tensor; None where it turns out to be stored as it is."""
    if recogniser is _gpt_oss and len(ref.shape) < 3:
        return None
    if recogniser is _four_bit and not name.endswith(".weight") and not _scales_of(name, folder.tensors):
        return None
    return recogniser(folder, name, ref)


def plain(name: str, ref: TensorRef) -> Logical:
    """Describe a tensor that is stored as it is, or that belongs to no weight."""
    problem, dtype = "", ref.dtype
    if dtype not in FLOATS and (dtype in FP8 or dtype == "F8_E8M0" or dtype.startswith("F6")):
        problem = f"{dtype} values that belong to no weight"
    elif name.endswith(_ORPHANS) or (dtype == "U8" and name.endswith("_scales")):
        problem = "a scale whose weight is not there"
    kind = "unknown" if problem else "plain"
    return Logical(name=name, format=kind, parts={"weight": name}, shape=ref.shape, dtype=dtype, problem=problem)


def _is_scale(last: str) -> bool:
    return last in ("scale", "qscale_weight", "scales") or last.endswith(("_scales", *SCALE_SUFFIXES, *GLOBAL_SUFFIXES))


def _scales_of(name: str, tensors: Mapping[str, TensorRef]) -> list[str]:
    """Return the stored scales that belong to a weight `X.weight` or a bare `X`, in the order they are preferred."""
    candidates = [name + suffix for suffix in SCALE_SUFFIXES]
    if name.endswith(".weight"):
        base = name[: -len("weight")]
        candidates += [base + "scale", base + "qscale_weight", base + "scales"]
    return [c for c in candidates if c in tensors]


def _extras(base: str, folder: Folder) -> tuple[str, ...]:
    """Return activation scales beside a weight: they change no weight."""
    return tuple(base + n for n in folder.beside if base + n in folder.tensors)


def _base(name: str) -> str:
    return name.rsplit(".", 1)[0] + "." if "." in name else ""


def fitting(size: int, count: int) -> list[int]:
    """Return the usual block sizes of which `count` cover `size`, the last perhaps in part."""
    return [b for b in (16, 32, *_ROWS) if -(-size // b) == count]


def _guesses(shape: tuple[int, ...], grid: tuple[int, ...]) -> str:
    """Say which square blocks a grid fits, for a person to choose from: none is chosen here."""
    if len(shape) < 2 or len(grid) < 2:
        return ""
    both = [b for b in fitting(shape[-2], grid[-2]) if b in fitting(shape[-1], grid[-1])]
    rows, columns = fitting(shape[-2], grid[-2]), fitting(shape[-1], grid[-1])
    if both:
        return f"; it fits blocks of {' or '.join(f'{b}x{b}' for b in both)}"
    if rows and columns:
        return f"; it fits blocks of {rows} rows by {columns} columns"
    if fitting(shape[-2], grid[-1]) and fitting(shape[-1], grid[-2]):
        return "; transposed it would fit"
    return ""


def _fp8(folder: Folder, name: str, ref: TensorRef) -> Logical:
    tensors, parts, kind, problem = folder.tensors, {"weight": name}, "fp8_block", ""
    scales, block = _scales_of(name, tensors), folder.says.block
    if not scales:
        problem = f"FP8 codes without a scale (looked for {name}_scale_inv, {name}_scale, .scale, .qscale_weight)"
    else:
        parts["scale"] = scales[0]
        kind, problem = _fp8_kind(ref.shape, tensors[scales[0]], block)
    return Logical(
        name=name, format=kind, parts=parts, shape=ref.shape, dtype=ref.dtype, extra=_extras(_base(name), folder),
        problem=problem, options={"block": block},
    )  # fmt: skip


def _fp8_kind(weight: tuple[int, ...], scale: TensorRef, block: tuple[int, int] | None) -> tuple[str, str]:
    """Return the format of an FP8 weight by the shape of its scales, and what is wrong with them."""
    shape, count = scale.shape, prod(scale.shape)
    by_row = bool(weight) and count == prod(weight[:-1]) and (len(shape) < len(weight) or shape[-1] == 1)
    by_matrix = len(weight) >= 3 and count == prod(weight[:-2]) and set(shape[len(weight) - 2 :]) <= {1}
    if scale.dtype in E8M0 and (block is None or block == (1, dec.MX_BLOCK)):
        expected = (*weight[:-1], -(-weight[-1] // dec.MX_BLOCK)) if weight else ()
        wrong = "" if shape == expected else f"scales of shape {list(shape)} where {list(expected)} are needed"
        return "mxfp8", wrong
    if scale.dtype not in FLOATS and scale.dtype not in E8M0:
        return "fp8_block", f"scales of dtype {scale.dtype}"
    fits = block is not None and len(weight) >= 2 and shape == _grid(weight, block)
    if (count == 1 and not fits) or (block is None and (by_row or by_matrix)):
        return "fp8_channel", ""
    if block is None:
        found = f"a grid of scales {list(shape)} and no weight_block_size in the configuration"
        return "fp8_block", found + _guesses(weight, shape)
    if fits:
        return "fp8_block", ""
    needed = list(_grid(weight, block)) if len(weight) >= 2 else "a matrix"
    found = f"scales of shape {list(shape)} where blocks of {list(block)} need {needed}"
    return "fp8_block", found + _guesses(weight, shape)


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def _unpacked(ref: TensorRef, per_item: int = 2) -> tuple[int, ...]:
    """Return the shape after unpacking; the container counts F4 elements already."""
    if ref.dtype == "F4" or not ref.shape:
        return ref.shape
    return (*ref.shape[:-1], ref.shape[-1] * per_item)


def _gpt_oss(folder: Folder, name: str, ref: TensorRef) -> Logical:
    base, parts, problem = name[: -len("_blocks")], {"weight": name}, ""
    scale = folder.tensors.get(base + "_scales")
    if scale is None:
        problem = f"MXFP4 blocks without {base}_scales"
    else:
        parts["scale"] = scale.name
        if scale.shape != ref.shape[:-1] or ref.shape[-1] != dec.MX_BLOCK // 2:
            problem = f"scales of shape {list(scale.shape)} for blocks of shape {list(ref.shape)}"
        elif scale.dtype not in E8M0:
            problem = f"blocks with scales of dtype {scale.dtype}"
    shape = (*ref.shape[:-2], ref.shape[-2] * ref.shape[-1] * 2)
    return Logical(name=base, format="mxfp4_blocks", parts=parts, shape=shape, dtype=ref.dtype, problem=problem)


def _packed(folder: Folder, name: str, ref: TensorRef) -> Logical:
    """Recognise compressed-tensors: `weight_packed` with `weight_scale` and, for NVFP4, `weight_global_scale`."""
    tensors, base = folder.tensors, name[: -len("_packed")]
    if ref.dtype == "I32" and len(ref.shape) == 2:
        return _packed_words(folder, base, ref)
    parts, problem, kind, shape = {"weight": name}, "", "mxfp4", _unpacked(ref)
    scale = tensors.get(base + "_scale")
    if scale is None:
        problem = f"packed codes without {base}_scale"
    else:
        parts["scale"] = scale.name
    if folder.has_global and base + "_global_scale" in tensors:
        kind, parts["global"] = "nvfp4_divisor", base + "_global_scale"
        if scale is not None and scale.dtype not in FP8:
            problem = f"a global scale beside scales of dtype {scale.dtype}"
    elif scale is not None and scale.dtype in FP8:
        kind, problem = "nvfp4_divisor", f"FP8 scales without {base}_global_scale"
    elif scale is not None and scale.dtype not in E8M0:
        problem = f"packed bytes with scales of dtype {scale.dtype}"
    if ref.dtype not in BYTES:
        problem = problem or f"packed codes of dtype {ref.dtype}"
    return Logical(
        name=base, format=kind, parts=parts, shape=shape, dtype=ref.dtype,
        extra=_extras(_base(name), folder), problem=problem or _scale_fit(kind, scale, shape),
    )  # fmt: skip


def _packed_words(folder: Folder, base: str, ref: TensorRef) -> Logical:
    """Recognise `pack-quantized`: words of integers with `weight_scale` and `weight_shape`."""
    tensors, parts, problem, shape = folder.tensors, {"weight": ref.name}, "", _unpacked(ref, 8)
    scale, bits = tensors.get(base + "_scale"), 4
    if scale is None:
        problem = f"packed codes without {base}_scale"
    else:
        parts["scale"] = scale.name
    if base + "_zero_point" in tensors:
        parts["zero"] = base + "_zero_point"
    if base + "_shape" not in tensors:
        problem = problem or f"packed words without {base}_shape"
    else:
        parts["shape"] = base + "_shape"
        if not problem:
            shape = _stored_shape(folder.checkpoint, parts["shape"])
            bits = next((b for b in (4, 8, 2) if ref.shape == (shape[0], -(-shape[1] * b // 32))), 0)
            if not bits:
                bits, problem = 4, f"words of shape {list(ref.shape)} for a weight of {list(shape)}"
    groups = scale.shape[-1] if scale is not None and scale.shape else 1
    group = _group(folder.says, shape[-1], groups)
    if group is None and groups != 1:
        sizes = fitting(shape[-1], groups)
        said = f"group sizes {list(folder.says.groups)}" if folder.says.groups else "no group_size"
        problem = problem or f"{groups} groups of scales and {said} in the configuration; it fits {sizes}"
    return Logical(
        name=base, format="int4_packed", parts=parts, shape=shape, dtype=ref.dtype,
        extra=_extras(_base(ref.name), folder), options={"group": group, "bits": bits}, problem=problem,
    )  # fmt: skip


def _group(says: Declared, columns: int, groups: int) -> int | None:
    """Return the configured group size that gives this many groups; a mixture may have several."""
    if groups == 1 and says.groups and says.groups[0] == 0:
        return None
    fits = [g for g in says.groups if g > 0 and -(-columns // g) == groups]
    return fits[0] if fits else (says.group if groups == 1 and says.group and says.group >= columns else None)


def _words(folder: Folder, name: str, ref: TensorRef) -> Logical:
    """Recognise GPTQ (words along the input, `g_idx`) and AWQ (words along the output) by their shapes."""
    tensors, says, base, problem = folder.tensors, folder.says, _base(name), ""
    parts = {"weight": name}
    for role, last in (("zero", "qzeros"), ("scale", "scales"), ("group", "g_idx")):
        if base + last in tensors:
            parts[role] = base + last
    kind, shape, options = "unknown", ref.shape, {"group": says.group, "bits": 4}
    if len(ref.shape) != 2 or ref.dtype != "I32":
        problem = f"integers of dtype {ref.dtype} and shape {list(ref.shape)}; words of I32 in a matrix are decoded"
    elif "scale" not in parts or "zero" not in parts:
        problem = "packed words without " + " and ".join(base + n for r, n in _GPTQ if r not in parts)
    else:
        scale = tensors[parts["scale"]].shape
        outputs = scale[-1] if scale else 0
        if outputs == ref.shape[1]:
            kind, options["bits"], inputs, problem = _gptq_bits(folder, base, ref, parts)
            shape = (outputs, inputs)
        elif outputs == ref.shape[1] * 8:
            kind, shape = "awq", (outputs, ref.shape[0])
        else:
            problem = f"scales of shape {list(scale)} for words of shape {list(ref.shape)}: neither GPTQ nor AWQ"
        if kind != "unknown" and not problem:
            problem = _gptq_fit(folder, kind, parts, shape, options)
    return Logical(
        name=base + "weight", format=kind, parts=parts, shape=shape, dtype=ref.dtype, options=options, problem=problem
    )


_GPTQ = (("scale", "scales"), ("zero", "qzeros"))


def _gptq_bits(folder: Folder, base: str, ref: TensorRef, parts: Mapping[str, str]) -> tuple[str, int, int, str]:
    """Return the version, the bits, the inputs and what is wrong of a GPTQ weight; `g_idx` counts the inputs."""
    says, kind = folder.says, "gptq_v2" if "v2" in folder.says.version else "gptq_v1"
    widths = says.widths or (4,)
    if "group" in parts:
        inputs = prod(folder.tensors[parts["group"]].shape)
        bits = 32 * ref.shape[0] // inputs if inputs and not 32 * ref.shape[0] % inputs else 0
        if bits not in WORD_BITS:
            return kind, 4, inputs, f"{ref.shape[0]} words for {inputs} inputs: {bits or 'a broken number of'} bits"
        return kind, bits, inputs, ""
    if widths[0] not in WORD_BITS:
        return kind, 4, ref.shape[0] * 8, f"{widths[0]} bits, for which there is no decoder"
    return kind, widths[0], ref.shape[0] * 32 // widths[0], ""


def _gptq_fit(
    folder: Folder, kind: str, parts: Mapping[str, str], shape: tuple[int, ...], options: Mapping[str, Any]
) -> str:
    """Hold zero points and groups of GPTQ or AWQ against the weight."""
    outputs, inputs = shape
    groups = folder.tensors[parts["scale"]].shape[0]
    zeros, per_word = folder.tensors[parts["zero"]].shape, 32 // options["bits"]
    if zeros != (groups, -(-outputs // per_word)):
        return f"zero points of shape {list(zeros)} where {[groups, -(-outputs // per_word)]} are needed"
    if kind.startswith("gptq") and "group" in parts:
        return ""
    group = options["group"] or max(1, inputs)
    if -(-inputs // group) != groups:
        return f"{groups} groups of scales where groups of {group} need {-(-inputs // group)}; it fits " + str(
            fitting(inputs, groups)
        )
    return ""


def _foreign(folder: Folder, name: str, ref: TensorRef) -> Logical:
    problem = "a bitsandbytes layout, for which there is no independent decoder"
    return Logical(
        name=name, format="unknown", parts={"weight": name}, shape=ref.shape, dtype=ref.dtype, problem=problem
    )


def _stored_shape(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    """Read `weight_shape`: the one tensor whose content is needed to know a shape."""
    if checkpoint.tensors[name].nbytes > 64:
        return 0, 0
    try:
        shape = [int(v) for v in checkpoint.read(name).tolist()]
    except (CheckpointError, OSError, TypeError):
        return 0, 0
    return (shape[0], shape[1]) if len(shape) == 2 and all(0 <= s < 1 << 40 for s in shape) else (0, 0)


def _four_bit(folder: Folder, name: str, ref: TensorRef) -> Logical:
    """Recognise bytes under `weight`: DeepSeek V4 and Quark (MXFP4), ModelOpt (NVFP4)."""
    tensors, parts, problem = folder.tensors, {"weight": name}, ""
    scales, shape, kind = _scales_of(name, tensors), _unpacked(ref), "mxfp4"
    scale = tensors[scales[0]] if scales else None
    if scale is None:
        problem = "packed bytes without a scale"
    else:
        parts["scale"] = scale.name
        if scale.dtype in FP8:
            kind = "nvfp4_multiplier"
            if name + "_scale_2" in tensors:
                parts["global"] = name + "_scale_2"
            else:
                problem = f"FP8 scales without {name}_scale_2"
        elif scale.dtype not in E8M0:
            problem = f"packed bytes with scales of dtype {scale.dtype}"
    return Logical(
        name=name, format=kind, parts=parts, shape=shape, dtype=ref.dtype, extra=_extras(_base(name), folder),
        problem=problem or _scale_fit(kind, scale, shape),
    )  # fmt: skip


_WIDTH = {"mxfp4": dec.MX_BLOCK, "nvfp4_divisor": dec.NVFP4_BLOCK, "nvfp4_multiplier": dec.NVFP4_BLOCK}


def _scale_fit(kind: str, scale: TensorRef | None, shape: tuple[int, ...]) -> str:
    """Hold the shape of a four-bit weight's scales against its codes, from headers alone."""
    if scale is None or not shape:
        return ""
    expected = (*shape[:-1], -(-shape[-1] // _WIDTH[kind]))
    return "" if scale.shape == expected else f"scales of shape {list(scale.shape)} where {list(expected)} are needed"
