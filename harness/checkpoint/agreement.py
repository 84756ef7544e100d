"""Hold what a configuration says against the tensors: quantisation and sizes. Knows both; must not know content.

A contradiction is a problem of its own, because a loader believes one of the two without a word. What a configuration
does not say contradicts nothing. Sizes are judged where the usual keys give them and names show what they mean.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.declared import Declared, declared, ignores
from harness.checkpoint.expected import expert_count
from harness.checkpoint.formats import Logical, logical_tensors
from harness.checkpoint.header import Problem
from harness.checkpoint.names import Family, families, number, text_config, tower
from harness.checkpoint.parts import part_of, text_stack

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
_GROUPS = {"mxfp4": 32, "mxfp4_blocks": 32, "nvfp4_divisor": 16, "nvfp4_multiplier": 16}
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output_projection)\.weight$|^output\.weight$")
_MAX_NAMED = 20
_MAX_MODULES = 20_000


def agreement_problems(checkpoint: Checkpoint) -> list[Problem]:
    """List where the configuration and the tensors contradict each other."""
    found = list(_quantisation(checkpoint, declared(checkpoint)))
    found += _ignored(checkpoint, declared(checkpoint))
    found += _dtypes(checkpoint)
    if checkpoint.config:
        found += _vocabulary(checkpoint, text_config(checkpoint.config))
        found += _widths(checkpoint, text_config(checkpoint.config))
    else:
        found.append(_problem(checkpoint, None, "missing_config", "a configuration", "none to hold against", "note"))
    return found


def _problem(
    checkpoint: Checkpoint, logical: Logical | None, kind: str, expected: str, found: str, severity: str = "error"
) -> Problem:
    ref = checkpoint.tensors[next(iter(logical.parts.values()))] if logical is not None else None
    return Problem(
        kind=kind, name=logical.name if logical is not None else "",
        file=ref.file if ref is not None else "config.json",
        expected=expected, found=found, severity=severity, offset=ref.begin if ref is not None else None,
    )  # fmt: skip


# --- quantisation ---


def _quantisation(checkpoint: Checkpoint, says: Declared) -> Iterator[Problem]:
    """Hold method, format, bits and group sizes against the layouts that are there."""
    first: dict[str, Logical] = {}
    for logical in logical_tensors(checkpoint):
        if logical.format not in ("plain", "unknown"):
            first.setdefault(logical.format, logical)
    if not says.method and not says.formats:
        if first and checkpoint.config and not says.source:
            kind, logical = next(iter(first.items()))
            yield _problem(
                checkpoint, logical, "method_contradicted", "a quantization_config", f"none, and weights in {kind}"
            )
        return
    allowed = _allowed(says)
    if allowed is not None and not allowed & set(first):
        kinds = ", ".join(sorted(first)) or "no quantised weight"
        told = " ".join([says.method, *says.formats]).strip()
        at = next(iter(first.values()), None)
        yield _problem(checkpoint, at, "method_contradicted", f"weights as {told} stores them", kinds)
    elif allowed is not None:
        for kind in sorted(set(first) - allowed):
            told = " ".join([says.method, *says.formats]).strip()
            yield _problem(
                checkpoint, first[kind], "method_contradicted", f"what {told} stores", f"weights in {kind}", "warning"
            )
    for kind, logical in first.items():
        bits = int(logical.options.get("bits", 0)) or _BITS.get(kind, 0)
        if says.widths and bits and bits not in says.widths:
            expected = f"{' or '.join(map(str, says.widths))} bits, as {says.source} says"
            yield _problem(checkpoint, logical, "bits_contradicted", expected, f"{bits} bits in the tensors")
        group, sizes = _GROUPS.get(kind), [g for g in says.groups if g]
        if group and sizes and group not in sizes and len(says.groups) <= 1:
            yield _problem(checkpoint, logical, "group_contradicted", f"groups of {sizes[0]}", f"groups of {group}")
    if says.block is not None and "fp8_block" not in first and first:
        kind, logical = next(iter(first.items()))
        if allowed is None or _FP8 & allowed:
            expected = f"block scales of {says.block[0]}x{says.block[1]}"
            yield _problem(checkpoint, logical, "scales_contradicted", expected, f"none; weights in {kind}")


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
                yield _problem(checkpoint, logical, "ignored_but_quantised", expected, found)
    odd = [
        (module, logical) for template, module, logical in plain
        if len(logical.shape) >= 2 and kinds[template][True] > kinds[template][False]
    ]  # fmt: skip
    for module, logical in odd[:_MAX_NAMED]:
        loosely = any(pattern in module for pattern in says.ignored if not pattern.startswith("re:"))
        if not ignored(module) and not loosely:
            found = "it as it is, and not among the ignored"
            yield _problem(checkpoint, logical, "quantised_but_plain", "it quantised, like its siblings", found)


def _dtypes(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Name tensors whose stored type differs from all their siblings' in a way that only a label can."""
    for family in families(checkpoint):
        count = Counter(logical.dtype for logical in family.members.values())
        if len(count) < 2:
            continue
        usual = count.most_common(1)[0][0]
        for dtype, n in count.items():
            if dtype != usual and _relabelled(dtype, usual) and n * 2 < count[usual]:
                first = next(x for x in family.members.values() if x.dtype == dtype)
                expected = f"it in {usual}, like its siblings"
                found = f"{dtype}{f', and {n - 1} more' if n > 1 else ''}"
                yield _problem(checkpoint, first, "dtype_contradicted", expected, found)
    yield from _declared_dtype(checkpoint)


