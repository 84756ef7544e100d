"""Find which stored tensors make one weight, and decode it. Knows names and `quantization_config`; no model code.

A weight is recognised by the structure of names and dtypes beside it, never by an architecture's name. Whatever looks
quantised and has no scale is an error: a missing scale is never taken as 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harness.checkpoint import decoders as dec
from harness.checkpoint import integers
from harness.checkpoint.container import Checkpoint
from harness.checkpoint.header import Problem, TensorRef
from harness.errors import CheckpointError

FP8 = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
BYTES = frozenset({"U8", "I8", "F4"})
E8M0 = frozenset({"U8", "F8_E8M0"})
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})

SCALE_SUFFIXES = ("_scale_inv", "_scale", "_qscale")
GLOBAL_SUFFIXES = ("_global_scale", "_scale_2")
SIDE_SUFFIXES = ("_shape", "_zero_point", "_g_idx")
_ORPHANS = (
    "_scale_inv", ".weight_scale", ".weight_scale_2", ".weight_global_scale", ".weight_shape", ".weight_zero_point",
)  # fmt: skip
_FOREIGN = {"qweight": "GPTQ or AWQ", "qzeros": "GPTQ or AWQ", "absmax": "bitsandbytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Logical:
    """One weight as a model sees it. `parts` maps a role (weight, scale, global, shape, zero) to stored names.

    `extra` holds stored tensors that belong to it and do not change its values (activation scales). `problem` is why it
    cannot be decoded, empty if it can. `format`: plain, fp8_block, fp8_channel, mxfp8, mxfp4, mxfp4_blocks,
    nvfp4_multiplier, nvfp4_divisor, int4_packed, unknown.
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
        return torch.Size(self.shape).numel()


def logical_tensors(checkpoint: Checkpoint) -> Iterator[Logical]:
    """Yield every weight of a checkpoint once, in the order of its tensors; every stored tensor belongs to one."""
    tensors = checkpoint.tensors
    taken: set[str] = set()
    found = []
    for name in tensors:
        logical = _main_part(checkpoint, name)
        if logical is not None:
            taken.update(logical.parts.values(), logical.extra)
            found.append(logical)
    for name, ref in tensors.items():
        if name not in taken:
            found.append(_plain(name, ref, checkpoint))
    order = {name: i for i, name in enumerate(tensors)}
    yield from sorted(found, key=lambda x: order[next(iter(x.parts.values()))])


def format_problems(checkpoint: Checkpoint) -> list[Problem]:
    """List the weights that cannot be decoded, without reading any."""
    result = []
    for logical in logical_tensors(checkpoint):
        if logical.problem:
            file = checkpoint.tensors[next(iter(logical.parts.values()))].file
            expected, found = f"a weight that decodes as {logical.format}", logical.problem
            result.append(Problem(kind="undecodable", name=logical.name, file=file, expected=expected, found=found))
    return result


def decode(checkpoint: Checkpoint, logical: Logical, *, widen: bool = True) -> Tensor:
    """Decode one weight: float32 for quantised ones, the stored values (widened to float32) for plain floats.

    Integers and booleans keep their type; F64 keeps its width. `widen` False leaves plain floats as stored.

    Raises:
        CheckpointError: a scale is missing or does not fit, or bytes are missing.
    """
    if logical.problem:
        raise CheckpointError(f"expected {logical.name!r} to decode as {logical.format}, found: {logical.problem}")
    return decode_parts(logical, {role: checkpoint.read(name) for role, name in logical.parts.items()}, widen=widen)


