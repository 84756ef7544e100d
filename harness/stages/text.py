"""The text stage: layers in isolation and together, phases, greedy tokens, the observer. Must not know limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness.cases import seeded_ids, text_case
from harness.compare import idle_experts
from harness.compare.subject import measured
from harness.metrics.distributions import greedy_margin_z
from harness.metrics.real import max_abs_error
from harness.stages import StageContext, StageView
from harness.stages.compiled import compiled_pairs, eager_runs
from harness.stages.exercised import exercised
from harness.stages.replays import free_and_replays, measure_runs, phase, spans_of
from harness.types import Case, Failure, Measurement, Run, Trace

NAME = "text"
NEEDS: tuple[str, ...] = ("text",)
LENGTH, LONG = 61, 211
"""Prompt lengths in tokens: primes, so that no chunk, page or tile ends with them."""
DECODE_STEPS, DECODE_STEPS_FULL = 16, 48
"""Single steps that are pooled. Source: fewer than 16 honestly reach a ratio of 2."""
TOKENS_PER_EXPERT = 2
"""Tokens that an expert is judged on at least. Source: slopes are fitted jointly, so one would do; two are a check."""
DRAFTS = 3
"""Tokens that are guessed before each step of a generation that is speculated."""
BEYOND = 16
"""Tokens beyond what a selection keeps."""
BESIDE = (7, 83)
"""Prompt lengths in tokens of the requests that are decoded beside another one."""
REACH, REACH_FULL = 257, 1025
"""Longest prompt, in tokens, that the search for all experts may make."""


def plan(context: StageContext) -> list[Run]:
    """Plan the runs of one seeded prompt (and of a longer one in the full profile), or of the recorded requests."""
    recorded = context.options.get("cases", ())
    if recorded:
        suffixes = ["", *(f"-{number}" for number in range(2, len(recorded) + 1))]
        pairs = zip(recorded, suffixes, strict=True)
        return [run for case, suffix in pairs for run in free_and_replays(context, NAME, case, suffix=suffix)]
    case = text_case(context.info, _fit(context, _length(context)), seed=1)
    runs = _one_case(context, case, "")
    if context.full and _fit(context, LONG) > LENGTH:
        runs += _one_case(context, text_case(context.info, _fit(context, LONG), seed=2), "-long")
    if context.info.experts:
        runs += _reaching(context, case)
    if "compiled" in context.capabilities:
        runs += eager_runs(context, NAME, case)
    if "float32" in context.scope.precisions:
        runs += _one_case(context, case, "-float32", dtype="float32")
    runs += [
        Run(id=f"text/{name}", stage=NAME, kind="forward", case=case, observe=False) for name in ("plain", "plain2")
    ]
    shorter = _shorter(context, case)
    runs.append(Run(id="text/generate", stage=NAME, kind="generate", case=shorter, observe=True))
    if "drafts" in context.capabilities:
        options = {"drafts": DRAFTS}
        runs.append(Run(id="text/speculated", stage=NAME, kind="generate", case=shorter, observe=True, options=options))
    return runs


def _length(context: StageContext) -> int:
    """Return the prompt's length: prime, and beyond what a selection keeps, so that it has to drop something."""
    kept = [edge for name, edge in context.info.edges.items() if "topk" in name and edge + BEYOND <= REACH]
    first = max([LENGTH, *(edge + BEYOND for edge in kept)])
    return next(n for n in range(first, 2 * first) if all(n % k for k in range(2, int(n**0.5) + 1)))


def _fit(context: StageContext, length: int) -> int:
    return min(length, context.scope.max_length_tokens, context.info.max_length_tokens)


def _shorter(context: StageContext, case: Case) -> Case:
    """Return a prompt that leaves room for what is generated."""
    room = _fit(context, LENGTH + case.max_new_tokens) - case.max_new_tokens
    return text_case(context.info, max(1, min(23, room)), seed=3, max_new_tokens=case.max_new_tokens)


def _reaching(context: StageContext, case: Case) -> list[Run]:
    """Plan a search for a longer prompt that reaches every expert, and the runs of what it finds."""
    options = {
        "tokens_per_expert": TOKENS_PER_EXPERT,
        "max_tokens": _fit(context, REACH_FULL if context.full else REACH),
    }
    search = Run(id="text/search", stage=NAME, kind="search", case=case, options=options)
    found = replace(case, id=f"{case.id}-reach", source=f"search:{search.id}")
    free, _, _, leaves = free_and_replays(context, NAME, found, suffix="-reach")
    return [search, free, leaves]