def _relabelled(a: str, b: str) -> bool:
    """Say whether two types hold the same number of bits and mean other values by them."""
    same = ({"F16", "BF16"}, {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}, {"F32", "I32", "U32"})
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
        yield _problem(checkpoint, first[other], "dtype_contradicted", expected, f"{other}", "warning")


# --- sizes ---


def _vocabulary(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Hold rows of the embedding and the head against the vocabulary, and the tie flag against both."""
    embedding, head = _outer(checkpoint, "embeddings"), _outer(checkpoint, "head")
    size = number(config, "vocab_size", "padded_vocab_size", "n_vocab")
    for logical in (embedding, head):
        if logical is None or size is None or not size:
            continue
        rows = logical.shape[0]
        if rows < size:
            yield _problem(checkpoint, logical, "vocab_rows", f"{size} rows, as vocab_size says", f"{rows}")
        elif rows > size:
            padded = rows - size <= max(1024, size // 10)
            found = f"{rows}: the vocabulary is padded" if padded else f"{rows}"
            severity = "note" if padded else "warning"
            yield _problem(checkpoint, logical, "vocab_rows", f"{size} rows, as vocab_size says", found, severity)
    tied = config.get("tie_word_embeddings")
    if tied is True and embedding is not None and head is not None:
        yield from _tie(checkpoint, embedding, head)
    kinds = checkpoint.config.get("architectures")
    generates = isinstance(kinds, list) and any("CausalLM" in str(k) or "Conditional" in str(k) for k in kinds)
    if tied is False and head is None and embedding is not None and generates:
        found = "none, and tie_word_embeddings is false"
        yield _problem(checkpoint, embedding, "missing_head", "an output head", found, "warning")


def _outer(checkpoint: Checkpoint, part: str) -> Logical | None:
    """Return the one matrix outside the layers that is the embedding or the head of text; None if not exactly one."""
    found = [
        family.first for family in families(checkpoint)
        if "#" not in family.template and len(family.first.shape) == 2 and family.template.endswith("weight")
        and tower(family.template) == "text" and part_of(family.template) == part
        and (_HEAD if part == "head" else _EMBEDDING).search(family.template)
    ]  # fmt: skip
    return found[0] if len(found) == 1 else None


def _tie(checkpoint: Checkpoint, embedding: Logical, head: Logical) -> Iterator[Problem]:
    """Compare a stored head with the embedding that it is said to be, at sixteen places: no weight is read whole."""
    expected = f"{embedding.name} again: tie_word_embeddings is true"
    a, b = (checkpoint.tensors[x.parts["weight"]] for x in (embedding, head))
    if a.shape != b.shape:
        yield _problem(checkpoint, head, "tie_contradicted", expected, f"shape {list(b.shape)}, not {list(a.shape)}")
    elif a.dtype == b.dtype:
        try:
            with (checkpoint.path / a.file).open("rb") as left, (checkpoint.path / b.file).open("rb") as right:
                for place in range(16):
                    at = a.nbytes * place // 16
                    left.seek(a.begin + at)
                    right.seek(b.begin + at)
                    if left.read(min(256, a.nbytes - at)) != right.read(min(256, a.nbytes - at)):
                        found = f"other bytes from {at} on"
                        yield _problem(checkpoint, head, "tie_contradicted", expected, found, "warning")
                        return
        except OSError:
            return


def _widths(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Hold hidden size, heads and experts against the shapes that are made of them."""
    stack, hidden = text_stack(checkpoint), number(config, "hidden_size", "n_embd", "d_model")
    embedding = _outer(checkpoint, "embeddings")
    lower = {v for k, v in config.items() if isinstance(v, int) and re.search(r"embed|proj|hidden|dim|model", k)}
    if hidden and embedding is not None and embedding.shape[1] != hidden and embedding.shape[1] not in lower:
        expected = f"{hidden} columns, as the configuration says"
        yield _problem(checkpoint, embedding, "hidden_size", expected, f"{embedding.shape[1]}")
    for family in families(checkpoint):
        if not stack or family.stack != stack:
            continue
        yield from _heads(checkpoint, family, config)
        experts = expert_count(config)
        if experts and re.search(r"(^|\.)experts\.\w+$", family.leaf) and len(family.first.shape) == 3:
            for logical in family.members.values():
                if logical.shape[0] != experts:
                    expected = f"{experts} experts, as the configuration says"
                    yield _problem(checkpoint, logical, "expert_count", expected, f"{logical.shape[0]}")
                    break
        yield from _odd_shapes(checkpoint, family)


def _heads(checkpoint: Checkpoint, family: Family, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Hold rows of query, key and value projections against heads times head size.

    Only where one count of heads is said, and every layer is alike: models with several kinds of attention say more.
    """
    match = re.search(r"(^|\.)([qkv])_proj\.weight$", family.leaf)
    shapes = {x.shape for x in family.members.values()}
    if not match or len(shapes) != 1 or len(family.first.shape) != 2:
        return
    heads = number(config, "num_attention_heads")
    kv, dim = number(config, "num_key_value_heads") or heads, number(config, "head_dim")
    said = [k for k in config if re.search(r"head_dim|(num|n)_\w*heads", k)]
    usual = {"num_attention_heads", "num_key_value_heads", "head_dim"}
    if not heads or not kv or set(said) - usual:
        return
    (rows, columns), hidden = family.first.shape, number(config, "hidden_size", "n_embd", "d_model")
    if columns != hidden:
        return
    dim = dim or (columns // heads if columns % heads == 0 else 0)
    count = heads if match[2] == "q" else kv
    fine = {count * dim, 2 * count * dim} if match[2] == "q" else {count * dim}
    if dim and rows not in fine:
        expected = f"{count} heads of {dim}, which is {count * dim} rows"
        yield _problem(checkpoint, family.first, "heads", expected, f"{rows} rows", "error")


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
            yield _problem(checkpoint, logical, "odd_shape", expected, f"{list(other)}")


def _meant(family: Family, other: tuple[int, ...]) -> bool:
    """Say whether the odd ones are the first or last layers: wider or narrower ends can be meant."""
    layers = [numbers[0] for numbers, x in family.members.items() if x.shape == other]
    every = [numbers[0] for numbers in family.members]
    return min(every) in layers or max(every) in layers
