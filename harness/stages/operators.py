"""What the operator suite showed, as measurements of the startup stage. Must not know limits or how a suite is run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.stages import measured
from harness.types import Measurement, Run

NAME = "startup"
SPAN = 1000
"""More than the suite has operators: the measurements of one run come before those of the next one."""
FIRST = 2
"""Wrong operators that are told before what the shadow found of the same on the model's own inputs; the rest later."""
COPIES = "copies"
"""The family that others go through where they read or write a view: it is to blame before them."""
BESIDE = "only when it writes to a place that it is given"
"""The pattern of an operator that is right by itself."""
COUNTS = {
    "op_wrong_indices": "wrong_indices",
    "op_nonfinite_mismatches": "nonfinite",
    "op_neighbours_changed": "neighbours",
    "op_inputs_changed": "inputs_changed",
    "op_not_repeatable": "not_repeated",
}
OPERATOR_METRICS = ("op_error_ratio", *COUNTS, "op_refusals", "op_contract_failures", "op_host_fallbacks")


def operators_of(run: Run, facts: Mapping[str, Any]) -> list[Measurement]:
    """Return how each operator that the model uses does alone; each metric has at least one measurement."""
    judged = sorted((r for r in facts["results"] if r["needed"]), key=lambda r: (r["family"] != COPIES, _follows(r)))
    orders = _orders(judged)
    found = [_error(run, r, order) for order, r in zip(orders, judged, strict=True)]
    if not found:
        message = "no operator of the model has a family in the suite, and the port offers none to be tested alone"
        found = [measured(NAME, run, "op_error_ratio", None, "operators", problem="empty", detail={"message": message})]
    for metric, key in COUNTS.items():
        wrong = [
            measured(NAME, run, metric, r["counts"][key], _subject(r), order=order, n=r["cases"], where=_where(r),
                     detail=_told(r))
            for order, r in zip(orders, judged, strict=True) if r["counts"][key]
        ]  # fmt: skip
        found += wrong or [measured(NAME, run, metric, 0, "operators", n=max(1, len(judged)))]
    found += _refusals(run, judged)
    return [*found, *_contracts(run, facts["contracts"]), _fallbacks(run, facts["coverage"]), *_runtime(run, facts)]


def coverage_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the coverage table for a report, with how each tested operator did alone."""
    alone = [
        {
            "operator": r["operator"] + (f" ({r['variant']})" if r["variant"] else ""), "dtype": r["dtype"],
            "level": r["level"], "cases": r["cases"], "ratio": max(r["error_ratio"], r["rms_ratio"]),
            "needed": r["needed"], "own": r["own"], "right": not r["wrong_cases"], "pattern": r["pattern"],
        }
        for r in facts["results"]
    ]  # fmt: skip
    keys = ("arithmetic", "failed", "contracts", "runtime", "seconds")
    return {**facts["coverage"], "alone": alone, **{k: facts[k] for k in keys}}


def _orders(judged: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return for each operator its place among findings: of those under one name only the first counts."""
    wrong = list(dict.fromkeys(_subject(r) for r in judged if r["wrong_cases"]))
    later = 2 * SPAN + SPAN // 2  # behind the runs of the shadow
    return [order + (later if _subject(r) in wrong[FIRST:] else 0) for order, r in enumerate(judged)]


def _follows(result: Mapping[str, Any]) -> bool:
    """Say whether an operator is wrong only where it writes to a given place: through a copy, which comes first."""
    return bool(result["wrong_cases"]) and result["pattern"] == BESIDE


def _subject(result: Mapping[str, Any]) -> str:
    variant = f"[{result['variant']}]" if result["variant"] else ""
    return f"operators.{result['operator']}{variant}"


def _where(result: Mapping[str, Any]) -> dict[str, Any]:
    return {key: result[key] for key in ("dtype", "level", "family")}


def _told(result: Mapping[str, Any]) -> dict[str, Any]:
    if not result["wrong_cases"] and not result["counts"]["not_repeated"]:
        return {}
    message = result["message"].replace("\n  ", "; ")
    return {"message": message, "pattern": result["pattern"], "source": result["source"]}


def _error(run: Run, result: Mapping[str, Any], order: int) -> Measurement:
    """Return the largest error over what rounding allows, of single values or of their root mean square."""
    value: float | None = max(result["error_ratio"], result["rms_ratio"])
    problem = ""
    if result["raised"] == result["cases"]:
        value, problem = None, "error"
    elif min(result["error_ratio"], result["rms_ratio"]) < 0:
        value = math.inf
    return measured(
        NAME, run, "op_error_ratio", value, _subject(result), order=order, n=max(1, result["elements"]),
        problem=problem, where=_where(result), detail=_told(result),
    )  # fmt: skip


def _refusals(run: Run, judged: Sequence[Mapping[str, Any]]) -> list[Measurement]:
    """Count the inputs that an operator declines aloud, though it takes others: nothing is computed wrongly there."""
    some = [(order, r) for order, r in enumerate(judged) if 0 < r["raised"] < r["cases"]]
    found = [
        measured(NAME, run, "op_refusals", r["raised"], _subject(r), order=order, n=r["cases"], where=_where(r),
                 detail=_told(r))
        for order, r in some
    ]  # fmt: skip
    return found or [measured(NAME, run, "op_refusals", 0, "operators", n=max(1, len(judged)))]


def _contracts(run: Run, contracts: list[Mapping[str, Any]]) -> Iterator[Measurement]:
    broken = [c for c in contracts if c["failures"]]
    for c in broken:
        detail = {"message": "; ".join(c["failures"])}
        yield measured(NAME, run, "op_contract_failures", len(c["failures"]), c["operator"], detail=detail)
    if not broken:
        yield measured(NAME, run, "op_contract_failures", 0, "operators", n=max(1, len(contracts)))


def _fallbacks(run: Run, coverage: Mapping[str, Any]) -> Measurement:
    """Count the calls that run on the host in one decode step (in one prefill, where there is no decode)."""
    fallbacks = coverage["fallbacks"]
    told = ", ".join(f"{name} {count} times" for name, count in sorted(fallbacks.items(), key=lambda x: -x[1])[:6])
    phase = "decode step" if coverage["decode_counted"] else "prefill"
    detail = {"message": f"on the host in one {phase}: {told}"} if told else {}
    return measured(NAME, run, "op_host_fallbacks", sum(fallbacks.values()), "operators", detail=detail)


def _runtime(run: Run, facts: Mapping[str, Any]) -> Iterator[Measurement]:
    for name, problem in facts["runtime"]["checks"].items():
        detail = {"message": problem} if problem else {}
        yield measured(NAME, run, "runtime_problems", 1 if problem else 0, f"runtime.{name}", detail=detail)
