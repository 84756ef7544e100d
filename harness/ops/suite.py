"""All operators on one device, each alone, as facts. Knows the suite and what a port offers; must not know limits.

`check` is for one operator that somebody hands over; `operator_suite` for those of a device and of a port.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.errors import UsageError, nearest
from harness.ops.arithmetic import Arithmetic
from harness.ops.case import Case, Spec
from harness.ops.families import SPECS
from harness.ops.hold import Outcome
from harness.ops.judge import run_case
from harness.ops.offered import Offered
from harness.ops.patterns import pattern
from harness.ops.tuned import variants_of

COUNTS = ("wrong_indices", "nonfinite", "neighbours", "inputs_changed", "not_repeated")
CPU_SIZES = frozenset({1, 7, 17, 33, 65, 129, 1025})
"""Widths that the quick profile tries of what torch itself has on a plain CPU."""
MANY = frozenset({"many rows", "many", "tall"})
"""Contents that launch grids of a device are tried with."""
FIRST = 3
"""Wrong cases that are told one by one."""


@dataclass(slots=True, kw_only=True)
class Result:
    """What all cases of one implementation in one dtype showed. `pattern` says what the wrong ones share."""

    operator: str
    family: str
    dtype: str
    device: str
    level: str
    variant: str = ""
    own: bool = False
    source: str = ""
    cases: int = 0
    elements: int = 0
    error_ratio: float = 0.0
    rms_ratio: float = 0.0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    raised: int = 0
    wrong_cases: int = 0
    pattern: str = ""
    told: list[str] = field(default_factory=list)

    @property
    def bad(self) -> bool:
        """Say whether anything beyond a budget was seen, noise between two equal calls aside."""
        return self.wrong_cases > 0

    def words(self) -> str:
        """Return the result as a report would say it."""
        name = f"{self.operator}{f' ({self.variant})' if self.variant else ''} in {self.dtype} on {self.device}"
        if not self.bad:
            worst = max(self.error_ratio, self.rms_ratio)
            return f"{name}: right in {self.cases} cases, at most {worst:.2f} of its budget"
        told = "".join(f"\n  {line}" for line in self.told)
        shared = f", {self.pattern}" if self.pattern else ""
        return f"{name}: {self.wrong_cases} of {self.cases} cases wrong{shared}{told}"

    def facts(self) -> dict[str, Any]:
        """Return the result as plain JSON; an error that is not finite is -1."""
        finite = {k: v if math.isfinite(v) else -1.0 for k, v in self._ratios().items()}
        rest = {k: getattr(self, k) for k in self.__slots__ if k not in finite}  # type: ignore[attr-defined]
        return {**rest, **finite, "message": self.words()}

    def _ratios(self) -> dict[str, float]:
        return {"error_ratio": self.error_ratio, "rms_ratio": self.rms_ratio}


def check(
    name: str,
    call: Callable[..., Any] | None = None,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    arithmetic: Arithmetic | None = None,
    full: bool = True,
    kernel: Any = None,
) -> list[Result]:
    """Judge one operator on a device: `call`, or what torch has there; each configuration of a tuned `kernel`.

    Raises UsageError for a name that the suite does not have.
    """
    spec = _spec(name)
    offered = Offered(name=name, call=call or spec.call, level="own" if call else "library", own=call is not None)
    return [
        _result(spec, o, device=device, dtype=dtype, arithmetic=arithmetic or Arithmetic(), full=full)
        for o in variants_of(offered, kernel)
    ]


def _spec(name: str) -> Spec:
    if name not in SPECS:
        raise UsageError(f"expected an operator of the suite, found {name!r}{nearest(name, list(SPECS))}")
    return SPECS[name]


def library(names: Iterable[str], thorough: Container[str] = ()) -> list[Offered]:
    """Return what torch has on any device: one call each, or composed of several; `thorough` names families."""
    return [
        Offered(
            name=n, call=SPECS[n].call, level="library" if SPECS[n].plain else "composed",
            thorough=SPECS[n].family in thorough,
        )
        for n in names
    ]  # fmt: skip


def operator_suite(
    offered: Sequence[Offered],
    *,
    device: str,
    dtypes: Sequence[torch.dtype],
    arithmetic: Arithmetic,
    full: bool,
    beat: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Judge implementations one after the other, in each dtype."""
    found = []
    for dtype in dtypes:
        for each in offered:
            beat(f"operator {each.name} in {_named(dtype)}")
            found.append(_result(_spec(each.name), each, device=device, dtype=dtype, arithmetic=arithmetic, full=full))
    return found


def _result(
    spec: Spec, offered: Offered, *, device: str, dtype: torch.dtype, arithmetic: Arithmetic, full: bool
) -> Result:
    """Run all cases of one implementation; more of them, in other sizes, where some are wrong."""
    result = Result(
        operator=spec.name, family=spec.family, dtype=_named(dtype), device=device, level=offered.level,
        variant=offered.variant, own=offered.own, source=spec.source,
    )  # fmt: skip
    into = spec.into is not None and not offered.own

    def run(case: Case, *, into: bool = False) -> Outcome:
        return run_case(
            spec, case, offered.call, device=device, dtype=dtype, arithmetic=arithmetic, into=into, repeat=not into
        )

    cases = [c for c in spec.cases(full) if full or _worth(c, device, thorough=offered.own or offered.thorough)]
    outcomes = [run(case) for case in cases]
    dense = [case for case in cases if case.content in ("normal", "large")][: 64 if full else 3]
    beside = [run(case, into=True) for case in dense] if into else []
    for outcome in (*outcomes, *beside):
        _add(result, outcome)
    if result.bad:
        words = pattern(outcomes, lambda case: run(case).bad)
        only_beside = not any(o.bad for o in outcomes)
        result.pattern = "only when it writes to a place that it is given" if only_beside else words
        wrong = [o for o in (*outcomes, *beside) if o.bad]
        result.told = [f"{o.given}: {_told(o)}" for o in wrong[:FIRST]]
    return result


def _worth(case: Case, device: str, *, thorough: bool) -> bool:
    """Say whether the quick profile tries a case: of the library on a plain CPU few sizes, and no launch grids."""
    if torch.device(device).type != "cpu" or thorough:
        return True
    return case.content not in MANY and (case.content != "normal" or case.size in CPU_SIZES)


def _add(result: Result, outcome: Outcome) -> None:
    result.cases += 1
    result.elements += outcome.elements
    result.wrong_cases += outcome.bad
    result.raised += bool(outcome.raised)
    result.error_ratio = max(result.error_ratio, outcome.error_ratio)
    result.rms_ratio = max(result.rms_ratio, outcome.rms_ratio)
    for name in COUNTS:
        result.counts[name] += getattr(outcome, name)


def _told(outcome: Outcome) -> str:
    parts = [outcome.words] if outcome.words else []
    if outcome.neighbours:
        parts.append(f"{outcome.neighbours} elements beside the output were overwritten")
    if outcome.inputs_changed:
        parts.append(f"{outcome.inputs_changed} elements of the inputs' memory were changed")
    if outcome.error_ratio > 1 and math.isfinite(outcome.error_ratio):
        parts.append(f"{outcome.error_ratio:.3g} times the error that rounding allows")
    return "; ".join(parts)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