def _one_case(context: StageContext, case: Case, suffix: str, dtype: str = "") -> list[Run]:
    runs = free_and_replays(context, NAME, case, suffix=suffix, dtype=dtype)
    length = len(case.token_ids or ())
    if "phases" in context.capabilities and length >= 8:
        first = max(1, length - (DECODE_STEPS_FULL if context.full else DECODE_STEPS))
        other = seeded_ids(context.info, max(2, length // 2 + 6), seed=77)
        steps = [(0, first), *((i, i + 1) for i in range(first, length))]
        chunks = spans_of(length, [length * 2 // 5, length * 2 // 3])
        again = spans_of(length, [length * 2 // 7])
        runs += [
            phase(context, NAME, "chunked", case, chunks, suffix=suffix, dtype=dtype),
            phase(context, NAME, "decode", case, steps, suffix=suffix, compare_from=first, dtype=dtype),
            phase(context, NAME, "second", case, again, suffix=suffix, before=other, dtype=dtype),
        ]
        runs += _shared(context, case, steps, suffix=suffix, dtype=dtype)
    return runs


def _shared(
    context: StageContext, case: Case, steps: Sequence[tuple[int, int]], *, suffix: str, dtype: str
) -> list[Run]:
    """Plan the walks of a request that shares a cache, where the port can; two of them in the steps of decode."""
    info, count, runs = context.info, len(steps) - 1, []
    sizes = [max(count + 1, _fit(context, count + length)) for length in BESIDE]
    others = [list(seeded_ids(info, size, seed=78 + size)) for size in sizes]
    same: dict[str, Any] = {"suffix": suffix, "dtype": dtype}
    if "resumes" in context.capabilities:
        walk: dict[str, Any] = {"walk": "prefix", "other": others[0][:3]}
        length = len(case.token_ids or ())
        shared = min(length * 2 // 3 | 1, length - 2)  # odd: pages have even lengths
        spans = spans_of(length, [length * 2 // 5, shared, max(shared + 1, length * 5 // 6)])
        runs.append(phase(context, NAME, "prefix", case, spans, compare_from=spans[-2][0], walk=walk, **same))
    first = steps[0][1]
    if "rewinds" in context.capabilities:
        walk = {"walk": "rewound", "other": others[0][:3]}
        runs.append(phase(context, NAME, "rewound", case, steps, compare_from=first, walk=walk, **same))
    if "batches" in context.capabilities:
        walk = {"walk": "together", "others": others}
        runs.append(phase(context, NAME, "together", case, steps, compare_from=first, walk=walk, **same))
    return runs


def measure(view: StageView) -> list[Measurement]:
    """Compare every run with the oracle, then greedy tokens, then runs with and without taps."""
    found = measure_runs(view, NAME, view.runs)
    for run in view.runs:
        if run.kind == "generate":
            found.append(_greedy(view, run))
    free = [r for r in view.runs if r.kind == "forward" and not r.level and not r.dtype and r.observe]
    oracles = [t for r in free if isinstance(t := view.trace("oracle", r.id), Trace)]
    if oracles:
        experts = view.context.info.experts
        found += idle_experts(NAME, free[0], oracles, experts=experts, need=TOKENS_PER_EXPERT)
    found += compiled_pairs(view, NAME)
    found += exercised(view, NAME)
    if any(not run.observe for run in view.runs):
        found += [_repeated(view), _observer(view)]
    return found


def _greedy(view: StageView, run: Run) -> Measurement:
    """Weigh the first differing greedy token by the floor's logit error on the oracle's text, at its worst token.

    A route or a selection may flip at any token, so the mean token's error says little of this one.
    """
    oracle, accel, floor = (view.trace(role, run.id) for role in ("oracle", "accel", "floor"))
    for who, trace in (("the oracle", oracle), ("the port", accel)):
        if not isinstance(trace, Trace) or "token_ids" not in trace.facts:
            return _lost(run, "greedy_margin_z", who, trace)
    assert isinstance(oracle, Trace)
    assert isinstance(accel, Trace)
    if "logits" not in oracle.tensors:
        return _lost(run, "greedy_margin_z", "the oracle's logits", None)
    expected, actual = [int(i) for i in oracle.facts["token_ids"]], [int(i) for i in accel.facts["token_ids"]]
    logits = _matrix(oracle.tensors["logits"])
    start = logits.shape[0] - len(expected) - 1
    other = _matrix(floor.tensors["logits"]) if isinstance(floor, Trace) and "logits" in floor.tensors else None
    rounding = logits.to(getattr(torch, view.context.dtype))
    error = (other if other is not None and other.shape == logits.shape else rounding).double() - logits.double()
    worst = float(error.square().mean(dim=-1).sqrt().max())
    z, place = greedy_margin_z(actual=actual, expected=expected, logits=logits[start:], uncertainty=worst)
    detail = {"expected": expected, "actual": actual, "agreeing_tokens": place}
    detail |= {name: accel.facts[name] for name in ("drafted", "accepted") if name in accel.facts}
    return measured(
        NAME, run, "greedy_margin_z", z, subject="logits", order=1 << 20, n=len(expected), where={"step": place},
        detail=detail,
    )  # fmt: skip


def _repeated(view: StageView) -> Measurement:
    """Weigh what two equal runs without taps differ by against the floor's error; bit-equal ones read 0."""
    run = next(r for r in view.runs if r.id == "text/plain")
    found = _logits_of(view, "accel", "text/plain", "text/plain2")
    if isinstance(found, str):
        return _lost(run, "repeat_ratio", found, view.trace("accel", found))
    plain, again = found
    if plain.shape != again.shape:
        return _lost(run, "repeat_ratio", "logits of one shape twice", None)
    honest = _honest_error(view, plain)
    if honest is None:
        return _lost(run, "repeat_ratio", "the oracle's logits", view.trace("oracle", "text/free"))
    apart = (again.double() - plain.double()).norm(dim=-1)
    apart = torch.where((again == plain).all(dim=-1), 0.0, apart)  # an infinity twice is no difference
    value = float(apart.norm()) / float(honest.norm()) if bool((apart != 0).any()) else 0.0
    tokens = int((apart != 0).sum())
    message = f"two equal runs differ at {tokens} of {len(apart)} tokens, first at {int((apart != 0).int().argmax())}"
    return measured(
        NAME, run, "repeat_ratio", value, subject="logits", order=1 << 20, n=len(apart),
        detail={"message": message, "tokens": tokens} if tokens else {"tokens": 0},
    )  # fmt: skip


def _honest_error(view: StageView, like: Tensor) -> Tensor | None:
    """Return the floor's error of the free run's logits by token, never below one rounding; None without an oracle."""
    oracle = _logits_of(view, "oracle", "text/free")
    if isinstance(oracle, str):
        return None
    expected = oracle[0].double()
    error = (expected.to(getattr(torch, view.context.dtype)).double() - expected).norm(dim=-1)
    floor = _logits_of(view, "floor", "text/free")
    if not isinstance(floor, str) and floor[0].shape == expected.shape:
        error = torch.maximum(error, (floor[0].double() - expected).norm(dim=-1))
    return error if len(error) == len(like) else None


def _logits_of(view: StageView, role: str, *runs: str) -> list[Tensor] | str:
    """Return the logits of some runs of a role as matrices, or the first run that has none."""
    found = []
    for name in runs:
        trace = view.trace(role, name)
        if not isinstance(trace, Trace) or "logits" not in trace.tensors:
            return name
        found.append(_matrix(trace.tensors["logits"]))
    return found


def _observer(view: StageView) -> Measurement:
    """Count logits that taps changed, beyond what two runs without taps differ by, and never beyond the floor's error.

    A port that never gives the same twice must not hide behind that.
    """
    run = next(r for r in view.runs if r.id == "text/plain")
    logits = _logits_of(view, "accel", "text/free", "text/plain", "text/plain2")
    if isinstance(logits, str):
        return _lost(run, "taps_change_logits", logits, view.trace("accel", logits))
    seen, plain, again = logits
    if not seen.shape == plain.shape == again.shape:
        return _lost(run, "taps_change_logits", "logits of one shape with and without taps", None)
    finite = plain.isfinite() & again.isfinite()  # what is not finite is told where it arises, not blamed on the taps
    spread = max_abs_error(actual=again[finite], expected=plain[finite]) if bool(finite.any()) else 0.0
    honest = _honest_error(view, plain)
    if spread and honest is not None:
        spread = min(spread, float(honest.max()))
    beyond = (seen.double() - plain.double()).abs() > spread
    uneven = (seen.isfinite() != plain.isfinite()) | (again.isfinite() != plain.isfinite())
    changed = int((beyond | uneven).sum())
    return measured(
        NAME, run, "taps_change_logits", changed, subject="logits", order=1 << 20, n=plain.numel(),
        detail={"spread": spread},
    )  # fmt: skip


def _matrix(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.shape[-1])


def _lost(run: Run, metric: str, who: str, trace: Trace | Failure | None) -> Measurement:
    why = f"{trace.kind}: {trace.message}" if isinstance(trace, Failure) else "not recorded"
    return measured(NAME, run, metric, None, subject="logits", problem="error", detail={"message": f"{who}: {why}"})
