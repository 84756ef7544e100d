"""What an audit of weights shows, as measurements of the load stage. Knows facts; must not know limits or files.

Values are held against an independent decoder, weight by weight; the order in which rows were put together against the
order that the reference used for the parameter of the same name. Where nothing can vouch for an order, it is said so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.checkpoint.summary import is_head
from harness.precision.scheme import Precision
from harness.stages import measured
from harness.stages.orders import (
    ascending,
    canonical,
    exchanged_words,
    foreign_words,
    layerless,
    odd_turn,
    order_words,
    sources,
)
from harness.stages.vouching import Reference
from harness.types import Measurement, Run

NAME = "load"
WEIGHT_METRICS = (
    "unused_tensors",
    "unfilled_parameters",
    "weight_mismatches",
    "provenance_mismatches",
    "nonfinite_weights",
    "untied_heads",
    "lossy_weight_rel_rms_error",
    "narrowed_parameters",
    "unchecked_orders",
    "unexplained_buffers",
    "undeclared_precision_share",
)
_TOLD = (
    "shape", "dtype", "match", "source", "file", "offset", "first", "max_ulp", "worst", "expected", "found", "pattern",
)  # fmt: skip
"""What a measurement keeps of a fact."""


def or_none_found(run: Run, metric: str, found: Sequence[Measurement], n: int, **detail: Any) -> list[Measurement]:
    """Return what was found, or one measurement of 0 over all n that were looked at."""
    return list(found) or [measured(NAME, run, metric, 0.0, "all", n=n, detail=detail)]


def weights_of(
    run: Run,
    actual: Mapping[str, Any],
    expected: Mapping[str, Any] | None,
    *,
    image: bool,
    beside: Precision,
    said: Mapping[str, Any] | None = None,
) -> list[Measurement]:
    """Measure every weight that an audit tells of, `expected` being the reference's audit, if it shows its weights.

    `said`: what the port's own loader reports of the load (`unused`, `unfilled`); it proves nothing.
    """
    weights: list[Mapping[str, Any]] = actual["weights"]
    if not weights:
        message = "expected the port to show its weights, found none"
        return [
            measured(NAME, run, m, None, "*", problem="empty", detail={"message": message}) for m in WEIGHT_METRICS
        ]  # fmt: skip
    reference = Reference(expected, weights)
    found: dict[str, list[Measurement]] = {m: [] for m in WEIGHT_METRICS}
    for order, weight in enumerate(weights):
        for m in _one_weight(run, weight, reference, order):
            found[m.metric].append(m)
    due = {w["due"]: order for order, w in enumerate(weights) if w["due"]}
    for m in (
        *_unused(run, actual, reference, due, image=image, said=said),
        *_named(run, "untied_heads", actual["untied"], _UNTIED),
    ):
        found[m.metric].append(m)
    for name, message in actual["errors"].items():
        value = measured(NAME, run, "weight_mismatches", None, name, problem="error", detail={"message": message})
        found["weight_mismatches"].append(value)
    places = {w["name"]: i for i, w in reversed(list(enumerate(weights)))}
    for name in actual["unfilled"]:
        w = weights[places[name]]
        if not reference.vouches(w):
            message = _unfilled_words(w) + _own_report(name, said, "unfilled")
            detail = {**{k: w[k] for k in _TOLD}, "message": message}
            value = measured(NAME, run, "unfilled_parameters", 1.0, name, order=places[name], detail=detail)
            found["unfilled_parameters"].append(value)
    found["undeclared_precision_share"].append(_precision(run, weights, declared=actual["dtype"], beside=beside))
    looked_at = {"unused_tensors": actual["logical"], "weight_mismatches": actual["elements"]}
    detail = {"outside": actual["outside"], "vouched_by_reference_only": reference.vouched}
    return [
        m
        for metric in WEIGHT_METRICS
        for m in or_none_found(run, metric, found[metric], max(1, looked_at.get(metric, len(weights))), **detail)
    ]


def _precision(run: Run, weights: Sequence[Mapping[str, Any]], *, declared: str, beside: Precision) -> Measurement:
    """Measure which share of the elements is held in another of the common precisions than the declared one.

    What is in a declared format of its own is shown multiplied out, in whatever dtype, and is left out here.
    """
    held: Counter[str] = Counter()
    for weight in weights:
        if beside.weights is not None and not beside.keeps(weight["name"]) and len(weight["shape"]) > 1:
            continue
        held[weight["dtype"]] += math.prod(weight["shape"])
    common = {d: n for d, n in held.items() if d in ("float64", "float32", "bfloat16", "float16")}
    total = sum(common.values())
    share = 1 - common.get(declared, 0) / total if total else 0.0
    words = ", ".join(f"{n / max(1, held.total()):.0%} {dtype}" for dtype, n in held.most_common())
    return measured(
        NAME, run, "undeclared_precision_share", share, "all", n=max(1, total),
        detail={"message": f"declared {declared}, held: {words}"},
    )  # fmt: skip


_UNTIED = "the configuration ties the output head to the embedding, but memory holds something else here"


def _named(run: Run, metric: str, names: Sequence[str], why: str) -> Iterator[Measurement]:
    for name in names:
        yield measured(NAME, run, metric, 1.0, name, detail={"message": f"{name}: {why}"})


def _one_weight(run: Run, w: Mapping[str, Any], reference: Reference, order: int) -> Iterator[Measurement]:
    def one(metric: str, value: float, message: str, pattern: str = "") -> Measurement:
        detail = {k: w[k] for k in _TOLD}
        if pattern:
            detail["pattern"] = pattern
            message += f"; memory holds {pattern}"
        detail |= {"message": f"{w['name']}: {message}", "order": w["order"][:400]}
        return measured(NAME, run, metric, value, w["name"], order=order, detail=detail)

    if w["nonfinite"]:
        own = w["match"] in ("named", "raw", "content") and not w["unmatched"]
        pattern = "what the checkpoint's own bytes give: the file is damaged, or was written so" if own else ""
        yield one("nonfinite_weights", w["nonfinite"], f"{w['nonfinite']} elements are NaN or infinite", pattern)
    if w["narrowed"]:
        yield one("narrowed_parameters", 1.0, f"stored in float32 as an exception, held in {w['dtype']}")
    if w["computed"] and w["match"] == "derived":
        if not w["rule"] and not reference.vouches(w):
            yield one("unexplained_buffers", 1.0, f"{w['shape']} comes from no tensor, and no rule explains it")
        return
    if w["match"] == "none":
        return
    lossy = not w["lossless"] and w["mismatches"] and w["relative_error"]
    if lossy:
        error = float(w["relative_error"])
        yield one("lossy_weight_rel_rms_error", error, f"declared narrower than the checkpoint, off by {error:.3g}")
    elif w["unmatched"] and not reference.vouches(w):
        yield one("weight_mismatches", w["unmatched"], _difference_words(w))
    elif not w["unmatched"]:
        yield from _order(w, reference, one)


def _difference_words(w: Mapping[str, Any]) -> str:
    words = f"{w['unmatched']} of {math.prod(w['shape'])} elements differ from the checkpoint"
    if w["first"]:
        words += f"; first at {w['first']}{_on_disk(w)}"
    if w["expected"]:
        words += f"; at {w['worst']} expected {w['expected']}, found {w['found']}"
        words += f" ({w['max_ulp']:g} ulp)" if w["max_ulp"] else ""
    if w["pattern"]:
        words += f"; memory holds {w['pattern']}"
    return words


def _on_disk(w: Mapping[str, Any]) -> str:
    """Say where an element belongs in the checkpoint: tensor, row, file and byte."""
    if not w["file"]:
        return ""
    sources = str(w["source"]).split(", ")
    row = f"row {w['first_row']} of " if w["first_row"] is not None else ""
    return f", {row}{sources[0]}, byte {w['offset']} of {w['file']}"


def _order(w: Mapping[str, Any], reference: Reference, one: Any) -> Iterator[Measurement]:
    """Say whether the rows are where they belong: as in the reference, else as names and numbers suggest."""
    other = reference.of(w)
    plain = w["match"] in ("named", "raw") and not w["mismatches"]
    if other is not None and other["order"] and w["order"] and not other["unmatched"]:
        same_shape = other["shape"] == w["shape"]
        if same_shape and canonical(other["order"]) != canonical(w["order"]):
            message = f"put together otherwise than the reference's {other['name']} ({order_words(other['order'])})"
            words = _foreign(w) or exchanged_words(w["order"], other["order"]) or w["pattern"]
            yield one("provenance_mismatches", 1.0, message, words)
        elif not same_shape and not plain and not w["regular"]:
            yield one("unchecked_orders", 1.0, f"no reference of this shape; {order_words(w['order'])}")
        return
    if plain:
        return
    words = order_words(w["order"])
    if w["match"] == "named":
        foreign = _foreign(w)
        message = f"other rows than those of {w['source']}: {words}" if foreign else ""
        message = message or f"the rows of {w['source']} in another order: {words}"
        yield one("provenance_mismatches", 1.0, message, foreign or w["pattern"])
    elif not w["ascending"]:
        pattern = exchanged_words(w["order"], ascending(w["order"]))
        yield one("provenance_mismatches", 1.0, f"numbered tensors in another order: {words}", pattern)
    elif reference.odd_one_out(w):
        pattern = exchanged_words(layerless(w["order"]), reference.usual(w))
        yield one("provenance_mismatches", 1.0, f"put together otherwise than in most layers: {words}", pattern)
    elif odd := odd_turn(w["order"]):
        yield one("provenance_mismatches", 1.0, f"numbered parts that are not all alike: {words}", odd)
    elif sources(w["order"]) > 1 or not w["regular"]:
        yield one("unchecked_orders", 1.0, f"no reference parameter of this name; {order_words(w['order'])}")


def _foreign(w: Mapping[str, Any]) -> str:
    """Return what a weight under its tensor's name holds of another tensor, in words; "" if nothing."""
    if w["match"] != "named" or w["unmatched"]:
        return ""
    return foreign_words(w["order"], w["source"], head=is_head(w["name"]) or is_head(w["source"]))


