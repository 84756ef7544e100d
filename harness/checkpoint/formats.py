"""Find which stored tensors make one weight, and decode it. Knows layouts and decoders; no model code.

Every stored tensor belongs to exactly one weight: recognised by structure (`recognise`), or stored as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from harness.checkpoint import decoders as dec
from harness.checkpoint import integers
from harness.checkpoint.bulk import many_records
from harness.checkpoint.container import Checkpoint
from harness.checkpoint.header import Problem, TensorRef
from harness.checkpoint.logical import FLOATS, FP8, Logical, Recogniser
from harness.checkpoint.recognise import folder_of, main_part, plain, route
from harness.errors import CheckpointError

__all__ = ["FLOATS", "FP8", "Logical", "decode", "decode_parts", "format_problems", "logical_tensors"]


def logical_tensors(checkpoint: Checkpoint) -> Sequence[Logical]:
    """Return every weight of a checkpoint once, in the order of its tensors; worked out once for a checkpoint."""
    if "logicals" not in checkpoint.known:
        with many_records():
            checkpoint.known["logicals"] = _recognise(checkpoint)
    found: Sequence[Logical] = checkpoint.known["logicals"]
    return found


def _recognise(checkpoint: Checkpoint) -> tuple[Logical, ...]:
    folder, taken = folder_of(checkpoint), set[str]()
    routes: dict[tuple[str, str], Recogniser | None] = {}
    found: list[Logical | TensorRef] = []
    for name, ref in checkpoint.tensors.items():
        key = (name[name.rfind(".") + 1 :], ref.dtype)
        if key not in routes:
            routes[key] = route(*key)
        recogniser = routes[key]
        logical = main_part(folder, name, ref, recogniser) if recogniser is not None else None
        if logical is not None:
            taken.update(logical.parts.values())
            taken.update(logical.extra)
        found.append(ref if logical is None else logical)
    return tuple(
        x if isinstance(x, Logical) else plain(x.name, x)
        for x in found
        if isinstance(x, Logical) or x.name not in taken
    )


def format_problems(checkpoint: Checkpoint) -> list[Problem]:
    """List the weights that cannot be decoded, without reading any."""
    result = []
    for logical in logical_tensors(checkpoint):
        if logical.problem:
            ref = checkpoint.tensors[next(iter(logical.parts.values()))]
            expected, found = f"a weight that decodes as {logical.format}", logical.problem
            result.append(
                Problem(
                    kind="undecodable", name=logical.name, file=ref.file, expected=expected, found=found,
                    offset=ref.begin,
                )
            )  # fmt: skip
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


def decode_parts(
    logical: Logical, part: Mapping[str, Tensor], *, widen: bool = True, out: Tensor | None = None
) -> Tensor:
    """Decode a weight, or whole rows of it, from its stored parts by role; into `out` where that is large enough.

    Raises:
        CheckpointError: a scale does not fit.
    """
    weight, scale, options, kind = part["weight"], part.get("scale"), logical.options, logical.format
    if kind == "plain" or scale is None:
        return dec.widened(weight, out) if widen and logical.dtype in FLOATS - {"F32", "F64"} else weight
    if kind == "fp8_block":
        return dec.decode_fp8_block(weight, scale, options["block"], out=out)
    if kind == "fp8_channel":
        return dec.decode_fp8_channel(weight, scale, out=out)
    if kind == "mxfp8":
        return dec.decode_mxfp8(weight, scale, out=out)
    if kind == "mxfp4":
        return dec.decode_mxfp4(weight, scale, out=out)
    if kind == "mxfp4_blocks":
        return dec.decode_mxfp4_blocks(weight, scale, out=out)
    if kind in ("nvfp4_multiplier", "nvfp4_divisor"):
        return dec.decode_nvfp4(weight, scale, part["global"], divisor=kind == "nvfp4_divisor", out=out)
    group = options["group"]
    if kind == "awq":
        return integers.decode_awq(weight, part["zero"], scale, group=group)
    if kind in ("gptq_v1", "gptq_v2"):
        return integers.decode_gptq(
            weight, part["zero"], scale, part.get("group"), group=group, bits=options["bits"], v1=kind == "gptq_v1"
        )
    rows, columns = (int(size) for size in part["shape"].tolist())
    return integers.decode_int4_packed(
        weight, scale, (rows, columns), group=group, zero_point=part.get("zero"), bits=options["bits"], out=out
    )
