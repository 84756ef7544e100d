"""Hold one weight against the checkpoint tensor of its name, or stored bytes. Knows names and decoders; no port.

What no name settles is put aside, to be looked for by content.
"""

from __future__ import annotations

import dataclasses
import json

import torch
from torch import Tensor

from harness.adapter import Weight
from harness.checkpoint.causes import UNRELATED, pair_of
from harness.checkpoint.fact import WeightFact
from harness.checkpoint.formats import Logical, decode, decode_parts
from harness.checkpoint.ledger import KEPT, Ledger
from harness.checkpoint.near import Near, beyond_a_step
from harness.checkpoint.pending import Pending
from harness.checkpoint.place import place_of
from harness.checkpoint.reasons import reason
from harness.checkpoint.rules import rule_of
from harness.checkpoint.values import Difference, difference, in_source_shape, nonfinite, rounded_digests
from harness.errors import CheckpointError


def _resolve(audit: Ledger, weight: Weight) -> tuple[str, bool]:
    """Return the logical name that a weight belongs to by name ("" if none), and whether that is certain."""
    for name in (weight.checkpoint, weight.name):
        if name and name in audit.logicals:
            return name, True
        if name and name + ".weight" in audit.logicals:
            return name + ".weight", True
    parts = weight.name.split(".")
    for i in range(max(1, len(parts) - 1)):
        found = audit.suffixes.get(".".join(parts[i:]))
        if found:
            return found, False
    return "", False


def take(audit: Ledger, weight: Weight) -> None:
    """Judge one weight by name; put it aside for a search by content where that does not settle it."""
    held = weight.tensor.detach().to("cpu")
    fact = WeightFact(
        name=weight.name,
        shape=tuple(held.shape),
        dtype=str(held.dtype).removeprefix("torch."),
        match="none",
        claimed=bool(weight.checkpoint),
        computed=weight.computed,
        lossless=weight.lossless,
        nonfinite=nonfinite(held),
    )
    if weight.computed and (rule := rule_of(held, audit.checkpoint.config)):
        audit.facts.append(
            dataclasses.replace(fact, match="derived", rule=rule, nonfinite=0, digests=rounded_digests(held))
        )
        return
    raw = next((n for n in (weight.checkpoint, weight.name) if n in audit.owners), "")
    if raw and _is_raw(audit, raw, held):
        stored = audit.checkpoint.read(raw)
        audit.raw_used.add(raw)
        audit.facts.append(_as_stored(audit, fact, raw, held, stored))
        return
    source, certain = _resolve(audit, weight)
    settled = False
    if source and source not in audit.errors:
        fact, settled = _by_name(audit, fact, held, source, certain)
    audit.facts.append(fact)
    if not settled and held.numel():
        held = audit.near.restored(weight.name, held) if audit.near is not None else held
        pending = Pending.of(held, keep=audit.kept < KEPT)
        audit.kept += pending.small.nbytes if pending.small is not None else 0
        audit.pending.append((len(audit.facts) - 1, pending))


