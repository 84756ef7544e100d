"""Hold latent attention and its indexer against the sizes that a configuration gives. Knows the usual keys and names.

A latent attention compresses queries and keys: its shapes are sums and products of six sizes, so that one wrong size
still fits some of its matrices. Shapes are looked at where every layer that has the matrix is alike.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.header import Problem
from harness.checkpoint.names import Family, about, families, number
from harness.checkpoint.parts import text_stack

_HEAD_Q = "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)"
_HEAD_KV = "num_attention_heads * (qk_nope_head_dim + v_head_dim)"
Axes = tuple[str, ...]
_LATENT: tuple[tuple[str, Axes], ...] = (
    (r"(^|\.)q_a_proj\.weight$", ("q_lora_rank", "hidden_size")),
    (r"(^|\.)q_a_layernorm\.weight$", ("q_lora_rank",)),
    (r"(^|\.)q_b_proj\.weight$", (_HEAD_Q, "q_lora_rank")),
    (r"(^|\.)kv_a_proj_with_mqa\.weight$", ("kv_lora_rank + qk_rope_head_dim", "hidden_size")),
    (r"(^|\.)kv_a_layernorm\.weight$", ("kv_lora_rank",)),
    (r"(^|\.)kv_b_proj\.weight$", (_HEAD_KV, "kv_lora_rank")),
    (r"(^|\.)self_attn\.o_proj\.weight$", ("hidden_size", "num_attention_heads * v_head_dim")),
    (r"(^|\.)indexer\.wq_b\.weight$", ("index_n_heads * index_head_dim", "q_lora_rank")),
    (r"(^|\.)indexer\.wk\.weight$", ("index_head_dim", "hidden_size")),
    (r"(^|\.)indexer\.k_norm\.weight$", ("index_head_dim",)),
    (r"(^|\.)indexer\.weights_proj\.weight$", ("index_n_heads", "hidden_size")),
)
_SHARED: tuple[tuple[str, Axes], ...] = (
    (r"(^|\.)attn\.wq_a\.weight$", ("q_lora_rank", "hidden_size")),
    (r"(^|\.)attn\.wq_b\.weight$", ("num_attention_heads * head_dim", "q_lora_rank")),
    (r"(^|\.)attn\.wkv\.weight$", ("head_dim", "hidden_size")),
    (r"(^|\.)attn\.attn_sink$", ("num_attention_heads",)),
)
"""Ends of names, and each axis as a sum of products of keys: latent keys and values; one head that all queries share.
Source: the published configurations of latent attention (`q_lora_rank`, `kv_lora_rank`, `qk_nope_head_dim`,
`qk_rope_head_dim`, `v_head_dim`), of its indexer, and of the shared head that followed it."""


def latent_problems(checkpoint: Checkpoint, config: Mapping[str, Any]) -> list[Problem]:
    """List the matrices of latent attention that have another shape than the configuration's sizes make.

    Every size is in several shapes. One matrix alone that differs is the architecture's own, and a note.
    """
    stack = text_stack(checkpoint)
    table = _LATENT if number(config, "kv_lora_rank") is not None else _SHARED
    if number(config, "kv_lora_rank", "q_lora_rank") is None:
        return []
    found: list[Problem] = []
    for family in families(checkpoint):
        if family.stack == stack and len({x.shape for x in family.members.values()}) == 1:
            for end, axes in table:
                if re.search(end, family.leaf) and len(axes) == len(family.first.shape):
                    found += _apart(checkpoint, family, axes, config)
    alone = len({p.name for p in found}) == 1
    return [dataclasses.replace(p, severity="note") for p in found] if alone else found


def _apart(checkpoint: Checkpoint, family: Family, axes: Axes, config: Mapping[str, Any]) -> Iterator[Problem]:
    for axis, words in enumerate(axes):
        size, found = _size(words, config), family.first.shape[axis]
        if size is not None and size != found:
            what = ("rows" if axis == 0 else "columns") if len(axes) == 2 else "elements"
            expected = f"{size} {what}, which is {words}"
            yield about(checkpoint, family.first, "latent_size", expected, f"{found} {what}")


def _size(words: str, config: Mapping[str, Any]) -> int | None:
    """Return a sum or product of keys (`a`, `a + b`, `a * b`, `a * (b + c)`); None where one of them is not said."""
    first, times, rest = words.partition(" * ")
    if times:
        left, right = number(config, first), _size(rest.strip("()"), config)
        return None if left is None or right is None else left * right
    sizes = [number(config, key) for key in words.split(" + ")]
    return None if None in sizes else sum(size for size in sizes if size is not None)