def _unfilled_words(w: Mapping[str, Any]) -> str:
    words = f"{w['name']} {w['shape']} comes from no checkpoint tensor"
    if w["due"]:
        words += f"; {w['due']} should fill it, and is used nowhere"
        words += f" (byte {w['offset']} of {w['file']})" if w["file"] else ""
    return words + (f"; memory holds {w['pattern']}" if w["pattern"] else "")


def _own_report(name: str, said: Mapping[str, Any] | None, kind: str) -> str:
    """Say whether the port's own loader reports the same, where it reports such a thing at all."""
    if said is None or kind not in said:
        return ""
    if name in said[kind]:
        return "; the port's own loader reports it too"
    return "; the port's own loader does not report it"


def _held_twice(name: str, weights: Sequence[Mapping[str, Any]]) -> str:
    """Say which weights hold the same part of a tensor, where one of them should hold another part."""
    holders: dict[str, str] = {}
    for w in weights:
        if f'"{name}"' in w["order"] or f'"{name}[' in w["order"]:
            if w["order"] in holders:
                part = order_words(w["order"])
                return f"; {holders[w['order']]} and {w['name']} hold the same ones ({part}): another rank's slice"
            holders[w["order"]] = w["name"]
    return ""


def _unused(
    run: Run,
    actual: Mapping[str, Any],
    reference: Reference,
    due: Mapping[str, int],
    *,
    image: bool,
    said: Mapping[str, Any] | None,
) -> Iterator[Measurement]:
    """Tell each unused tensor, after the parameter that it should have filled or, if that is not known, after all."""
    last = len(actual["weights"]) + 1
    vision = [n for n, reason in actual["outside"].items() if reason == "vision" and image]
    for name in (*actual["unused"], *vision):
        message = f"{name} is in the checkpoint, and no weight in memory comes from it"
        message += _own_report(name, said, "unused")
        yield measured(
            NAME, run, "unused_tensors", 1.0, name, order=due.get(name, last) + 1, where={"part": "whole"},
            detail={"message": message},
        )  # fmt: skip
    for name, (hit, rows) in actual["partial"].items():
        if reference.partial.get(name) == [hit, rows]:
            continue
        message = f"{rows - hit} of {rows} rows (or slices of rows) of {name} are nowhere in memory"
        message += _held_twice(name, actual["weights"])
        yield measured(
            NAME, run, "unused_tensors", 1.0, name, order=last, where={"part": "some rows"}, detail={"message": message}
        )  # fmt: skip
