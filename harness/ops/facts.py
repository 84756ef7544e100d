"""What a worker does for a run of kind `operators`: what the model uses, each operator alone, contracts, the device.

Knows adapters and the suite; must not know limits. Facts are plain JSON: whether they may pass is decided elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from harness.adapter import Adapter, Inputs, Operator, capabilities, silent
from harness.devices import declared
from harness.errors import PortError, nearest
from harness.ops.arithmetic import parse_arithmetic
from harness.ops.contracts import contracts
from harness.ops.families import FAMILIES, SPECS
from harness.ops.needs import Seen, dtypes_of, family_of, watched
from harness.ops.offered import Offered
from harness.ops.runtime import runtime_facts
from harness.ops.suite import Result, library, operator_suite
from harness.ops.table import coverage, registered_over
from harness.ops.tuned import variants_of
from harness.types import Case, Facts, Setup

Beat = Callable[[str], None]


def operator_facts(adapter: Adapter, setup: Setup, case: Case, options: Mapping[str, Any], beat: Beat) -> Facts:
    """Return what operators the model uses, how each of them does alone, and who serves it.

    Options: `full`. Returns: `results` (one for each operator, variant and dtype), `coverage`, `contracts`, `runtime`,
    `arithmetic` as declared, `failed` (what the model raised when it was run to see what it uses), `seconds`.
    """
    begin, full = time.perf_counter(), bool(options.get("full"))
    prefill, decode, failed = seen_in(adapter, case, beat, setup.device)
    table: Mapping[str, str | Operator] = getattr(adapter, "operators", dict)()
    arithmetic = parse_arithmetic(declared(adapter, setup))
    wanted = prefill.families | (decode.families if decode else set()) if not failed else set(FAMILIES)
    over = {family_of(row["what"]) for row in registered_over(prefill, torch.device(setup.device).type)}
    offered = [*_library(wanted, setup.device, full, over), *own_operators(table)]
    plain = torch.device(setup.device).type == "cpu"
    dtypes = (getattr(torch, setup.dtype),) if plain and not full else dtypes_of(prefill, setup.dtype)
    results = operator_suite(
        offered, device=setup.device, dtypes=dtypes, arithmetic=arithmetic, full=full, beat=beat
    )  # fmt: skip
    beat("contracts of custom operators")
    levels = {name: op.level if isinstance(op, Operator) else op for name, op in table.items()}
    runtime = runtime_facts(setup.device, beat)
    return {
        "results": [_fact(r, needed=r.own or r.family in wanted) for r in results],
        "coverage": coverage(prefill, decode, setup.device, levels),
        "contracts": contracts(prefill),
        "runtime": runtime,
        "arithmetic": arithmetic.words(),
        "failed": failed,
        "seconds": time.perf_counter() - begin,
    }


def _fact(result: Result, *, needed: bool) -> dict[str, Any]:
    return {**result.facts(), "needed": needed}


def _library(wanted: set[str], device: str, full: bool, over: set[str]) -> list[Offered]:
    """Return torch's own operators of the families that the model uses; of all families in the full profile.

    Families in which somebody registered a kernel `over` torch's own are tried in all sizes. What the suite composes of
    several operators says nothing of the port, only of its device: not of a plain CPU.
    """
    plain = torch.device(device).type == "cpu"
    names = [n for n, s in SPECS.items() if full or (s.family in wanted and (s.plain or not plain))]
    return library(names, over)


def own_operators(table: Mapping[str, str | Operator]) -> list[Offered]:
    """Return what a port offers to be tested alone, each configuration of a kernel by itself.

    Raises PortError for a callable under a name that the suite does not have.
    """
    found = []
    for name, operator in table.items():
        if not isinstance(operator, Operator):
            continue
        if name not in SPECS:
            raise PortError(
                f"expected operators under names of the suite, found {name!r}{nearest(name, list(SPECS))}; "
                "give the level alone for others"
            )
        offered = Offered(name=name, call=operator.call, level=operator.level, own=True)
        found += variants_of(offered, operator.kernel, operator.variants)
    return found


def seen_in(adapter: Adapter, case: Case, beat: Beat, device: str = "cpu") -> tuple[Seen, Seen | None, str]:
    """Run one prefill and one decode step; return what they used, and what was raised instead, if anything.

    A compiled port is asked to run uncompiled: inside of compiled code no operator is seen.
    """
    beat("a forward, to see which operators it uses")
    found = capabilities(adapter)
    eager: Callable[[], AbstractContextManager[None]] = (
        adapter.uncompiled if "compiled" in found else nullcontext  # type: ignore[attr-defined]
    )
    prefill: Seen = Seen()
    decode: Seen | None = None
    try:
        inputs = adapter.prepare(case, silent)
        with eager():
            with watched(device=device) as prefill:
                adapter.forward(inputs, silent)
            decode = _one_step(adapter, inputs, device) if "phases" in found else None
    except Exception as error:  # the side under test may raise anything
        return prefill, decode, f"{type(error).__name__}: {error}"
    return prefill, decode, ""


def _one_step(adapter: Any, inputs: Inputs, device: str) -> Seen | None:
    length = inputs.token_ids.shape[-1]
    if length < 2:
        return None
    slot = adapter.open()
    try:
        adapter.step(slot, inputs, 0, length - 1, silent)
        with watched(keep=False, device=device) as seen:
            adapter.step(slot, inputs, length - 1, length, silent)
    finally:
        adapter.free(slot)
    return seen