def decode_parts(logical: Logical, part: Mapping[str, Tensor], *, widen: bool = True) -> Tensor:
    """Decode a weight, or whole rows of it, from its stored parts by role.

    Raises:
        CheckpointError: a scale does not fit.
    """
    weight, scale, options = part["weight"], part.get("scale"), logical.options
    if logical.format == "plain" or scale is None:
        return weight.to(torch.float32) if widen and logical.dtype in FLOATS - {"F64"} else weight
    if logical.format == "fp8_block":
        return dec.decode_fp8_block(weight, scale, options["block"])
    if logical.format == "fp8_channel":
        return dec.decode_fp8_channel(weight, scale)
    if logical.format == "mxfp8":
        return dec.decode_mxfp8(weight, scale)
    if logical.format == "mxfp4":
        return dec.decode_mxfp4(weight, scale)
    if logical.format == "mxfp4_blocks":
        return dec.decode_mxfp4_blocks(weight, scale)
    if logical.format in ("nvfp4_multiplier", "nvfp4_divisor"):
        return dec.decode_nvfp4(weight, scale, part["global"], divisor=logical.format == "nvfp4_divisor")
    shape = part["shape"].tolist()
    return integers.decode_int4_packed(
        weight, scale, (int(shape[0]), int(shape[1])), group=options["group"], zero_point=part.get("zero")
    )


def _main_part(checkpoint: Checkpoint, name: str) -> Logical | None:
    """Recognise a quantised weight by its main tensor; None for scales and everything stored as it is."""
    ref, tensors = checkpoint.tensors[name], checkpoint.tensors
    if name.endswith("_blocks") and ref.dtype == "U8" and len(ref.shape) >= 3:
        return _gpt_oss(checkpoint, name, ref)
    if name.endswith("weight_packed"):
        return _packed(checkpoint, name, ref)
    if ref.dtype in FP8 and not _is_scale(name, tensors):
        return _fp8(checkpoint, name, ref)
    if ref.dtype in BYTES and (name.endswith(".weight") or _scales_of(name, tensors)) and not _is_scale(name, tensors):
        return _four_bit(checkpoint, name, ref)
    last = name.rsplit(".", 1)[-1]
    if last in _FOREIGN:
        problem = f"a {_FOREIGN[last]} layout, for which there is no independent decoder yet"
        return Logical(
            name=name, format="unknown", parts={"weight": name}, shape=ref.shape, dtype=ref.dtype, problem=problem
        )
    return None


def _is_scale(name: str, tensors: Mapping[str, TensorRef]) -> bool:
    """Say whether a tensor is a scale by its name, and the tensor it scales is there."""
    last = name.rsplit(".", 1)[-1]
    if last in ("scale", "qscale_weight", "scales") or name.endswith("_scales"):
        return True
    return any(last.endswith(s) for s in (*SCALE_SUFFIXES, *GLOBAL_SUFFIXES))


def _scales_of(name: str, tensors: Mapping[str, TensorRef]) -> list[str]:
    """Return the stored scales that belong to a weight `X.weight` or a bare `X`, in the order they are preferred."""
    candidates = [name + suffix for suffix in SCALE_SUFFIXES]
    if name.endswith(".weight"):
        base = name[: -len("weight")]
        candidates += [base + "scale", base + "qscale_weight", base + "scales"]
    return [c for c in candidates if c in tensors]


def _extras(base: str, tensors: Mapping[str, TensorRef]) -> tuple[str, ...]:
    """Return activation scales beside a weight: they change no weight."""
    names = ("input_scale", "input_global_scale", "input_amax", "weight_g_idx")
    return tuple(base + n for n in names if base + n in tensors)


def _base(name: str) -> str:
    return name.rsplit(".", 1)[0] + "." if "." in name else ""


def _scale_shape(checkpoint: Checkpoint, scale: str) -> tuple[int, ...]:
    return checkpoint.tensors[scale].shape


