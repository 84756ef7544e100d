"""Does memory hold what the checkpoint says? Knows runs and facts; must not know limits, files or how an audit is done.

Values are held against an independent decoder, weight by weight; the order in which rows were put together against the
order that the reference used for the parameter of the same name. Where nothing can vouch for an order, it is said so.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.checkpoint import checkpoint_facts
from harness.metrics.memory import peak_over_plan
from harness.precision.scheme import Precision, parse_precision
from harness.stages import StageContext, StageView, loss, measured
from harness.stages.content import CONTENT_METRICS, content_of, told
from harness.types import Failure, Measurement, Run, Trace

NAME = "load"
NEEDS: tuple[str, ...] = ()
LOAD, CONTENT, WEIGHTS = "load/load", "load/content", "load/weights"

_PORT_METRICS = ("load_peak_over_plan",)
_WEIGHT_METRICS = (
    "unused_tensors",
    "unfilled_parameters",
    "weight_mismatches",
    "provenance_mismatches",
    "nonfinite_weights",
    "untied_heads",
    "lossy_weight_rel_rms_error",
    "narrowed_parameters",
    "unchecked_orders",
    "undeclared_precision_share",
)
SMALL = 1e-5
"""Relative size below which two values of a table are one. Source: float32 powers differ by a few parts in 1e7."""


def plan(context: StageContext) -> list[Run]:
    """Return one load, one pass over the files, and one over the weights where the port can show them."""
    runs = [Run(id=LOAD, stage=NAME, kind="load"), Run(id=CONTENT, stage=NAME, kind="content")]
    if "weights" in context.capabilities:
        runs.append(Run(id=WEIGHTS, stage=NAME, kind="weights"))
    return runs


def measure(view: StageView) -> list[Measurement]:
    """Measure the checkpoint, the memory of the load, and every weight. Each metric has at least one measurement."""
    found: list[Measurement] = []
    for run in view.runs:
        accel = view.trace("accel", run.id)
        if not isinstance(accel, Trace):
            found += _lost(run, accel, Path(view.context.info.path))
        elif run.kind == "load":
            found += _load(run, accel)
        elif run.kind == "content":
            found += content_of(run, accel.facts)
        else:
            oracle = view.trace("oracle", run.id)
            expected = oracle.facts.get("audit") if isinstance(oracle, Trace) else None
            scope = view.context.scope
            beside = parse_precision(scope.precision)
            found += _weights(run, accel.facts["audit"], expected, image=scope.image, beside=beside)
            found += _tables(run, accel.facts, oracle.facts if isinstance(oracle, Trace) else {})
    return found


def _lost(run: Run, side: Failure | Trace | None, checkpoint: Path) -> list[Measurement]:
    """Measure what needs no port: a shard that is short explains more than a port that could not read it."""
    assert not isinstance(side, Trace)
    message = f"the port: {side.kind}: {side.message}" if side is not None else "the port has no trace of this run"
    metrics = {"load": _PORT_METRICS, "content": CONTENT_METRICS}.get(run.kind, _WEIGHT_METRICS)
    found = _headers(run, checkpoint_facts(checkpoint)) if run.kind == "load" else []
    detail = {"message": message, **loss(side)}
    return [*found, *(measured(NAME, run, m, None, "*", problem="error", detail=detail) for m in metrics)]


def _or_none_found(run: Run, metric: str, found: Sequence[Measurement], n: int, **detail: Any) -> list[Measurement]:
    """Return what was found, or one measurement of 0 over all n that were looked at."""
    return list(found) or [measured(NAME, run, metric, 0.0, "all", n=n, detail=detail)]


# --- the checkpoint and the load ---


def _load(run: Run, trace: Trace) -> list[Measurement]:
    return [*_headers(run, trace.facts["checkpoint"]), _memory(run, trace)]


def _headers(run: Run, facts: Mapping[str, Any]) -> list[Measurement]:
    strays = [p for p in facts["problems"] if p["kind"] == "stray_shard"]
    wrong = [p for p in facts["problems"] if p["kind"] != "stray_shard"]
    result = []
    for metric, problems in (
        ("index_problems", wrong),
        ("stray_shards", strays),
        ("undecodable_tensors", facts.get("undecodable", ())),
    ):
        found = [
            measured(NAME, run, metric, 1.0, p["name"] or p["file"], where={"kind": p["kind"]}, detail=told(p))
            for p in problems
        ]
        result += _or_none_found(run, metric, found, max(1, facts["tensors"]))
    return result


def _memory(run: Run, trace: Trace) -> Measurement:
    """Hold the peak of the load against the plan made from headers: a port does not set its own limit.

    One that says that its weights pass through a window is held to the plan of that window, which is the smaller one.
    """
    peak = trace.facts.get("peak_bytes")
    planned = trace.facts["checkpoint"].get("planned_bytes", {}).get(trace.setup.dtype)
    window = trace.facts.get("window_bytes")
    planned = min(planned, window) if planned and isinstance(window, int) and window > 0 else planned
    detail = {"peak_bytes": peak, "planned_bytes": planned, "ports_own_plan_bytes": trace.facts.get("planned_bytes")}
    if peak is None or not planned:
        message = f"expected the peak of the load and a plan for {trace.setup.dtype}, found {peak} and {planned} bytes"
        detail["message"] = message
        return measured(NAME, run, "load_peak_over_plan", None, "load", problem="missing", detail=detail)
    ratio = peak_over_plan(peak_bytes=peak, planned_bytes=planned) if peak else 0.0
    return measured(NAME, run, "load_peak_over_plan", ratio, "load", detail=detail)


# --- the weights ---


def _weights(
    run: Run, actual: Mapping[str, Any], expected: Mapping[str, Any] | None, *, image: bool, beside: Precision
) -> list[Measurement]:
    weights: list[Mapping[str, Any]] = actual["weights"]
    if not weights:
        message = "expected the port to show its weights, found none"
        return [
            measured(NAME, run, m, None, "*", problem="empty", detail={"message": message}) for m in _WEIGHT_METRICS
        ]  # fmt: skip
    reference = _Reference(expected, weights)
    found: dict[str, list[Measurement]] = {m: [] for m in _WEIGHT_METRICS}
    for order, weight in enumerate(weights):
        for m in _one_weight(run, weight, reference, order):
            found[m.metric].append(m)
    due = {w["due"]: order for order, w in enumerate(weights) if w["due"]}
    for m in (
        *_unused(run, actual, reference, due, image=image),
        *_named(run, "untied_heads", actual["untied"], _UNTIED),
    ):
        found[m.metric].append(m)
    for name, message in actual["errors"].items():
        value = measured(NAME, run, "weight_mismatches", None, name, problem="error", detail={"message": message})
        found["weight_mismatches"].append(value)
    for name in actual["unfilled"]:
        order = next((i for i, w in enumerate(weights) if w["name"] == name), 0)
        if not reference.vouches(weights[order]):
            message = _unfilled_words(weights[order])
            value = measured(NAME, run, "unfilled_parameters", 1.0, name, order=order, detail={"message": message})
            found["unfilled_parameters"].append(value)
    found["undeclared_precision_share"].append(_precision(run, weights, declared=actual["dtype"], beside=beside))
    looked_at = {"unused_tensors": actual["logical"], "weight_mismatches": actual["elements"]}
    detail = {"outside": actual["outside"], "vouched_by_reference_only": reference.vouched}
    return [
        m
        for metric in _WEIGHT_METRICS
        for m in _or_none_found(run, metric, found[metric], max(1, looked_at.get(metric, len(weights))), **detail)
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


def _tables(run: Run, actual: Mapping[str, Any], expected: Mapping[str, Any]) -> list[Measurement]:
    """Hold the port's own tables against the reference's, and look for what is suspicious in the reference itself."""
    ours, theirs = actual.get("tables", {}), expected.get("tables", {})
    wrong = []
    for name in sorted(set(ours) & set(theirs)):
        off = _furthest(ours[name], theirs[name])
        if not off <= SMALL:
            words = "; its values are those of bfloat16" if _narrow(ours[name]) else ""
            message = f"{name}: off by {off:.3g} of its size from the reference's{words}"
            wrong.append(measured(NAME, run, "table_mismatches", 1.0, name, detail={"message": message}))
    suspects = [
        measured(
            NAME, run, "suspect_reference", 1.0, name,
            detail={"message": f"{name}: the reference's own table holds values of bfloat16 only: it was rounded"},
        )
        for name in sorted(theirs) if _narrow(theirs[name])
    ]  # fmt: skip
    audit = expected.get("audit", {})
    for name in audit.get("unfilled", ()):
        message = f"{name}: the reference itself fills it from no checkpoint tensor"
        suspects.append(measured(NAME, run, "suspect_reference", 1.0, name, detail={"message": message}))
    return [
        *_or_none_found(run, "table_mismatches", wrong, max(1, len(ours))),
        *_or_none_found(run, "suspect_reference", suspects, max(1, len(theirs))),
    ]


def _furthest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest relative difference of two tables; infinite where they have different lengths."""
    if len(ours) != len(theirs):
        return math.inf
    return max((abs(a - b) / (abs(b) or 1.0) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def _narrow(table: Sequence[float]) -> bool:
    """Say whether a table of several values, not all powers of two, needs no more than bfloat16's 8 bits for any."""
    mantissas = [math.frexp(abs(x))[0] for x in table if x and math.isfinite(x)]
    telling = [m for m in mantissas if m != 0.5]
    return len(telling) >= 4 and all((m * 256).is_integer() for m in telling)


class _Reference:
    """What can vouch for a parameter: the reference's audit (none if it shows no weights), the port's own layers."""

    def __init__(self, audit: Mapping[str, Any] | None, port: Sequence[Mapping[str, Any]]) -> None:
        weights: Sequence[Mapping[str, Any]] = audit["weights"] if audit else ()
        self._by_name = {w["name"]: w for w in weights}
        self._by_source = {w["source"]: w for w in weights if w["source"] and w["match"] == "named"}
        self.partial: Mapping[str, Any] = audit["partial"] if audit else {}
        self.vouched: list[str] = []
        self._peers: dict[str, Counter[str]] = defaultdict(Counter)
        for w in port:
            if w["match"] == "content" and not w["unmatched"]:
                self._peers[_template(w["name"])][_layerless(w["order"])] += 1

    def odd_one_out(self, weight: Mapping[str, Any]) -> bool:
        """Say whether most layers of the port put this parameter together in one way, and this layer in another."""
        peers = self._peers[_template(weight["name"])]
        usual, count = peers.most_common(1)[0] if peers else ("", 0)
        return count >= 2 and 2 * count > peers.total() and _layerless(weight["order"]) != usual

    def of(self, weight: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the reference's parameter of the same name, else the one of the same checkpoint tensor."""
        return self._by_name.get(weight["name"]) or (
            self._by_source.get(weight["source"]) if weight["source"] else None
        )

    def vouches(self, weight: Mapping[str, Any]) -> bool:
        """Say whether the reference holds the very same values where the checkpoint explains neither.

        A loader may compute with what it reads; both sides are then equal to each other, and that is noted.
        """
        other = self._by_name.get(weight["name"])
        digest = weight["digests"].get(weight["dtype"])
        same = other is not None and digest is not None and other["digests"].get(weight["dtype"]) == digest
        if same and weight["name"] not in self.vouched:
            self.vouched.append(weight["name"])
        return same


def _one_weight(run: Run, w: Mapping[str, Any], reference: _Reference, order: int) -> Iterator[Measurement]:
    def one(metric: str, value: float, message: str) -> Measurement:
        detail = {
            k: w[k] for k in ("shape", "dtype", "match", "source", "max_ulp", "worst", "expected", "found", "pattern")
        }
        detail |= {"message": f"{w['name']}: {message}", "order": w["order"][:400]}
        return measured(NAME, run, metric, value, w["name"], order=order, detail=detail)

    if w["nonfinite"]:
        own = w["match"] in ("named", "raw") and not w["mismatches"]
        whose = "; the checkpoint itself holds them" if own else ""
        yield one("nonfinite_weights", w["nonfinite"], f"{w['nonfinite']} elements are NaN or infinite{whose}")
    if w["narrowed"]:
        yield one("narrowed_parameters", 1.0, f"stored in float32 as an exception, held in {w['dtype']}")
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


def _template(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _layerless(order: str) -> str:
    """Return an order without the number of the layer that its sources lie in."""
    return re.sub(r"\b(layers|blocks|h)\.\d+\.", r"\1.#.", order)


def _difference_words(w: Mapping[str, Any]) -> str:
    total = 1
    for size in w["shape"]:
        total *= size
    words = f"{w['unmatched']} of {total} elements differ from the checkpoint"
    if w["expected"]:
        words += f"; at {w['worst']} expected {w['expected']}, found {w['found']} ({w['max_ulp']:g} ulp)"
    if w["pattern"]:
        words += f"; memory holds {w['pattern']}"
    return words


def _order(w: Mapping[str, Any], reference: _Reference, one: Any) -> Iterator[Measurement]:
    """Say whether the rows are where they belong: as in the reference, else as names and numbers suggest."""
    other = reference.of(w)
    plain = w["match"] in ("named", "raw") and not w["mismatches"]
    if other is not None and other["order"] and w["order"] and not other["unmatched"]:
        same_shape = other["shape"] == w["shape"]
        if same_shape and _canonical(other["order"]) != _canonical(w["order"]):
            message = f"put together otherwise than the reference's {other['name']} ({_order_words(other['order'])})"
            yield one("provenance_mismatches", 1.0, message)
        elif not same_shape and not plain and not w["regular"]:
            yield one("unchecked_orders", 1.0, f"no reference of this shape; {_order_words(w['order'])}")
        return
    if plain:
        return
    if w["match"] == "named":
        yield one(
            "provenance_mismatches", 1.0, f"the rows of {w['source']} in another order: {_order_words(w['order'])}"
        )
    elif not w["ascending"]:
        yield one("provenance_mismatches", 1.0, f"numbered tensors in another order: {_order_words(w['order'])}")
    elif reference.odd_one_out(w):
        yield one(
            "provenance_mismatches", 1.0, f"put together otherwise than in most layers: {_order_words(w['order'])}"
        )
    elif _sources(w["order"]) > 1 or not w["regular"]:
        yield one("unchecked_orders", 1.0, f"no reference parameter of this name; {_order_words(w['order'])}")


def _order_words(order: str) -> str:
    """Return an order as a person reads it: `rows 0-63 of q_proj.weight, rows 0-15 of k_proj.weight`."""
    value = json.loads(order)
    runs = [run for stream in value.get("streams", []) for run in stream]
    if not runs:
        return str(value.get("how") or value.get("joined") or order[:120])
    parts = [f"rows {start}-{start + count - 1} of {source or 'nothing known'}" for source, start, count in runs[:4]]
    more = [f"{len(runs) - 4} more"] if len(runs) > 4 else []
    return ", ".join([*parts, *more]) + (", transposed" if value.get("transposed") else "")


def _canonical(order: str) -> Any:
    """Return an order for comparison: a reshape keeps the order of the elements."""
    value = json.loads(order)
    return {"how": "same"} if value.get("how") in ("reshape", "padded") else value


def _sources(order: str) -> int:
    value = json.loads(order)
    runs = [r for stream in value.get("streams", [value.get("joined", [])]) for r in stream]
    return len({r[0] for r in runs})


def _unfilled_words(w: Mapping[str, Any]) -> str:
    words = f"{w['name']} {w['shape']} comes from no checkpoint tensor"
    if w["due"]:
        words += f"; {w['due']} should fill it, and is used nowhere"
    return words + (f"; memory holds {w['pattern']}" if w["pattern"] else "")


def _unused(
    run: Run, actual: Mapping[str, Any], reference: _Reference, due: Mapping[str, int], *, image: bool
) -> Iterator[Measurement]:
    """Tell each unused tensor, after the parameter that it should have filled or, if that is not known, after all."""
    last = len(actual["weights"]) + 1
    vision = [n for n, reason in actual["outside"].items() if reason == "vision" and image]
    for name in (*actual["unused"], *vision):
        message = f"{name} is in the checkpoint, and no weight in memory comes from it"
        yield measured(
            NAME, run, "unused_tensors", 1.0, name, order=due.get(name, last) + 1, where={"part": "whole"},
            detail={"message": message},
        )  # fmt: skip
    for name, (hit, rows) in actual["partial"].items():
        if reference.partial.get(name) == [hit, rows]:
            continue
        message = f"{rows - hit} of {rows} rows of {name} are nowhere in memory"
        yield measured(
            NAME, run, "unused_tensors", 1.0, name, order=last, where={"part": "some rows"}, detail={"message": message}
        )  # fmt: skip
