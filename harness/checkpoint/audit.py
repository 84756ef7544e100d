"""Hold the weights in memory against the checkpoint, one by one. Knows checkpoints and `Weight`; no limits.

A weight is compared with the checkpoint tensor that it names, else with the one of the same name. What was merged,
fused or renamed is recognised by content: rows of the decoded checkpoint tensors, and the order they were put together
in. The result is plain JSON facts; whether an order is right is for a stage to say, which sees the reference's too.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harness.adapter import Weight
from harness.checkpoint.causes import UNRELATED, causes_of
from harness.checkpoint.container import Checkpoint
from harness.checkpoint.content import Pending, explain
from harness.checkpoint.formats import Logical, decode, logical_tensors
from harness.checkpoint.near import Near, beyond_a_step
from harness.checkpoint.paired import pairs
from harness.checkpoint.values import Difference, difference, nonfinite, rounded_digests
from harness.errors import CheckpointError
from harness.precision.scheme import Precision

_DERIVED = re.compile(r"(^|[._])(inv_freq|position_ids|cos_cached|sin_cached|num_batches_tracked|causal_mask)\b")
_VISION = re.compile(r"(^|\.)(visual|vision\w*|image\w*|multi_modal_projector|mm_projector|patch_embed\w*)(\.|$)")
_LAYER = re.compile(r"(^|\.)(?:layers|blocks|h)\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFact:
    """What is known of one weight in memory. Counts are elements unless they say otherwise.

    `match`: named (compared with `source`), raw (stored bytes as they are), content (made of checkpoint rows), derived
    (a buffer that is computed) or none. `mismatches` are elements that differ from the named tensor; `unmatched` those
    that come from no checkpoint row either, `pattern` what they look like. `order` is where the rows come from, as
    JSON; `regular` says whether sources are whole and numbered ascending, `ascending` the latter alone. `due` is the
    tensor that an unfilled weight should have come from, as far as that is clear. `narrowed`: stored in float32 as an
    exception, held narrower.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    match: str
    source: str = ""
    claimed: bool = False
    lossless: bool = True
    mismatches: int = 0
    unmatched: int = 0
    max_ulp: float = 0.0
    worst: tuple[int, ...] = ()
    expected: str = ""
    found: str = ""
    relative_error: str = ""
    pattern: str = ""
    nonfinite: int = 0
    padding_rows: int = 0
    ambiguous_rows: int = 0
    order: str = ""
    due: str = ""
    regular: bool = True
    ascending: bool = True
    narrowed: bool = False
    digests: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Audit:
    """The state of one pass over the weights."""

    checkpoint: Checkpoint
    logicals: dict[str, Logical]
    suffixes: dict[str, str | None]
    owners: dict[str, str]
    float32_is_rare: bool
    near: Near | None = None
    facts: list[WeightFact] = field(default_factory=list)
    pending: list[tuple[int, Pending]] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    raw_used: set[str] = field(default_factory=set)
    errors: dict[str, str] = field(default_factory=dict)


def audit_weights(
    checkpoint: Checkpoint,
    weights: Iterable[Weight],
    *,
    tied: bool,
    dtype: torch.dtype | str,
    declared: Precision | None = None,
) -> dict[str, Any]:
    """Compare every weight that memory holds with the checkpoint, and say what was never used or never filled.

    `tied`: the configuration says that the output head is the embedding. `dtype` is the port's.
    `declared`: what it declares beside it; a weight in a declared format may lie within its step of the checkpoint's.
    Weights are consumed one at a time and not kept.

    Returns:
        JSON facts: `weights` (WeightFact), `unused`, `partial`, `outside`, `unfilled`, `errors`, `untied`, counts.
    """
    logicals = {x.name: x for x in logical_tensors(checkpoint)}
    owners = {part: x.name for x in logicals.values() for part in (*x.parts.values(), *x.extra)}
    audit = _Audit(
        checkpoint=checkpoint,
        logicals=logicals,
        suffixes=_suffix_index(logicals),
        owners=owners,
        float32_is_rare=_float32_is_rare(checkpoint),
        near=Near(checkpoint, logicals.values(), declared) if declared is not None and declared.weights else None,
    )
    for weight in weights:
        _take(audit, weight)
    partial = _explain_pending(audit)
    _pair_the_rest(audit)
    return _summary(audit, partial, tied=tied, dtype=str(dtype).removeprefix("torch."))


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


