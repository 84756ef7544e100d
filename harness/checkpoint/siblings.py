"""Hold a weight against the same one of other layers and experts: dtypes, shapes, layouts. Knows headers; no content.

What differs from all its siblings in a way that nobody makes on purpose is a label that is wrong, or another export.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.declared import declared
from harness.checkpoint.formats import Logical, logical_tensors
from harness.checkpoint.header import Problem
from harness.checkpoint.names import Family, about, families, text_config
from harness.checkpoint.parts import text_stack


def sibling_problems(checkpoint: Checkpoint) -> list[Problem]:
    """List the weights that differ from their siblings, and halves that the configuration says are the other."""
    stack, found = text_stack(checkpoint), list[Problem]()
    for family in families(checkpoint):
        found += _dtypes(checkpoint, family)
        if stack and family.stack == stack:
            found += _odd_shapes(checkpoint, family)
            found += _odd_layouts(checkpoint, family)
    return [*found, *_declared_dtype(checkpoint)]


def _dtypes(checkpoint: Checkpoint, family: Family) -> Iterator[Problem]:
    """Name parts of weights whose stored type differs from all their siblings' in a way that only a label can."""
    if len(family.members) < 3:
        return
    held: dict[str, Counter[str]] = defaultdict(Counter)
    for logical in family.members.values():
        if logical.quantised:
            for role, part in logical.parts.items():
                held[role][checkpoint.tensors[part].dtype] += 1
        else:
            held["weight"][logical.dtype] += 1
    for role, count in held.items():
        usual = count.most_common(1)[0][0]
        for dtype, n in count.items():
            if dtype != usual and _relabelled(dtype, usual) and n * 2 < count[usual]:
                first = next(
                    x for x in family.members.values()
                    if role in x.parts and checkpoint.tensors[x.parts[role]].dtype == dtype
                )  # fmt: skip
                what = "it" if role == "weight" else f"its {role}"
                found = f"{dtype}{f', and {n - 1} more' if n > 1 else ''}"
                expected = f"{what} in {usual}, like its siblings"
                yield about(checkpoint, first, "dtype_contradicted", expected, found)


def _relabelled(a: str, b: str) -> bool:
    """Say whether two types hold the same number of bits and mean other values by them."""
    same = (
        {"F16", "BF16", "I16", "U16"}, {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}, {"F32", "I32", "U32"},
        {"U8", "I8"}, {"F8_E8M0", "F8_E4M3"}, {"F8_E8M0", "I8"},
    )  # fmt: skip
    return any({a, b} <= group for group in same)


def _declared_dtype(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Hold the configured precision against plain half-precision weights: each half is taken for the other."""
    config = text_config(checkpoint.config)
    said = config.get("dtype") or config.get("torch_dtype")
    names = {"bfloat16": "BF16", "float16": "F16"}
    wanted = names.get(said.removeprefix("torch.")) if isinstance(said, str) else None
    if wanted is None or declared(checkpoint).method:
        return
    held: Counter[str] = Counter()
    first: dict[str, Logical] = {}
    for logical in logical_tensors(checkpoint):
        if logical.dtype in names.values():
            held[logical.dtype] += 1
            first.setdefault(logical.dtype, logical)
    other = next((d for d in held if d != wanted), None)
    if other is not None and not held[wanted]:
        expected = f"{wanted}, as config.json says"
        yield about(checkpoint, first[other], "dtype_contradicted", expected, f"{other}", "warning")


def _odd_shapes(checkpoint: Checkpoint, family: Family) -> Iterator[Problem]:
    """Name the one or two layers, or experts, of many whose shape differs from all the others'."""
    shapes: Counter[tuple[int, ...]] = Counter(x.shape for x in family.members.values())
    if len(shapes) != 2:
        return
    (usual, many), (other, few) = shapes.most_common(2)
    if few > 2 or many < 3 * few or _meant(family, other):
        return
    for logical in family.members.values():
        if logical.shape == other:
            expected = f"shape {list(usual)}, like {many} siblings"
            yield about(checkpoint, logical, "odd_shape", expected, f"{list(other)}")


def _meant(family: Family, other: tuple[int, ...]) -> bool:
    """Say whether the odd ones are the first or last layers: wider or narrower ends can be meant."""
    layers = [numbers[0] for numbers, x in family.members.items() if x.shape == other]
    every = [numbers[0] for numbers in family.members]
    return min(every) in layers or max(every) in layers


def _odd_layouts(checkpoint: Checkpoint, family: Family) -> Iterator[Problem]:
    """Name the one or two quantised weights of many that have scales of another kind than all the others."""
    kinds = {n: _layout(checkpoint, x) for n, x in family.members.items() if x.quantised and not x.problem}
    count = Counter(kinds.values())
    if len(count) != 2:
        return
    (usual, many), (other, few) = count.most_common(2)
    if few > 2 or many < 3 * few:
        return
    for numbers, kind in kinds.items():
        if kind == other:
            expected = f"a weight in {usual}, like {many} siblings"
            yield about(checkpoint, family.members[numbers], "layout_contradicted", expected, f"one in {other}")


def _layout(checkpoint: Checkpoint, logical: Logical) -> str:
    """Return the layout of a weight; of FP8, whether one scale is all there is. Other layouts have shapes to fit."""
    if logical.format != "fp8_channel" or logical.numel == logical.shape[-1]:
        return logical.format
    return "fp8_channel with one scale" if checkpoint.tensors[logical.parts["scale"]].numel == 1 else "fp8_channel"
