"""Recognise weights packed in 32-bit words: pack-quantized, GPTQ, AWQ. Knows names, dtypes, shapes; no code's value.

The one content that is read is `weight_shape`, without which a shape is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.declared import Declared
from harness.checkpoint.header import TensorRef
from harness.checkpoint.integers import WORD_BITS
from harness.checkpoint.logical import Folder, Logical, base_of, extras_of, fitting, unpacked
from harness.errors import CheckpointError


def packed_words(folder: Folder, base: str, ref: TensorRef) -> Logical:
    """Recognise `pack-quantized`: words of integers with `weight_scale` and `weight_shape`."""
    tensors, parts, problem, shape = folder.tensors, {"weight": ref.name}, "", unpacked(ref, 8)
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
    if scale is not None and scale.shape != (shape[0], groups):
        problem = problem or f"scales of shape {list(scale.shape)} where {[shape[0], groups]} are needed"
    return Logical(
        name=base, format="int4_packed", parts=parts, shape=shape, dtype=ref.dtype,
        extra=extras_of(base_of(ref.name), folder), options={"group": group, "bits": bits}, problem=problem,
    )  # fmt: skip


def _group(says: Declared, columns: int, groups: int) -> int | None:
    """Return the configured group size that gives this many groups; a mixture may have several."""
    if groups == 1 and says.groups and says.groups[0] == 0:
        return None
    fits = [g for g in says.groups if g > 0 and -(-columns // g) == groups]
    return fits[0] if fits else (says.group if groups == 1 and says.group and says.group >= columns else None)


def other_words(folder: Folder, name: str, ref: TensorRef) -> Logical:
    """Recognise GPTQ (words along the input, `g_idx`) and AWQ (words along the output) by their shapes."""
    tensors, says, base, problem = folder.tensors, folder.says, base_of(name), ""
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
            problem = _gptq_fit(folder, kind, parts, shape, options, reordered=says.reordered)
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
    folder: Folder,
    kind: str,
    parts: Mapping[str, str],
    shape: tuple[int, ...],
    options: Mapping[str, Any],
    *,
    reordered: bool,
) -> str:
    """Hold zero points and groups of GPTQ or AWQ against the weight."""
    outputs, inputs = shape
    groups = folder.tensors[parts["scale"]].shape[0]
    zeros, per_word = folder.tensors[parts["zero"]].shape, 32 // options["bits"]
    if zeros != (groups, -(-outputs // per_word)):
        return f"zero points of shape {list(zeros)} where {[groups, -(-outputs // per_word)]} are needed"
    if kind.startswith("gptq") and "group" in parts and not options["group"]:
        return ""
    if kind.startswith("gptq") and "group" not in parts and reordered:
        return "no g_idx, and desc_act says that inputs were reordered"
    group = options["group"] or max(1, inputs)
    if -(-inputs // group) != groups:
        return f"{groups} groups of scales where groups of {group} need {-(-inputs // group)}; it fits " + str(
            fitting(inputs, groups)
        )
    return ""


def _stored_shape(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    """Read `weight_shape`: the one tensor whose content is needed to know a shape."""
    if checkpoint.tensors[name].nbytes > 64:
        return 0, 0
    try:
        shape = [int(v) for v in checkpoint.read(name).tolist()]
    except (CheckpointError, OSError, TypeError):
        return 0, 0
    return (shape[0], shape[1]) if len(shape) == 2 and all(0 <= s < 1 << 40 for s in shape) else (0, 0)