def _resolve(audit: _Audit, weight: Weight) -> tuple[str, bool]:
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


def _take(audit: _Audit, weight: Weight) -> None:
    """Judge one weight by name; put it aside for a search by content where that does not settle it."""
    held = weight.tensor.detach().to("cpu")
    fact = WeightFact(
        name=weight.name,
        shape=tuple(held.shape),
        dtype=str(held.dtype).removeprefix("torch."),
        match="none",
        claimed=bool(weight.checkpoint),
        lossless=weight.lossless,
        nonfinite=nonfinite(held),
    )
    raw = next((n for n in (weight.checkpoint, weight.name) if n in audit.owners), "")
    if raw and _is_raw(audit, raw, held):
        stored = audit.checkpoint.read(raw)
        wrong = int((stored.contiguous().view(torch.uint8) != held.contiguous().view(torch.uint8)).sum())
        audit.raw_used.add(raw)
        audit.facts.append(dataclasses.replace(fact, match="raw", source=raw, mismatches=wrong, unmatched=wrong))
        return
    source, certain = _resolve(audit, weight)
    settled = False
    if source and source not in audit.errors:
        fact, settled = _by_name(audit, fact, held, source, certain)
    audit.facts.append(fact)
    if not settled and held.numel():
        held = audit.near.restored(weight.name, held) if audit.near is not None else held
        audit.pending.append((len(audit.facts) - 1, Pending.of(held)))


def _is_raw(audit: _Audit, name: str, held: Tensor) -> bool:
    """Say whether memory holds a part of a quantised weight in the very form it is stored in."""
    ref, logical = audit.checkpoint.tensors[name], audit.logicals[audit.owners[name]]
    if not logical.quantised or tuple(held.shape) != ref.shape:
        return False
    same = held.element_size() * held.numel() == ref.nbytes
    return same and (held.element_size() == 1 or not held.is_floating_point() or name != logical.parts.get("weight"))


def _by_name(audit: _Audit, fact: WeightFact, held: Tensor, source: str, certain: bool) -> tuple[WeightFact, bool]:
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
        return fact, False
    narrow = held.is_floating_point() and held.element_size() < 4
    wider = logical.format == "plain" and logical.dtype in ("F32", "F64") and narrow
    # One rounding to the held dtype is allowed for anyway: a half-precision copy of float32 is not lossy beyond it.
    fact = dataclasses.replace(fact, lossless=fact.lossless or wider)
    narrowed = logical.format == "plain" and logical.dtype == "F32" and narrow and audit.float32_is_rare
    fact = _with_difference(dataclasses.replace(fact, match="named", source=source, narrowed=narrowed), diff, held)
    if diff.mismatches and diff.how in ("same", "reshape"):
        fact = dataclasses.replace(fact, pattern=_cause(audit, held, expected.reshape(held.shape), logical))
    lossy_ok = not fact.lossless and diff.how in ("same", "reshape")
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


def _with_difference(fact: WeightFact, diff: Difference, held: Tensor) -> WeightFact:
    return dataclasses.replace(
        fact,
        mismatches=diff.mismatches,
        unmatched=diff.mismatches,
        max_ulp=diff.max_ulp if diff.max_ulp != float("inf") else 1e300,
        worst=diff.worst,
        expected=repr(diff.expected) if diff.mismatches else "",
        found=repr(diff.found) if diff.mismatches else "",
        relative_error=repr(diff.relative_error) if diff.mismatches else "",
        padding_rows=diff.padding_rows,
        order=json.dumps({"how": diff.how}) if diff.how != "shape" else "",
        digests=rounded_digests(held) if diff.mismatches else {},
    )


def _cause(audit: _Audit, held: Tensor, expected: Tensor, logical: Logical) -> str:
    """Return what memory holds instead, in words; "" where nothing is known of it."""
    parts = {role: audit.checkpoint.read(name) for role, name in logical.parts.items()} if logical.quantised else None
    found = causes_of(held=held, expected=expected, logical=logical, parts=parts)
    return found.words if found is not None else ""


