"""Recognise which stored tensors make one quantised weight. Knows names, dtypes, shapes; no content, no model code.

A layout is recognised by the structure of names and dtypes beside a tensor, never by an architecture's name. Whatever
looks quantised and has no scale is refused: a missing scale is never taken as 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from harness.checkpoint import decoders as dec
from harness.checkpoint.container import Checkpoint
from harness.checkpoint.declared import declared
from harness.checkpoint.header import TensorRef
from harness.checkpoint.logical import (
    BYTES,
    E8M0,
    FLOATS,
    FP8,
    GLOBAL_SUFFIXES,
    SCALE_SUFFIXES,
    Folder,
    Logical,
    Recogniser,
    base_of,
    extras_of,
    fitting,
    scales_of,
    unpacked,
)
from harness.checkpoint.words import other_words, packed_words

__all__ = ["Logical", "folder_of", "main_part", "plain", "route"]

_ORPHANS = (
    "_scale_inv", ".weight_scale", ".weight_scale_2", ".weight_global_scale", ".weight_shape", ".weight_zero_point",
    ".qzeros", ".g_idx",
)  # fmt: skip
_BESIDE = ("input_scale", "input_global_scale", "input_amax", "weight_g_idx", "qscale_act")


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
        return other_words
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
    if recogniser is _four_bit and not name.endswith(".weight") and not scales_of(name, folder.tensors):
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
    scales, block = scales_of(name, tensors), folder.says.block
    if not scales:
        problem = f"FP8 codes without a scale (looked for {name}_scale_inv, {name}_scale, .scale, .qscale_weight)"
    else:
        parts["scale"] = scales[0]
        kind, problem = _fp8_kind(ref.shape, tensors[scales[0]], block)
    return Logical(
        name=name, format=kind, parts=parts, shape=ref.shape, dtype=ref.dtype, extra=extras_of(base_of(name), folder),
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
        return packed_words(folder, base, ref)
    parts, problem, kind, shape = {"weight": name}, "", "mxfp4", unpacked(ref)
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
        extra=extras_of(base_of(name), folder),
        problem=problem or _scale_fit(kind, scale, shape) or _global_fit(tensors, parts, shape),
    )  # fmt: skip


def _four_bit(folder: Folder, name: str, ref: TensorRef) -> Logical:
    """Recognise bytes under `weight`: DeepSeek V4 and Quark (MXFP4), ModelOpt (NVFP4)."""
    tensors, parts, problem = folder.tensors, {"weight": name}, ""
    scales, shape, kind = scales_of(name, tensors), unpacked(ref), "mxfp4"
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
        name=name, format=kind, parts=parts, shape=shape, dtype=ref.dtype, extra=extras_of(base_of(name), folder),
        problem=problem or _scale_fit(kind, scale, shape) or _global_fit(tensors, parts, shape),
    )  # fmt: skip


def _foreign(folder: Folder, name: str, ref: TensorRef) -> Logical:
    problem = "a bitsandbytes layout, for which there is no independent decoder"
    return Logical(
        name=name, format="unknown", parts={"weight": name}, shape=ref.shape, dtype=ref.dtype, problem=problem
    )


_WIDTH = {"mxfp4": dec.MX_BLOCK, "nvfp4_divisor": dec.NVFP4_BLOCK, "nvfp4_multiplier": dec.NVFP4_BLOCK}


def _scale_fit(kind: str, scale: TensorRef | None, shape: tuple[int, ...]) -> str:
    """Hold the shape of a four-bit weight's scales against its codes, from headers alone."""
    if scale is None or not shape:
        return ""
    expected = (*shape[:-1], -(-shape[-1] // _WIDTH[kind]))
    return "" if scale.shape == expected else f"scales of shape {list(scale.shape)} where {list(expected)} are needed"


def _global_fit(tensors: Mapping[str, TensorRef], parts: Mapping[str, str], shape: tuple[int, ...]) -> str:
    """Hold the second scale against the matrices that it is for: one for all, or one for each."""
    ref = tensors[parts["global"]] if "global" in parts else None
    if ref is None or (ref.dtype in FLOATS and ref.numel in (1, prod(shape[:-2]))):
        return ""
    return f"a global scale {ref.dtype} {list(ref.shape)} where one number, or one a matrix, is needed"
