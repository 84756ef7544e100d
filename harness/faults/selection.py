"""Faults of sparse attention's indexer. Knows how modules are built, not their classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.faults.catalogue import NoPlace, fault
from harness.faults.parts import Part, Parts, find
from harness.faults.ways import allowed, bind_names, on_arguments, on_output

Places = list[str]
INDEXER = "rotary|indexer|chosen|choice|rotation|head weights|causal"


def _chosen(parts: Parts, indexer: Part) -> Places:
    name = parts.tap(indexer)
    return [f"{name}.topk", f"{name}.topk.*", name, f"{name}.in.*", f"{name}.out.*"]


@fault("SP01", stage="text|long_context", cause=INDEXER, needs="an indexer with rotary tables")
def indexer_rope(parts: Parts) -> Places:
    """The indexer rotates neighbours instead of halves."""
    indexer = parts.indexer()
    parts.rotary()

    def change(kwargs: dict[str, Any]) -> None:
        if kwargs.get("position_embeddings") is None:
            raise NoPlace("this indexer has no rotary table")
        kwargs["position_embeddings"] = tuple(
            t[..., : t.shape[-1] // 2].repeat_interleave(2, -1) for t in kwargs["position_embeddings"]
        )

    bind_names(indexer)
    on_arguments(indexer, change)
    return [parts.tap(indexer, ".in.position_embeddings*"), *_chosen(parts, indexer)]


@fault("SP03", cause=INDEXER, needs="an indexer")
def indexer_one_sided(parts: Parts) -> Places:
    """A rotation is applied to the indexer's queries only."""
    indexer = parts.indexer()
    query, key = find(indexer, r"wq_b$|q_proj$"), find(indexer, r"^wk$|k_proj$")
    width = key.weight.shape[0]
    turn = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(1))).Q
    on_output(query, lambda y, _: (y.unflatten(-1, (-1, width)).float() @ turn).flatten(-2).to(y.dtype))
    return [parts.tap(query), *_chosen(parts, indexer)]


@fault(cause=INDEXER + "|not allowed", needs="an indexer with a causal mask")
def indexer_future(parts: Parts) -> Places:
    """The indexer may choose one key of the future."""
    indexer = parts.indexer()
    bind_names(indexer)

    def change(kwargs: dict[str, Any]) -> None:
        mask = kwargs["attention_mask"]
        if mask is None or mask.dim() < 3:
            raise NoPlace("this indexer is given no causal mask")
        seen = allowed(mask)
        seen = seen | seen.roll(1, -1)
        kwargs["attention_mask"] = (
            seen if mask.dtype == torch.bool else torch.zeros_like(mask).masked_fill(~seen, torch.finfo(mask.dtype).min)
        )

    on_arguments(indexer, change)
    return [parts.tap(indexer, ".in.attention_mask"), *_chosen(parts, indexer)]


@fault(cause=INDEXER, needs="an indexer with head weights")
def indexer_weights_ignored(parts: Parts) -> Places:
    """All heads of the indexer weigh the same."""
    indexer = parts.indexer()
    part = find(indexer, r"weights_proj$")
    on_output(part, lambda y, _: torch.ones_like(y))
    return [parts.tap(part), *_chosen(parts, indexer)]


@fault(cause=INDEXER, needs="an indexer with a norm of keys")
def indexer_key_norm_skipped(parts: Parts) -> Places:
    """The indexer's keys are not normalised."""
    indexer = parts.indexer()
    part = find(indexer, r"k_norm$")
    on_output(part, lambda y, call: call[0][0].to(y.dtype))
    return [parts.tap(part), *_chosen(parts, indexer)]


def _other_choice(parts: Parts, change: Any) -> Places:
    """Replace what an indexer chose: `change(ids)`, for ids [batch, token, k] with -1 as padding."""
    indexer = parts.indexer()

    def hook(_: Part, args: Any, output: Any) -> Any:
        whole = isinstance(output, tuple)
        outputs = output if whole else (output,)
        swapped = tuple(
            change(o) if isinstance(o, Tensor) and not o.is_floating_point() and o.dim() == 3 else o for o in outputs
        )
        return swapped if whole else swapped[0]

    indexer.register_forward_hook(hook)
    attention = parts.tap(indexer).rpartition(".")[0]
    return [*_chosen(parts, indexer), f"{attention}.core", attention]


@fault(cause=INDEXER + "|k,", needs="an indexer")
def indexer_one_less(parts: Parts) -> Places:
    """One key less is chosen."""
    indexer = parts.indexer()
    if not isinstance(getattr(indexer, "index_topk", None), int):
        raise NoPlace("this indexer says nowhere how many it chooses")
    step = int(getattr(indexer, "index_kpool", 1))
    indexer.index_topk = int(indexer.index_topk) - step
    return _chosen(parts, indexer)


@fault("SP08", cause=INDEXER + "|not allowed|chunk|decode|phase", needs="an indexer, phases")
def indexer_absolute_ids(parts: Parts) -> Places:
    """In a chunk the chosen ids are counted from the chunk's first row."""
    box = {"start": 0}

    def look(kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("position_ids")
        box["start"] = int(ids.flatten()[0]) if ids is not None else 0

    on_arguments(parts.module, look)
    places = _other_choice(parts, lambda ids: torch.where(ids >= 0, (ids - box["start"]).clamp(min=0), ids))
    return [*places, places[-1].rpartition(".")[0]]  # a phase is replayed by layers only


@fault(cause=INDEXER, needs="an indexer")
def indexer_choice_of_the_row_before(parts: Parts) -> Places:
    """Attention uses the choice of the token before."""
    return _other_choice(parts, lambda ids: torch.cat((ids[:, :1], ids[:, :-1]), 1) if ids.shape[1] > 1 else ids)
