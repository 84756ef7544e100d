"""Other dtypes, shapes and offsets over the same bytes. Knows which types have one width; must not know formats."""

from __future__ import annotations

from math import prod

from harness.faults.catalogue import NoPlace
from harness.faults.disk.damage import answers, damage, pair, quantised, weights
from harness.faults.disk.files import Files


@damage("headers", "shape|rows|columns|scales|words|heads|fit")
def shape_transposed(files: Files) -> list[str]:
    """A matrix has its sizes exchanged over the same bytes."""
    weight = next((w for w in weights(files) if len(set(files.get(w.parts["weight"]).shape)) > 1), None)
    if weight is None:
        raise NoPlace("no matrix that is not square")
    name = weight.parts["weight"]
    value = files.get(name)
    files.put(name, value.labelled(shape=(*value.shape[:-2], value.shape[-1], value.shape[-2])))
    return answers(weight)


@damage("headers", "shape|scale|words|dimension|rank")
def shape_flattened(files: Files) -> list[str]:
    """A matrix has lost its axes."""
    weight = weights(files)[0]
    name = weight.parts["weight"]
    files.put(name, files.get(name).labelled(shape=(prod(files.get(name).shape),)))
    return answers(weight)


_OTHER = {"BF16": "F16", "F16": "BF16", "F32": "I32", "U8": "I8", "I8": "U8", "I32": "F32", "F8_E4M3": "F8_E5M2",
          "F8_E5M2": "F8_E4M3", "F8_E4M3FNUZ": "F8_E4M3", "F8_E8M0": "I8"}  # fmt: skip
_LABELS = "dtype|siblings|values|scales of|F8_|F16|I32|I8|U8|codes"


@damage("headers", _LABELS)
def one_weight_relabelled(files: Files) -> list[str]:
    """One matrix has the dtype of another meaning and the same width."""
    weight = weights(files)[0]
    name = weight.parts["weight"]
    files.put(name, files.get(name).labelled(dtype=_OTHER[files.get(name).dtype]))
    return answers(weight)


@damage("headers", _LABELS)
def one_scale_relabelled(files: Files) -> list[str]:
    """The scales of one matrix have the dtype of another meaning and the same width."""
    weight = quantised(files)
    name = weight.parts["scale"]
    files.put(name, files.get(name).labelled(dtype=_OTHER[files.get(name).dtype]))
    return answers(weight)


@damage("headers", _LABELS)
def scale_dialects_exchanged(files: Files) -> list[str]:
    """Scale bytes of one matrix are taken for small floats, or the reverse."""
    weight = quantised(files)
    name = weight.parts["scale"]
    other = {"F8_E8M0": "F8_E4M3", "U8": "F8_E4M3", "F8_E4M3": "F8_E8M0"}.get(files.get(name).dtype)
    if other is None:
        raise NoPlace("scales of more than a byte")
    files.put(name, files.get(name).labelled(dtype=other))
    return answers(weight)


@damage("headers", _LABELS)
def one_norm_relabelled(files: Files) -> list[str]:
    """One norm has the other half-precision dtype over the same bytes."""
    weight = weights(files, kinds="norm")[0]
    name = weight.parts["weight"]
    files.put(name, files.get(name).labelled(dtype=_OTHER[files.get(name).dtype]))
    return answers(weight)


@damage("headers", "F16|BF16|bfloat16|float16")
def all_halves_relabelled(files: Files) -> list[str]:
    """Every tensor in half precision has the other half's dtype."""
    if not any(w.parts == {"weight": w.name} and files.get(w.name).dtype in ("BF16", "F16") for w in weights(files)):
        raise NoPlace("no matrix in half precision")
    for tensors in files.shards.values():
        for name, value in tensors.items():
            if value.dtype in ("BF16", "F16"):
                tensors[name] = value.labelled(dtype=_OTHER[value.dtype])
    return ["*"]


@damage("content", "NaN|infinite|e4m3|e5m2|F8_|fmt")
def all_float8_relabelled(files: Files) -> list[str]:
    """Every tensor in FP8 has the dtype of another dialect over the same bytes."""
    found = False
    for tensors in files.shards.values():
        for name, value in tensors.items():
            if value.dtype in ("F8_E4M3", "F8_E4M3FNUZ") and len(value.shape) > 1 and "scale" not in name:
                tensors[name], found = value.labelled(dtype="F8_E5M2"), True
            elif value.dtype == "F8_E5M2":
                tensors[name], found = value.labelled(dtype="F8_E4M3"), True
    if not found:
        raise NoPlace("no FP8 here")
    return ["*"]


@damage("content", "NaN|reserved|dialect|fnuz|fmt")
def all_float8_taken_for_fnuz(files: Files) -> list[str]:
    """Every tensor in FP8 is labelled as the dialect without a negative zero: all values are halved."""
    found = False
    for tensors in files.shards.values():
        for name, value in tensors.items():
            if value.dtype == "F8_E4M3" and len(value.shape) > 1 and "scale" not in name:
                tensors[name], found = value.labelled(dtype="F8_E4M3FNUZ"), True
    if not found:
        raise NoPlace("no E4M3 weights here")
    return ["*"]


@damage("manifest", "blake|digest|seam|size|magnitude")
def offsets_of_two_exchanged(files: Files) -> list[str]:
    """Two tensors of one dtype and shape have each other's bytes."""
    a, b = pair(files)
    first, second = files.get(a.parts["weight"]), files.get(b.parts["weight"])
    if first.dtype != second.dtype:
        raise NoPlace("no two of one dtype")
    files.put(a.parts["weight"], second)
    files.put(b.parts["weight"], first)
    return [*answers(a), *answers(b), files.file_of(a.parts["weight"])]