def _explain_pending(audit: _Audit) -> dict[str, tuple[int, int]]:
    """Look for the content of what no name settled. Returns the sources of which only some rows were used."""
    if not audit.pending:
        return {}
    first = [x for x in audit.logicals.values() if x.name not in audit.used]
    second = [x for x in audit.logicals.values() if x.name in audit.used]
    found = explain(audit.checkpoint, [p for _, p in audit.pending], first, second, audit.errors)
    for (at, pending), answer in zip(audit.pending, found.answers, strict=True):
        fact = audit.facts[at]
        named = fact.match == "named"
        all_found = answer.unmatched == 0
        # By name, the smaller of the two counts stands: a few wrong elements are not a row's worth of them.
        keeps = named and not all_found and fact.mismatches <= answer.unmatched
        if keeps:
            audit.used.add(fact.source)
            continue
        filled = answer.unmatched * 2 <= pending.numel
        audit.facts[at] = dataclasses.replace(
            fact,
            match=fact.match if named else "content" if filled else "derived" if _DERIVED.search(fact.name) else "none",
            unmatched=answer.unmatched,
            ambiguous_rows=answer.ambiguous_rows,
            order=answer.order if filled else "",
            regular=answer.regular,
            ascending=answer.ascending,
            digests=pending.digests if answer.unmatched or not answer.regular else {},
        )
        if named and not filled:
            audit.used.add(fact.source)  # its name was found and its values are wrong: that is told by `mismatches`
    _attribute_gaps(audit, set(found.hits))
    audit.raw_used |= {n for n, (hit, rows) in found.hits.items() if n in audit.owners and hit == rows}
    audit.used |= {n for n in found.hits if n in audit.logicals}
    damaged = {n for f in audit.facts if f.match == "content" and f.unmatched for n in _order_sources(f.order)}
    return {
        n: (hit, rows)
        for n, (hit, rows) in found.hits.items()
        if hit < rows and n in audit.logicals and n not in damaged
    }


def _pair_the_rest(audit: _Audit) -> None:
    """Compare what no name and no content settled with the tensor that its siblings in other layers came from."""
    pending = dict(audit.pending)
    unfilled = {f.name: i for i, f in enumerate(audit.facts) if f.match == "none" and not f.source and i in pending}
    unused = {
        x.name: x.shape for x in audit.logicals.values() if x.name not in audit.used and x.name not in audit.errors
    }  # fmt: skip
    known = [(f.name, source) for f in audit.facts if (source := _only_source(f))]
    for name, source in pairs({n: audit.facts[i].shape for n, i in unfilled.items()}, known, unused).items():
        at = unfilled[name]
        fact = dataclasses.replace(audit.facts[at], due=source)
        held, logical = pending[at].small, audit.logicals[source]
        if held is not None and held.numel() == logical.numel:
            expected = decode(audit.checkpoint, logical, widen=False)
            held = held.reshape(expected.shape)
            pattern = _cause(audit, held, expected, logical)
            if not pattern.startswith(UNRELATED):
                fact = dataclasses.replace(fact, match="named", source=source)
                fact = _with_difference(fact, difference(actual=held, expected=expected), held)
                audit.used.add(source)
            fact = dataclasses.replace(fact, pattern=pattern)
        audit.facts[at] = fact


def _only_source(fact: WeightFact) -> str:
    """Return the one tensor that a weight was filled from whole, or an empty string."""
    if fact.match == "named" and not fact.mismatches:
        return fact.source
    sources = _order_sources(fact.order) if fact.match == "content" and not fact.unmatched else set()
    return next(iter(sources)) if len(sources) == 1 else ""


def _order_runs(order: str) -> list[list[Any]]:
    """Return the runs [source, start, count] of an order, all streams in one list."""
    value = json.loads(order) if order else {}
    return [run for stream in value.get("streams", []) for run in stream]


def _order_sources(order: str) -> set[str]:
    return {str(run[0]) for run in _order_runs(order)} - {""}


