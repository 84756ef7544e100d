"""Hold the weights in memory against the checkpoint, one by one. Knows checkpoints and `Weight`; no limits.

A weight is compared with the checkpoint tensor that it names, else with the one of the same name. What was merged,
fused or renamed is recognised by content: rows of the decoded checkpoint tensors, and the order they were put together
in. What is wrong is then looked at once more, beside what belongs there. The result is plain JSON facts; whether an
order is right is for a stage to say, which sees the reference's too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from harness.adapter import Weight
from harness.checkpoint.again import look_again
from harness.checkpoint.answers import Answer
from harness.checkpoint.container import Checkpoint
from harness.checkpoint.content import explain
from harness.checkpoint.fact import WeightFact, order_sources
from harness.checkpoint.formats import logical_tensors
from harness.checkpoint.ledger import Ledger
from harness.checkpoint.missing import attribute_gaps, pair_the_rest
from harness.checkpoint.named import take
from harness.checkpoint.near import Near
from harness.checkpoint.pending import Pending
from harness.checkpoint.slices import cut_of
from harness.checkpoint.summary import is_derived, summary
from harness.precision.scheme import Precision

__all__ = ["WeightFact", "audit_weights"]

Weights = Iterable[Weight] | Callable[[], Iterable[Weight]]


def audit_weights(
    checkpoint: Checkpoint,
    weights: Weights,
    *,
    tied: bool,
    dtype: torch.dtype | str,
    declared: Precision | None = None,
) -> dict[str, Any]:
    """Compare every weight that memory holds with the checkpoint, and say what was never used or never filled.

    `tied`: the configuration says that the output head is the embedding. `dtype` is the port's.
    `declared`: what it declares beside it; a weight in a declared format may lie within its step of the checkpoint's.
    Weights are consumed one at a time and not kept. Given as a function (or a collection), they are asked for a second
    time where some were wrong, and their elements compared with what belongs there.

    Returns:
        JSON facts: `weights` (WeightFact), `unused`, `partial`, `outside`, `unfilled`, `errors`, `untied`, counts.
    """
    logicals = {x.name: x for x in logical_tensors(checkpoint)}
    owners = {part: x.name for x in logicals.values() for part in (*x.parts.values(), *x.extra)}
    audit = Ledger(
        checkpoint=checkpoint,
        logicals=logicals,
        suffixes=_suffix_index(logicals),
        owners=owners,
        float32_is_rare=_float32_is_rare(checkpoint),
        near=Near(checkpoint, logicals.values(), declared) if declared is not None and declared.weights else None,
    )
    for weight in weights() if callable(weights) else weights:
        take(audit, weight)
    partial = _explain_pending(audit)
    pair_the_rest(audit)
    look_again(audit, weights)
    return summary(audit, partial, tied=tied, dtype=str(dtype).removeprefix("torch."))


def _suffix_index(names: Iterable[str]) -> dict[str, str | None]:
    """Map every suffix of at least two components to the one name that ends so, or to None where several do."""
    index: dict[str, str | None] = {}
    for name in names:
        parts = name.split(".")
        for i in range(max(1, len(parts) - 1)):
            suffix = ".".join(parts[i:])
            index[suffix] = None if suffix in index else name
    return index


def _float32_is_rare(checkpoint: Checkpoint) -> bool:
    total = sum(r.nbytes for r in checkpoint.tensors.values())
    return sum(r.nbytes for r in checkpoint.tensors.values() if r.dtype == "F32") * 2 < total


def _explain_pending(audit: Ledger) -> dict[str, tuple[int, int]]:
    """Look for the content of what no name settled. Returns the sources of which only some rows were used."""
    if not audit.pending:
        return {}
    first = [x for x in audit.logicals.values() if x.name not in audit.used]
    second = [x for x in audit.logicals.values() if x.name in audit.used]
    found = explain(audit.checkpoint, [p for _, p in audit.pending], first, second, audit.errors)
    for (at, pending), answer in zip(audit.pending, found.answers, strict=True):
        audit.facts[at] = _settled(audit, at, pending, answer)
    attribute_gaps(audit, set(found.hits))
    audit.raw_used |= {n for n, (hit, rows) in found.hits.items() if n in audit.owners and hit == rows}
    audit.used |= {n for n in found.hits if n in audit.logicals}
    damaged = {n for f in audit.facts if f.match == "content" and f.unmatched for n in order_sources(f.order)}
    damaged |= {cut_of(due.source)[0] for dues in audit.dues.values() for due in dues}
    return {
        n: (hit, rows)
        for n, (hit, rows) in found.hits.items()
        if hit < rows and n in audit.logicals and n not in damaged
    }


def _settled(audit: Ledger, at: int, pending: Pending, answer: Answer) -> WeightFact:
    """Return what is known of a weight once its content was looked for."""
    fact = audit.facts[at]
    named, all_found = fact.match == "named", answer.unmatched == 0
    if named and all_found and not fact.order and order_sources(answer.order) == {fact.source}:
        # A slice under the name of its tensor (one rank's): whether all slices are there is told by `partial`.
        fact, named = dataclasses.replace(fact, mismatches=0), False
    # By name, the smaller of the two counts stands: a few wrong elements are not a row's worth of them.
    if named and not all_found and fact.mismatches <= answer.unmatched:
        audit.used.add(fact.source)
        return fact
    # Of a weight without a name of its own, few rows that are the checkpoint's say where it comes from.
    matched = pending.numel - answer.unmatched
    filled = matched * 2 >= pending.numel or (not named and matched * 10 >= pending.numel + 10 * _constant(pending))
    if named and not filled:
        audit.used.add(fact.source)  # its name was found and its values are wrong: that is told by `mismatches`
    by_name = is_derived(fact.name)
    match = "content" if filled else "derived" if by_name or fact.computed else "none"
    return dataclasses.replace(
        fact,
        match=fact.match if named else match,
        unmatched=answer.unmatched,
        ambiguous_rows=answer.ambiguous_rows,
        padding_rows=answer.padding_rows,
        pattern=answer.note or fact.pattern,
        order=answer.order if filled else "",
        regular=answer.regular,
        ascending=answer.ascending,
        rule="a buffer that models compute, by its name" if match == "derived" and by_name else "",
        digests=pending.digests if answer.unmatched or not answer.regular else {},
    )


def _constant(pending: Pending) -> int:
    """Count the elements in rows that are one constant, and therefore of anything."""
    return pending.constant_rows * pending.shape[-1]
