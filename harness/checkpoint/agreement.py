"""Hold what a configuration says of quantisation against the tensors. Knows both; must not know content or sizes.

A contradiction is a problem of its own, because a loader believes one of the two without a word. What a configuration
does not say contradicts nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from harness.checkpoint.container import CONFIG, Checkpoint
from harness.checkpoint.declared import Declared, declared, ignores
from harness.checkpoint.formats import Logical, logical_tensors
from harness.checkpoint.header import Problem
from harness.checkpoint.names import about, families

_FP8 = {"fp8_block", "fp8_channel", "mxfp8"}
_BY_METHOD: dict[str, set[str]] = {
    "mxfp4": {"mxfp4_blocks", "mxfp4"},
    "fp8": _FP8 | {"mxfp4"},
    "fbgemm_fp8": _FP8,
    "mxfp8": {"mxfp8"},
    "modelopt": {"nvfp4_multiplier", "mxfp4", *_FP8},
    "quark": {"mxfp4", *_FP8},
    "gptq": {"gptq_v1", "gptq_v2"},
    "awq": {"awq"},
}
_BY_FORMAT: dict[str, set[str]] = {
    "mxfp4-pack-quantized": {"mxfp4"},
    "nvfp4-pack-quantized": {"nvfp4_divisor"},
    "pack-quantized": {"int4_packed"},
    "float-quantized": _FP8,
    "naive-quantized": _FP8 | {"unknown"},
    "mxfp8-quantized": {"mxfp8"},
    "nvfp4": {"nvfp4_multiplier"},
}
_BITS = {"fp8_block": 8, "fp8_channel": 8, "mxfp8": 8, "mxfp4": 4, "mxfp4_blocks": 4, "nvfp4_divisor": 4,
         "nvfp4_multiplier": 4, "awq": 4}  # fmt: skip
_GROUPS = {"mxfp8": 32, "mxfp4": 32, "mxfp4_blocks": 32, "nvfp4_divisor": 16, "nvfp4_multiplier": 16}
_DIALECTS = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2", "F8_E4M3FNUZ": "e4m3fnuz", "F8_E5M2FNUZ": "e5m2fnuz"}
_SHARING = {"fp8_block": ("block",), "mxfp8": ("group",), "mxfp4": ("group", "tensor_group"),
            "nvfp4_divisor": ("tensor_group", "group"), "nvfp4_multiplier": ("tensor_group", "group")}  # fmt: skip
_MAX_NAMED = 20
_MAX_MODULES = 20_000


def agreement_problems(checkpoint: Checkpoint) -> list[Problem]:
    """List where the configuration's words on quantisation and the tensors contradict each other."""
    says = declared(checkpoint)
    first = _first(checkpoint)
    found = [*_quantisation(checkpoint, says, first), *_scales(checkpoint, says, first), *_ignored(checkpoint, says)]
    if not checkpoint.config:
        # A folder with an index comes from an exporter, which writes one; a single file may be all there ever was.
        gone = bool(checkpoint.index) and not (checkpoint.path / CONFIG).exists()
        severity = "warning" if gone else "note"
        found.append(about(checkpoint, None, "missing_config", "a configuration", "none to hold against", severity))
    return found


def _first(checkpoint: Checkpoint) -> dict[str, Logical]:
    """Return one weight of each layout that there is."""
    first: dict[str, Logical] = {}
    for logical in logical_tensors(checkpoint):
        if logical.format not in ("plain", "unknown"):
            first.setdefault(logical.format, logical)
    return first


def _quantisation(checkpoint: Checkpoint, says: Declared, first: Mapping[str, Logical]) -> Iterator[Problem]:
    """Hold method, format, bits and group sizes against the layouts that are there."""
    if not says.method and not says.formats:
        if first and checkpoint.config and not says.source:
            kind, logical = next(iter(first.items()))
            yield about(
                checkpoint, logical, "method_contradicted", "a quantization_config", f"none, and weights in {kind}"
            )
        return
    allowed = _allowed(says)
    if allowed is not None and not allowed & set(first):
        kinds = ", ".join(sorted(first)) or "no quantised weight"
        told = " ".join([says.method, *says.formats]).strip()
        at = next(iter(first.values()), None)
        yield about(checkpoint, at, "method_contradicted", f"weights as {told} stores them", kinds)
    elif allowed is not None:
        for kind in sorted(set(first) - allowed):
            told = " ".join([says.method, *says.formats]).strip()
            yield about(
                checkpoint, first[kind], "method_contradicted", f"what {told} stores", f"weights in {kind}", "warning"
            )
    for kind, logical in first.items():
        bits = int(logical.options.get("bits", 0)) or _BITS.get(kind, 0)
        if says.widths and bits and bits not in says.widths:
            expected = f"{' or '.join(map(str, says.widths))} bits, as {says.source} says"
            yield about(checkpoint, logical, "bits_contradicted", expected, f"{bits} bits in the tensors")
        group, sizes = _GROUPS.get(kind), [g for g in says.groups if g]
        if group and sizes and group not in sizes and len(says.groups) <= 1:
            yield about(checkpoint, logical, "group_contradicted", f"groups of {sizes[0]}", f"groups of {group}")
    if says.block is not None and "fp8_block" not in first and first:
        kind, logical = next(iter(first.items()))
        if allowed is None or _FP8 & allowed:
            expected = f"block scales of {says.block[0]}x{says.block[1]}"
            yield about(checkpoint, logical, "scales_contradicted", expected, f"none; weights in {kind}")