def _attribute_gaps(audit: _Audit, hit: set[str]) -> None:
    """Give rows that match nothing to the one tensor that is missing there among its numbered siblings.

    A damaged expert inside a stack is then told by its values, and not as a tensor that nobody loaded.
    """
    taken = audit.used | hit
    for at, fact in enumerate(audit.facts):
        if fact.match != "content" or not fact.unmatched:
            continue
        templates = {re.sub(r"\d+", "#", s) for s in _order_sources(fact.order)}
        gaps = sorted(int(count) for source, _, count in _order_runs(fact.order) if source == "")
        absent = [
            x
            for x in audit.logicals.values()
            if x.name not in taken and re.sub(r"\d+", "#", x.name) in templates and _same_place(x.name, fact)
        ]
        if absent and sum(gaps) == sum(x.numel // max(1, x.shape[-1]) for x in absent):
            taken |= {x.name for x in absent}
            audit.used |= {x.name for x in absent}
            audit.facts[at] = dataclasses.replace(fact, source=", ".join(x.name for x in absent))


def _same_place(name: str, fact: WeightFact) -> bool:
    """Say whether a tensor lies in the layer that the sources of a fact lie in."""
    layers = {m.group(2) if (m := _LAYER.search(s)) else "" for s in _order_sources(fact.order)}
    found = _LAYER.search(name)
    return (found.group(2) if found else "") in layers


def _summary(audit: _Audit, partial: dict[str, tuple[int, int]], *, tied: bool, dtype: str) -> dict[str, Any]:
    unused, outside = [], {}
    for logical in audit.logicals.values():
        if logical.name in audit.used or (logical.quantised and set(logical.parts.values()) <= audit.raw_used):
            continue
        reason = _outside(audit, logical, tied=tied)
        if reason:
            outside[logical.name] = reason
        elif not logical.problem:
            unused.append(logical.name)
    trimmed = {
        n: f"{rows - hit} rows beyond the vocabulary" for n, (hit, rows) in partial.items() if _trimmed(audit, n, hit)
    }
    outside.update(trimmed)
    errors = dict(audit.errors)
    errors.update({x.name: x.problem for x in audit.logicals.values() if x.problem})
    named = {f.source for f in audit.facts if f.match == "named"}  # what differs there is told by `mismatches`
    return {
        "dtype": dtype,
        "weights": [json.loads(json.dumps(dataclasses.asdict(f), allow_nan=False)) for f in audit.facts],
        "logical": len(audit.logicals),
        "elements": sum(torch.Size(f.shape).numel() for f in audit.facts),
        "unused": unused,
        "partial": {n: list(rows) for n, rows in partial.items() if n not in named | trimmed.keys()},
        "outside": outside,
        "unfilled": [f.name for f in audit.facts if f.match == "none" and not f.source],
        "untied": _untied(audit, tied=tied),
        "tied": tied,
        "errors": errors,
    }


def _trimmed(audit: _Audit, name: str, rows: int) -> bool:
    """Say whether memory holds the first rows of a tensor, as many as the configuration calls a vocabulary size."""
    config = audit.checkpoint.config
    text = config.get("text_config")
    sizes = {
        v
        for c in (config, text if isinstance(text, dict) else {})
        for k, v in c.items()
        if "vocab_size" in k and isinstance(v, int)
    }
    return rows in sizes and any(_order_runs(f.order) == [[name, 0, rows]] for f in audit.facts)


def _outside(audit: _Audit, logical: Logical, *, tied: bool) -> str:
    """Say why a checkpoint tensor may rest unused, or return an empty string."""
    if _DERIVED.search(logical.name):
        return "a buffer that is computed"
    config = audit.checkpoint.config
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    layers = text.get("num_hidden_layers") if isinstance(text, dict) else None
    layer = _LAYER.search(logical.name)
    if re.search(r"(^|\.)mtp(\.|_|$)", logical.name):
        return "multi-token prediction"
    if is_vision(logical.name):
        return "vision"
    if layer and isinstance(layers, int) and int(layer.group(2)) >= layers:
        return f"layer {layer.group(2)} is beyond the model's {layers} (multi-token prediction)"
    if tied and len(logical.shape) == 2 and is_head(logical.name):
        return "an output head that the configuration ties to the embedding"
    return ""


def is_head(name: str) -> bool:
    """Say whether a tensor is the output head, by its name."""
    return re.search(r"(^|\.)(lm_head|output|head)\.weight$", name) is not None


def is_vision(name: str) -> bool:
    """Say whether a checkpoint tensor belongs to a vision tower or its projector, by its name."""
    return _VISION.search(name) is not None


def _untied(audit: _Audit, *, tied: bool) -> list[str]:
    """Name the parameters that look like an output head without a source: shaped as the only [vocab, hidden] tensor."""
    vocabulary = [x.shape for x in audit.logicals.values() if len(x.shape) == 2 and "embed" in x.name]
    if not tied and any(is_head(n) for n in audit.logicals):
        return []
    bad = [f for f in audit.facts if f.match == "none" and not f.source and f.shape in vocabulary]
    return [f.name for f in bad]
