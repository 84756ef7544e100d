"""Hold the sizes that a configuration gives against shapes: vocabulary, tie, hidden size, heads, experts, inner widths.

Knows the usual keys and what names mean; must not know content. A key that is not there says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.expected import expert_count
from harness.checkpoint.formats import Logical
from harness.checkpoint.header import Problem
from harness.checkpoint.latent import latent_problems
from harness.checkpoint.names import Family, about, families, number, text_config, tower
from harness.checkpoint.parts import part_of, text_stack

_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in)\.weight$|^embed\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output_projection)\.weight$|^(output|head)\.weight$")
_GATED = re.compile(
    r"(^|\.)(gate_proj|up_proj|down_proj|gate_up_proj)(\.weight)?$|(^|\.)experts\.#\.(w1|w2|w3)\.weight$"
)


def size_problems(checkpoint: Checkpoint) -> list[Problem]:
    """List where sizes that the configuration gives and shapes contradict each other."""
    if not checkpoint.config:
        return []
    config = text_config(checkpoint.config)
    found = [*_vocabulary(checkpoint, config), *_widths(checkpoint, config), *_chosen(checkpoint, config)]
    return [*found, *latent_problems(checkpoint, config)]


def _vocabulary(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Hold rows of the embedding and the head against the vocabulary, and the tie flag against both."""
    embedding, head = _outer(checkpoint, "embeddings"), _outer(checkpoint, "head")
    size = number(config, "vocab_size", "padded_vocab_size", "n_vocab")
    for logical in (embedding, head):
        if logical is None or size is None or not size:
            continue
        rows = logical.shape[0]
        if rows < size:
            yield about(checkpoint, logical, "vocab_rows", f"{size} rows, as vocab_size says", f"{rows}")
        elif rows > size:
            padded = rows - size <= min(max(1024, size // 10), size // 2)
            found = f"{rows}: the vocabulary is padded" if padded else f"{rows}"
            severity = "note" if padded else "warning"
            yield about(checkpoint, logical, "vocab_rows", f"{size} rows, as vocab_size says", found, severity)
    tied = config.get("tie_word_embeddings")
    if tied is True and embedding is not None and head is not None:
        yield from _tie(checkpoint, embedding, head)
    kinds = checkpoint.config.get("architectures")
    generates = isinstance(kinds, list) and any("CausalLM" in str(k) or "Conditional" in str(k) for k in kinds)
    if tied is False and head is None and embedding is not None and generates:
        found = "none, and tie_word_embeddings is false"
        yield about(checkpoint, embedding, "missing_head", "an output head", found, "warning")


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
        yield about(checkpoint, head, "tie_contradicted", expected, f"shape {list(b.shape)}, not {list(a.shape)}")
    elif a.dtype == b.dtype:
        try:
            with (checkpoint.path / a.file).open("rb") as left, (checkpoint.path / b.file).open("rb") as right:
                for place in range(16):
                    at = a.nbytes * place // 16
                    left.seek(a.begin + at)
                    right.seek(b.begin + at)
                    if left.read(min(256, a.nbytes - at)) != right.read(min(256, a.nbytes - at)):
                        found = f"other bytes from {at} on"
                        yield about(checkpoint, head, "tie_contradicted", expected, found, "warning")
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
        yield about(checkpoint, embedding, "hidden_size", expected, f"{embedding.shape[1]}")
    for family in families(checkpoint):
        if not stack or family.stack != stack:
            continue
        yield from _heads(checkpoint, family, config)
        experts = expert_count(config)
        if experts and re.search(r"(^|\.)experts\.\w+$", family.leaf) and len(family.first.shape) == 3:
            for logical in family.members.values():
                if logical.shape[0] != experts:
                    expected = f"{experts} experts, as the configuration says"
                    yield about(checkpoint, logical, "expert_count", expected, f"{logical.shape[0]}")
                    break
        yield from _inner(checkpoint, family, config)


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
        yield about(checkpoint, family.first, "heads", expected, f"{rows} rows", "error")


def _inner(checkpoint: Checkpoint, family: Family, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Hold the width of gated units against the sizes that the configuration calls intermediate or the like.

    Where all layers are alike, and not for shared experts, whose width is a multiple of another key.
    """
    shapes = {x.shape for x in family.members.values()}
    if not _GATED.search(family.leaf) or re.search(r"shared|attn|attention", family.leaf) or len(shapes) != 1:
        return
    routed = re.search(r"(^|\.)experts\.", family.leaf) is not None
    key = "moe_intermediate_size" if routed and number(config, "moe_intermediate_size") else "intermediate_size"
    said = number(config, key)
    other = r"intermediate|ffn|inner|mlp|expert\w*_size|dim" if not routed or key == "intermediate_size" else "(?!)"
    sizes = {v for k, v in config.items() if isinstance(v, int) and re.search(other, k)} | {said}
    shape = family.first.shape
    if not said or len(shape) not in (2, 3):
        return
    hidden = number(config, "hidden_size", "n_embd", "d_model")
    widths = [n for n in shape[-2:] if n != hidden] or [shape[-1]]
    fine = {f * n for n in sizes if n for f in ((1, 2) if "gate_up" in family.leaf else (1,))}
    if len(widths) == 1 and widths[0] not in fine:
        half = widths[0] * 2 in fine  # some count gate and up together
        expected, severity = f"{said} inner units, as {key} says", "note" if half else "error"
        yield about(checkpoint, family.first, "inner_size", expected, f"shape {list(shape)}", severity)


def _chosen(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Hold the number of experts chosen for a token, and the rows of routers, against the number of experts."""
    experts = expert_count(config)
    chosen = number(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")
    if experts and chosen is not None and chosen > experts:
        found = f"{chosen}, of {experts} experts"
        yield about(checkpoint, None, "expert_count", "no more experts chosen than there are", found)
    hidden = number(config, "hidden_size", "n_embd", "d_model")
    more = {v for k, v in config.items() if "expert" in k and isinstance(v, int)} - {experts}
    for family in families(checkpoint):
        if not experts or not re.search(r"(mlp|ffn|moe|feed_forward)\.(gate|router)\.weight$", family.leaf):
            continue
        for logical in family.members.values():
            rows, *columns = logical.shape
            if columns == [hidden] and rows != experts and rows - experts not in more:
                expected = f"{experts} rows, one for each expert"
                yield about(checkpoint, logical, "expert_count", expected, f"{rows} rows of a router")
                break