def _scales(checkpoint: Checkpoint, says: Declared, first: Mapping[str, Logical]) -> Iterator[Problem]:
    """Hold the dialect of small floats and what shares a scale against the layouts that are there."""
    for kind, logical in first.items():
        dialect = _DIALECTS.get(logical.dtype)
        if dialect and len(says.dialects) == 1 and dialect not in says.dialects:
            expected = f"codes in {says.dialects[0]}, as {says.source} says"
            yield about(checkpoint, logical, "dtype_contradicted", expected, f"{logical.dtype}, which is {dialect}")
        shared = _sharing(checkpoint, logical)
        if shared and len(says.strategies) == 1 and says.strategies[0] not in shared:
            expected = f"one scale for each {says.strategies[0]}, as {says.source} says"
            yield about(
                checkpoint, logical, "scales_contradicted", expected, f"scales of {kind}, one for each {shared[0]}"
            )


def _sharing(checkpoint: Checkpoint, logical: Logical) -> tuple[str, ...]:
    """Return the words for what shares a scale in a weight; none where several would do."""
    if logical.problem or "scale" not in logical.parts:
        return ()
    scale = checkpoint.tensors[logical.parts["scale"]]
    if logical.format == "fp8_channel":
        many = scale.numel > 1
        return ("channel", "token") if many else ("tensor",) if logical.numel > logical.shape[-1] else ()
    if logical.format == "int4_packed":
        return ("group", "tensor_group") if scale.shape[-1] > 1 else ()
    return _SHARING.get(logical.format, ())


def _allowed(says: Declared) -> set[str] | None:
    """Return the layouts that a configuration's words mean; None where a word is not known."""
    if says.method == "compressed-tensors" or (not says.method and says.formats):
        known = [_BY_FORMAT[f] for f in says.formats if f in _BY_FORMAT]
        unknown = [f for f in says.formats if f not in _BY_FORMAT and f not in ("mixed-precision", "dense")]
        return set().union(*known) if known and not unknown else None
    return _BY_METHOD.get(says.method)


def _ignored(checkpoint: Checkpoint, says: Declared) -> Iterator[Problem]:
    """Hold the list of modules that stay as they are against those that do."""
    ignored = ignores(says.ignored)
    kinds: dict[str, Counter[bool]] = defaultdict(Counter)
    plain: list[tuple[str, str, Logical]] = []
    told = looked = 0
    for family in families(checkpoint):
        if not family.template.endswith("weight") and not family.first.quantised:
            continue
        for numbers, logical in family.members.items():
            if len(numbers) > 1 and numbers[1] > 0 and logical.quantised:
                continue  # one expert stands for all
            kinds[family.template][logical.quantised] += 1
            module = logical.name.removesuffix(".weight")
            if not logical.quantised:
                plain.append((family.template, module, logical))
                continue
            looked += 1
            if says.ignored and looked <= _MAX_MODULES and told < _MAX_NAMED and ignored(module):
                told += 1
                expected, found = "it as it is: the configuration ignores it", f"it in {logical.format}"
                yield about(checkpoint, logical, "ignored_but_quantised", expected, found)
    odd = [
        (module, logical) for template, module, logical in plain
        if len(logical.shape) >= 2 and kinds[template][True] > kinds[template][False]
    ]  # fmt: skip
    for module, logical in odd[:_MAX_NAMED]:
        loosely = any(pattern in module for pattern in says.ignored if not pattern.startswith("re:"))
        if not ignored(module) and not loosely:
            found = "it as it is, and not among the ignored"
            yield about(checkpoint, logical, "quantised_but_plain", "it quantised, like its siblings", found)
