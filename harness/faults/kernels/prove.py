"""Exchanged kernels before the operator suite alone, scored by the shipped criteria. Knows rows, no limits."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from harness import gate
from harness.checklist import load_checklists
from harness.diagnose import explain
from harness.faults.bench import Row
from harness.faults.catalogue import Injection
from harness.faults.kernels.mode import Exchange, Exchanged
from harness.faults.kernels.table import EXCHANGES
from harness.ops.arithmetic import Arithmetic
from harness.ops.families import SPECS
from harness.ops.offered import Offered
from harness.ops.suite import operator_suite
from harness.stages.operators import OPERATOR_METRICS, operators_of
from harness.types import Finding, Run

NAME = "operators"
_RUN = Run(id="startup/operators", stage="startup", kind="operators")
_NOTHING: Mapping[str, Any] = {
    "contracts": [], "coverage": {"fallbacks": {}, "decode_counted": False}, "runtime": {"checks": {}},
}  # fmt: skip


def prove_kernels(injections: Iterable[Injection], say: Callable[[Row], None]) -> list[Row]:
    """Return a row for each exchanged kernel; `say` hears each as it ends."""
    rows = []
    for injection in injections:
        begin = time.perf_counter()
        row = replace(_row(injection, EXCHANGES[injection.name]), wall_s=time.perf_counter() - begin)
        rows.append(row)
        say(row)
    return rows


def _row(injection: Injection, exchange: Exchange) -> Row:
    made = Row(
        architecture=NAME, name=injection.name, id=injection.id, kind=injection.kind, says=injection.says,
        expected_stages=injection.stages, places=tuple(f"operators.{name}" for name in exchange.of), outcome="",
    )  # fmt: skip
    known = [name for name in exchange.of if name in SPECS]
    if not known:
        return replace(made, outcome="no place", note=f"this torch has none of {', '.join(exchange.of)}")
    mode = Exchanged(exchange)
    results = operator_suite(
        [_offered(name, mode) for name in known], device="cpu", dtypes=[getattr(torch, exchange.dtype)],
        arithmetic=Arithmetic(), full=False,
    )  # fmt: skip
    if not mode.hits:
        return replace(made, outcome="no place", note=f"{', '.join(known)} did not call {', '.join(exchange.kernels)}")
    broken, findings = _judged([{**r.facts(), "needed": True} for r in results])
    if not broken:
        return replace(made, outcome="missed" if injection.kind == "fault" else "accepted", moved=True)
    return _refused(made, injection, exchange, broken, findings)


def _refused(made: Row, injection: Injection, exchange: Exchange, broken: list[str], findings: list[Finding]) -> Row:
    first, fault = findings[0], injection.kind == "fault"
    told = f"{first.cause} {first.message} {' '.join(first.evidence)}"
    said = exchange.criterion in broken and any(word in told for word in injection.cause)
    return replace(
        made, outcome="detected" if fault else "alarmed", stage="startup", tap=first.tap, cause=first.cause, moved=True,
        message=first.message, criteria=tuple(broken), stage_right=True if fault else None,
        place_right=first.tap in made.places if fault else None, cause_right=said if fault else None,
    )  # fmt: skip


def _offered(name: str, mode: Exchanged) -> Offered:
    """Return the suite's operator as a device with the exchanged kernel would run it."""
    honest, exchange = SPECS[name].call, mode.exchange

    def own(*args: Any, **kwargs: Any) -> Any:
        mode.hits += 1
        return exchange.change(honest, *args, **kwargs)

    def exchanged(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return honest(*args, **kwargs)

    return Offered(name=name, call=exchanged if exchange.kernels else own, level="exchanged", own=True)


def _judged(results: list[dict[str, Any]]) -> tuple[list[str], list[Finding]]:
    """Return the blocking criteria that failed, and what is told of it."""
    criteria = [c for c in load_checklists().by_stage["startup"] if c.metric in OPERATOR_METRICS]
    found = operators_of(_RUN, {**_NOTHING, "results": results})
    verdicts, _ = gate.judge(
        criteria=criteria, measurements=found, in_scope=lambda _: "", today=datetime.date.today()
    )  # fmt: skip
    broken = [v.criterion.id for v in verdicts if v.criterion.blocking and v.status.value != "PASSED"]
    return broken, explain(gate.breaking(verdicts, found), modules={}, reproduce="") if broken else []