def _block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the configured FP8 block; compressed-tensors keeps it inside its groups as `block_structure`."""
    found: list[Any] = []

    def walk(value: Any, depth: int) -> None:
        if isinstance(value, dict) and depth < 8:
            for key, inner in value.items():
                if key in ("weight_block_size", "block_structure") and inner is not None:
                    found.append(inner)
                else:
                    walk(inner, depth + 1)

    for owner in (config, config.get("text_config")):
        if isinstance(owner, dict):
            walk(owner.get("quantization_config"), 0)
            walk(owner.get("compression_config"), 0)
    for value in found:
        if isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(v, int) and v > 0 for v in value):
            return int(value[0]), int(value[1])
    return None


def _group_size(config: Mapping[str, Any]) -> int | None:
    """Return the configured INT4 group size, or None where scales are a row each."""
    sizes: list[int] = []

    def walk(value: Any, depth: int) -> None:
        if isinstance(value, dict) and depth < 8:
            weights = value.get("weights")
            if isinstance(weights, dict) and isinstance(weights.get("group_size"), int):
                sizes.append(weights["group_size"])
            for inner in value.values():
                walk(inner, depth + 1)

    for owner in (config, config.get("text_config")):
        if isinstance(owner, dict):
            walk(owner.get("quantization_config"), 0)
    return sizes[0] if sizes and sizes[0] > 0 else None


def _fp8(checkpoint: Checkpoint, name: str, ref: TensorRef) -> Logical:
    tensors, parts = checkpoint.tensors, {"weight": name}
    scales = _scales_of(name, tensors)
    options: dict[str, Any] = {}
    kind, problem = "fp8_block", ""
    if not scales:
        problem = f"FP8 codes without a scale (looked for {name}_scale_inv, {name}_scale, .scale, .qscale_weight)"
    else:
        parts["scale"] = scales[0]
        scale, shape = tensors[scales[0]], tensors[scales[0]].shape
        count = torch.Size(shape).numel()
        block = _block_size(checkpoint.config)
        if scale.dtype in E8M0 and (block is None or block == (1, dec.MX_BLOCK)):
            kind = "mxfp8"
        elif block is None and (count == 1 or (count == ref.shape[0] and (len(shape) == 1 or shape[-1] == 1))):
            kind = "fp8_channel"
        elif block is None:
            problem = f"a grid of scales {list(shape)} and no weight_block_size in the configuration"
        elif scale.dtype not in FLOATS and scale.dtype not in E8M0:
            problem = f"scales of dtype {scale.dtype}"
        elif len(ref.shape) < 2 or shape != _grid(ref.shape, block):
            kind = "fp8_channel" if count == 1 else kind
            expected = _grid(ref.shape, block) if len(ref.shape) >= 2 else "a matrix"
            problem = (
                "" if count == 1 else f"scales of shape {list(shape)} where blocks of {list(block)} need {expected}"
            )
        options = {"block": block}
    return Logical(
        name=name, format=kind, parts=parts, shape=ref.shape, dtype=ref.dtype, extra=_extras(_base(name), tensors),
        problem=problem, options=options,
    )  # fmt: skip


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def _unpacked(ref: TensorRef, per_byte: int = 2) -> tuple[int, ...]:
    """Return the shape after unpacking; the container counts F4 elements already."""
    if ref.dtype == "F4" or not ref.shape:
        return ref.shape
    return (*ref.shape[:-1], ref.shape[-1] * per_byte)


def _gpt_oss(checkpoint: Checkpoint, name: str, ref: TensorRef) -> Logical:
    base, parts, problem = name[: -len("_blocks")], {"weight": name}, ""
    scale = base + "_scales"
    if scale not in checkpoint.tensors:
        problem = f"MXFP4 blocks without {scale}"
    else:
        parts["scale"] = scale
        if _scale_shape(checkpoint, scale) != ref.shape[:-1] or ref.shape[-1] != dec.MX_BLOCK // 2:
            problem = f"scales of shape {list(_scale_shape(checkpoint, scale))} for blocks of shape {list(ref.shape)}"
    shape = (*ref.shape[:-2], ref.shape[-2] * ref.shape[-1] * 2)
    return Logical(name=base, format="mxfp4_blocks", parts=parts, shape=shape, dtype=ref.dtype, problem=problem)


def _packed(checkpoint: Checkpoint, name: str, ref: TensorRef) -> Logical:
    """Recognise compressed-tensors: `weight_packed` with `weight_scale` and, for NVFP4, `weight_global_scale`."""
    tensors, base = checkpoint.tensors, name[: -len("_packed")]
    parts, options, problem = {"weight": name}, {}, ""
    scale, shape = base + "_scale", _unpacked(ref)
    kind = "mxfp4"
    if scale in tensors:
        parts["scale"] = scale
    else:
        problem = f"packed codes without {scale}"
    if base + "_global_scale" in tensors:
        kind, parts["global"] = "nvfp4_divisor", base + "_global_scale"
    elif scale in tensors and tensors[scale].dtype in FP8:
        kind, problem = "nvfp4_divisor", f"FP8 scales without {base}_global_scale"
    elif ref.dtype == "I32":
        kind, shape = "int4_packed", _unpacked(ref, 8)
        options["group"] = _group_size(checkpoint.config)
        if base + "_shape" in tensors:
            parts["shape"] = base + "_shape"
            if "scale" in parts and not problem:
                shape = _stored_shape(checkpoint, parts["shape"])
        else:
            problem = problem or f"packed words without {base}_shape"
        if base + "_zero_point" in tensors:
            parts["zero"] = base + "_zero_point"
        groups = tensors[scale].shape[-1] if scale in tensors else 1
        if options["group"] is None and groups != 1:
            problem = problem or f"{groups} groups of scales and no group_size in the configuration"
    elif scale in tensors and tensors[scale].dtype not in E8M0:
        problem = f"packed bytes with scales of dtype {tensors[scale].dtype}"
    return Logical(
        name=base, format=kind, parts=parts, shape=shape, dtype=ref.dtype,
        extra=_extras(_base(name), tensors), options=options,
        problem=problem or _scale_fit(checkpoint, kind, parts, shape),
    )  # fmt: skip


def _stored_shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    """Read `weight_shape`: the one tensor whose content is needed to know a shape."""
    try:
        shape = [int(v) for v in checkpoint.read(name).tolist()]
    except (CheckpointError, TypeError):
        return (0, 0)
    return tuple(shape) if len(shape) == 2 and all(s >= 0 for s in shape) else (0, 0)


def _four_bit(checkpoint: Checkpoint, name: str, ref: TensorRef) -> Logical | None:
    """Recognise bytes under `weight`: DeepSeek V4 and Quark (MXFP4), ModelOpt (NVFP4)."""
    tensors, parts, problem = checkpoint.tensors, {"weight": name}, ""
    scales, shape, kind = _scales_of(name, tensors), _unpacked(ref), "mxfp4"
    if not scales:
        problem = "packed bytes without a scale"
    else:
        parts["scale"] = scales[0]
        dtype = tensors[scales[0]].dtype
        if dtype in FP8:
            kind = "nvfp4_multiplier"
            if name + "_scale_2" in tensors:
                parts["global"] = name + "_scale_2"
            else:
                problem = f"FP8 scales without {name}_scale_2"
        elif dtype not in E8M0:
            problem = f"packed bytes with scales of dtype {dtype}"
    return Logical(
        name=name, format=kind, parts=parts, shape=shape, dtype=ref.dtype, extra=_extras(_base(name), tensors),
        problem=problem or _scale_fit(checkpoint, kind, parts, shape),
    )  # fmt: skip


def _scale_fit(checkpoint: Checkpoint, kind: str, parts: Mapping[str, str], shape: tuple[int, ...]) -> str:
    """Hold the shape of a four-bit weight's scales against its codes, from headers alone."""
    width = {"mxfp4": dec.MX_BLOCK, "nvfp4_divisor": dec.NVFP4_BLOCK, "nvfp4_multiplier": dec.NVFP4_BLOCK}.get(kind)
    if width is None or "scale" not in parts or not shape:
        return ""
    expected, found = (*shape[:-1], -(-shape[-1] // width)), _scale_shape(checkpoint, parts["scale"])
    return "" if found == expected else f"scales of shape {list(found)} where {list(expected)} are needed"


def _plain(name: str, ref: TensorRef, checkpoint: Checkpoint) -> Logical:
    problem = ""
    if ref.dtype in FP8 or ref.dtype == "F8_E8M0" or ref.dtype.startswith("F6"):
        problem = f"{ref.dtype} values that belong to no weight"
    elif any(name.endswith(s) for s in _ORPHANS) or (ref.dtype == "U8" and name.endswith("_scales")):
        problem = "a scale whose weight is not there"
    kind = "unknown" if problem else "plain"
    return Logical(name=name, format=kind, parts={"weight": name}, shape=ref.shape, dtype=ref.dtype, problem=problem)