def _as_stored(audit: Ledger, fact: WeightFact, name: str, held: Tensor, stored: Tensor) -> WeightFact:
    """Compare codes or scales byte by byte."""
    fact = dataclasses.replace(fact, match="raw", source=name)
    ours, theirs = (t.contiguous().flatten().view(torch.uint8) for t in (held, stored))
    wrong = ours != theirs
    count = int(wrong.sum())
    if not count:
        return fact
    ref, byte = audit.checkpoint.tensors[name], int(wrong.int().argmax())
    first = torch.unravel_index(torch.tensor(byte // stored.element_size()), held.shape)
    return dataclasses.replace(
        fact, mismatches=count, unmatched=count, file=ref.file, offset=ref.begin + byte,
        first=tuple(int(i) for i in first), expected=f"byte {int(theirs[byte])}", found=f"byte {int(ours[byte])}",
        pattern=_cause_of_part(audit, name, held),
    )  # fmt: skip


def _cause_of_part(audit: Ledger, name: str, held: Tensor) -> str:
    """Return what a weight reads as with the codes or scales that memory holds, in words; "" if as nothing known."""
    logical = audit.logicals[audit.owners[name]]
    role = next((role for role, part in logical.parts.items() if part == name), "")
    parts = audit.parts(logical)
    if not role or parts is None or logical.problem:
        return ""
    expected = decode_parts(logical, parts)
    value = decode_parts(logical, {**parts, role: held.contiguous().view(parts[role].dtype)})
    return reason(audit, logical, pair_of(value, expected)) if value.shape == expected.shape else ""


def _is_raw(audit: Ledger, name: str, held: Tensor) -> bool:
    """Say whether memory holds a part of a quantised weight in the very form it is stored in."""
    ref, logical = audit.checkpoint.tensors[name], audit.logicals[audit.owners[name]]
    if not logical.quantised or tuple(held.shape) != ref.shape:
        return False
    same = held.element_size() * held.numel() == ref.nbytes
    return same and (held.element_size() == 1 or not held.is_floating_point() or name != logical.parts.get("weight"))


def _by_name(audit: Ledger, fact: WeightFact, held: Tensor, source: str, certain: bool) -> tuple[WeightFact, bool]:
    """Compare with the tensor of that name. Returns the fact, and whether no search by content is needed."""
    logical = audit.logicals[source]
    try:
        expected = decode(audit.checkpoint, logical, widen=False)
    except CheckpointError as error:
        audit.errors[source] = str(error)
        return dataclasses.replace(fact, match="none", source=source), True
    # Two scales may be multiplied in either order; every other format has one rounding and no freedom.
    slack = 2 if logical.format.startswith("nvfp4") else 0
    diff = difference(actual=held, expected=expected, slack_roundings=slack)
    if diff.mismatches and audit.near is not None:
        diff = _within_a_step(audit.near, fact.name, diff, held, expected)
    if diff.mismatches and not certain:
        audit.guesses[fact.name] = source
        return fact, False
    narrow = held.is_floating_point() and held.element_size() < 4
    wider = logical.format == "plain" and logical.dtype in ("F32", "F64") and narrow
    # One rounding to the held dtype is allowed for anyway: a half-precision copy of float32 is not lossy beyond it.
    fact = dataclasses.replace(fact, lossless=fact.lossless or wider)
    narrowed = logical.format == "plain" and logical.dtype == "F32" and narrow and audit.float32_is_rare
    fact = dataclasses.replace(fact, match="named", source=source, narrowed=narrowed)
    fact = with_difference(audit, fact, logical, diff, held, expected)
    lossy_ok = not fact.lossless and diff.how != "shape"
    if not diff.mismatches or lossy_ok:
        audit.used.add(source)
        return fact, True
    return fact, False


def _within_a_step(near: Near, name: str, diff: Difference, held: Tensor, expected: Tensor) -> Difference:
    """Return a difference of which only what lies beyond a step of the declared format counts."""
    scheme = near.declared.weights
    if scheme is None or near.declared.keeps(name) or diff.how != "same" or not held.is_floating_point():
        return diff
    count = int(beyond_a_step(held, expected, scheme).sum())
    return dataclasses.replace(diff, mismatches=count) if count else Difference(how="same", mismatches=0)


def with_difference(
    audit: Ledger, fact: WeightFact, logical: Logical, diff: Difference, held: Tensor, expected: Tensor
) -> WeightFact:
    """Return a fact with the difference from its source: counts, places in memory and on disk, and the cause."""
    fact = dataclasses.replace(
        fact,
        mismatches=diff.mismatches,
        unmatched=diff.mismatches,
        padding_rows=diff.padding_rows,
        order=json.dumps({"how": diff.how}) if diff.how != "shape" else "",
    )
    if not diff.mismatches:
        return fact
    file, offset = place_of(audit.checkpoint, logical, diff.first_flat)
    return dataclasses.replace(
        fact,
        max_ulp=diff.max_ulp if diff.max_ulp != float("inf") else 1e300,
        worst=diff.worst,
        first=diff.first,
        first_row=diff.first_flat // max(1, expected.shape[-1] if expected.dim() else 1),
        file=file,
        offset=offset,
        expected=repr(diff.expected),
        found=repr(diff.found),
        relative_error=repr(diff.relative_error),
        pattern=_cause(audit, logical, diff, held, expected),
        digests=rounded_digests(held),
    )


def _cause(audit: Ledger, logical: Logical, diff: Difference, held: Tensor, expected: Tensor) -> str:
    """Return what memory holds instead, in words; "" where nothing is known of it."""
    if diff.how == "shape":
        return ""
    value = in_source_shape(held, expected.shape, diff.how)
    words = reason(audit, logical, pair_of(value, expected))
    square = value.dim() >= 2 and value.shape[-1] == value.shape[-2] > 1
    if square and (not words or words.startswith(UNRELATED) or "none of them" in words or "permutation" in words):
        # No shape tells whether a square is held with its axes exchanged, as many ports hold theirs.
        turned = reason(audit, logical, pair_of(value.transpose(-1, -2), expected))
        if turned and not turned.startswith(UNRELATED) and "none of them" not in turned:
            return f"{turned}; its axes are exchanged"
    return words
