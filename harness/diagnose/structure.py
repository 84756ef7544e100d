"""The structure of an error at the first wrong places: where it begins, what it grows with, what would explain it.

Knows traces of the run that shows the error; must not know limits. Adds to findings, never takes a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness.compare.align import Rows, as_rows, like
from harness.diagnose.patterns import Matrix, best_pattern
from harness.taps import decisions_under, level_of, part_step, unit_of
from harness.types import Failure, Finding, Measurement, Trace

EXPLAINS = 0.3
"""Share of the error that may be left over under a pattern for it to be called the explanation."""
MOST_LEFT = 0.6
"""The same where honest noise alone is a larger part of the error: an explanation leaves no more than that noise."""
LOUD, QUIET = 4.0, 2.0
"""Token errors in units of honest ones: above the first a token is wrong, below the second it is right."""
JUMP = 4.0
"""An error that begins at less than one part in this of its usual size has grown; otherwise it has begun."""
VALUES = frozenset({
    "error_ratio", "slope_beyond_noise", "exact_mismatches", "bias_beyond_noise", "growth_beyond_noise"
})  # fmt: skip
CHOICES = frozenset({
    "decision_margin_z", "decision_flips_excess", "decision_size_mismatches", "decision_outside_valid"
})  # fmt: skip
"""Metrics that speak of values, and of what was chosen by them."""
Traces = Callable[[str, str], "Trace | Failure | None"]


def structured(
    findings: Sequence[Finding],
    failing: Sequence[Measurement],
    traces: Traces,
    *,
    floors: Sequence[str],
    edges: Mapping[str, int],
    heads: int,
) -> list[Finding]:
    """Return findings with the structure of their error put before their cause, where it shows one.

    `edges` are lengths at which the model itself changes (window, chunk, top-k), by name.
    """
    return [_told(f, failing, traces, floors, edges, heads) for f in findings]


def _told(
    finding: Finding,
    failing: Sequence[Measurement],
    traces: Traces,
    floors: Sequence[str],
    edges: Mapping[str, int],
    heads: int,
) -> Finding:
    shown = _shown_best(finding.tap, failing, VALUES)
    chosen = None if shown else _shown_best(finding.tap, failing, CHOICES)
    best = shown or chosen
    if best is None:
        return finding
    oracle, accel = traces("oracle", best.run), traces("accel", best.run)
    if not isinstance(oracle, Trace) or not isinstance(accel, Trace):
        return finding
    honest_ones = [t for r in floors if isinstance(t := traces(r, best.run), Trace)]
    if chosen is not None:
        return _choice_told(finding, oracle, accel, honest_ones)
    sides = _sides(finding.tap, oracle, accel)
    if sides is None:
        return finding
    actual, expected = sides
    noise = _noise(finding.tap, oracle, expected, honest_ones)
    first = int(oracle.run.options.get("compare_from", 0)) or int(accel.run.options.get("compare_from", 0))
    calls = {f"the start of call {i}": start for i, (start, _) in enumerate(accel.run.steps[1:3], 2)}
    where = region(actual=actual.values[first:], expected=expected.values[first:], noise=noise[first:], first=first,
                   edges={**edges, **calls}) if expected.tokens else ""  # fmt: skip
    pattern = best_pattern(_matrix(finding.tap, oracle, actual, expected, heads, first))
    error = (actual.values[first:].double() - expected.values[first:].double()).norm()
    honest = float(noise[first:].norm() / error.clamp(min=1e-300))
    if pattern is None or pattern.left > max(EXPLAINS, min(1.1 * honest, MOST_LEFT)):
        return replace(finding, cause="; ".join(filter(None, (where, finding.cause)))) if where else finding
    said = f"it holds {pattern.words} (this leaves {pattern.left:.0%} of the error)"
    return replace(
        finding,
        cause="; ".join(filter(None, (said, where, *_kept_of(finding.cause)))),
        evidence=(finding.cause, *finding.evidence),
        residual_ratio=finding.residual_ratio * pattern.left if finding.residual_ratio is not None else None,
    )


def _choice_told(finding: Finding, oracle: Trace, accel: Trace, floors: Sequence[Trace]) -> Finding:
    """Return a finding about a choice with what is wrong in the scores behind it, or that they are right."""
    tap = f"{finding.tap}.scores"
    sides = _sides(tap, oracle, accel)
    if sides is None:
        return finding
    actual, expected = sides
    usable = torch.isfinite(actual.values) & torch.isfinite(expected.values)  # what is masked has no score
    honest = [f[0] for floor in floors if (f := _sides(tap, oracle, floor)) is not None]
    a, e, *h = (torch.where(usable, x.values, torch.zeros(())).double() for x in (*sides, *honest))
    error, noise = float((a - e).norm()), max((float((x - e).norm()) for x in h), default=math.nan)
    if error <= QUIET * noise:
        said = "the scores are right within rounding, so it is the rule that chooses among them"
        return replace(finding, cause=f"{finding.cause}; {said}")
    clean = [replace(side, values=values) for side, values in zip(sides, (a, e), strict=True)]
    pattern = best_pattern(_matrix(tap, oracle, clean[0], clean[1], 0, 0))
    if pattern is None or pattern.left > EXPLAINS:
        return finding
    said = f"the scores hold {pattern.words} (this leaves {pattern.left:.0%} of their error)"
    return replace(finding, cause=f"{said}; {finding.cause}")


def _kept_of(cause: str) -> list[str]:
    """Return what a cause says beside the size of the error: the only phase or layout, and what is usual there."""
    return [part for part in cause.split("; ") if part.startswith(("only ", "usual there"))]


def _shown_best(tap: str, failing: Sequence[Measurement], metrics: frozenset[str]) -> Measurement | None:
    """Return the failing measurement of a tap in the run that isolates it best: a replay, the deepest one, no phase."""
    about = [
        m for m in failing
        if m.subject == tap and m.run and m.metric in metrics and not m.problem
    ]  # fmt: skip
    return max(
        about,
        key=lambda m: (m.where.get("phase") == "prefill", int(m.where.get("level") or 0), m.value or 0.0),
        default=None,
    )


def _sides(tap: str, oracle: Trace, accel: Trace) -> tuple[Rows, Rows] | None:
    """Return both sides of a tap as matrices of one shape, or None where they do not fit."""
    if tap not in oracle.tensors or tap not in accel.tensors:
        return None
    expected, raw = oracle.tensors[tap], accel.tensors[tap]
    if not expected.is_floating_point() or not raw.is_floating_point():
        return None
    actual = like(raw, accel.taps[tap], other=expected, other_tap=oracle.taps[tap])
    if actual is None:
        return None
    return as_rows(actual, oracle.taps[tap]), as_rows(expected, oracle.taps[tap])


def _noise(tap: str, oracle: Trace, expected: Rows, floors: Sequence[Trace]) -> Tensor:
    """Return the honest error of each token, [T]: the greatest of the floors', and never far below the mean token's."""
    rows = []
    for floor in floors:
        if tap in floor.tensors:
            value = like(floor.tensors[tap], floor.taps[tap], other=oracle.tensors[tap], other_tap=oracle.taps[tap])
            if value is not None:
                rows.append((as_rows(value, oracle.taps[tap]).values.double() - expected.values.double()).norm(dim=1))
    size: Tensor = expected.values.double().norm(dim=1)
    if not rows:
        return size * 2.0**-8
    noise: Tensor = torch.stack(rows).amax(dim=0)
    return torch.maximum(noise, float(noise.norm() / size.norm().clamp(min=1e-300)) * size).clamp(min=1e-300)


def _matrix(tap: str, oracle: Trace, actual: Rows, expected: Rows, heads: int, first: int) -> Matrix:
    """Return both sides of a tap with what the reference had around it, from row `first` on."""
    others, inputs = _others(tap, oracle, expected)
    parts, owner = (oracle.tensors.get(f"{tap}.{name}") for name in ("parts", "parts.owner"))
    width = expected.values.shape[1]
    step = part_step(width)
    known = parts is not None and parts.dim() == 3 and len(parts) == len(expected.values)
    fits = known and parts is not None and parts.shape[2] == len(range(0, width, step))
    return Matrix(
        actual=actual.values[first:].double(),
        expected=expected.values[first:].double(),
        heads=expected.heads or (heads if heads and width % heads == 0 else 0),
        others={n: o[first:] for n, o in others.items()},
        inputs=inputs,
        around={n: o[first:] for n, o in _around(tap, oracle, len(expected.values)).items()},
        chosen={n: (scores[first:], ids[first:]) for n, (scores, ids) in _chosen(tap, oracle, expected).items()},
        parts=parts[first:].double() if fits and parts is not None else None,
        owner=owner[first:] if fits and owner is not None else None,
        part_step=step,
    )


def _around(tap: str, oracle: Trace, rows: int) -> dict[str, Tensor]:
    """Return the reference's values earlier in the unit around a tap, the nearest first."""
    unit = unit_of(tap).split(".topk")[0]
    outer = unit.rpartition(".")[0]
    order = list(oracle.tensors)
    found: dict[str, Tensor] = {}
    own = [unit] if unit != tap and unit in oracle.tensors else []  # a router's logits are its output, told last
    for name in [*own, *reversed(order[: order.index(tap)])]:
        if outer and name.startswith(f"{outer}.") and oracle.taps[name].kind == "hidden":
            values = as_rows(oracle.tensors[name], oracle.taps[name]).values
            if len(values) == rows and values.is_floating_point():
                found[name] = values.double()
    return found


def _chosen(tap: str, oracle: Trace, expected: Rows) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what was chosen from, and which ones, where a tap may hold the weights of what was chosen beside it."""
    unit = unit_of(tap)
    beside = [n for outer in (unit, unit.rpartition(".")[0]) for n in decisions_under(outer, oracle.tensors)]
    for name in dict.fromkeys(beside):
        ids = oracle.tensors[name]
        if tuple(ids.shape) != tuple(expected.values.shape):
            continue
        sources = (f"{name}.scores", name.rpartition(".topk")[0] if ".topk" in name else unit)
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for source in sources:
            if source in oracle.tensors and source != tap:
                scores = as_rows(oracle.tensors[source], oracle.taps[source]).values
                if len(scores) == len(ids) and scores.is_floating_point() and int(ids.max()) < scores.shape[1]:
                    found[source] = (scores.double(), ids.clamp(min=0).long())
        if found:
            return found
    return {}


def _others(tap: str, oracle: Trace, expected: Rows) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the reference's values of the same shape at other places, and which of them the unit may have had."""
    order = list(oracle.tensors)
    place, unit = order.index(tap), unit_of(tap)
    others: dict[str, Tensor] = {}
    for name in order:
        tensor, axes = oracle.tensors[name], oracle.taps[name]
        if name == tap or not tensor.is_floating_point() or axes.kind not in ("hidden", "logits"):
            continue
        rows = as_rows(tensor, axes).values
        if rows.shape == expected.values.shape:
            others[name] = rows.double()
    before = [n for n in order[:place] if n in others]
    given = [n for n in before if n.startswith(f"{unit}.in") or n == f"{unit.rpartition('.')[0]}.mid"]
    same_level = [n for n in before if level_of(n) == level_of(tap)]
    return others, tuple(dict.fromkeys([*given, *same_level[-1:], *before[-1:]]))


def region(*, actual: Tensor, expected: Tensor, noise: Tensor, first: int, edges: Mapping[str, int]) -> str:
    """Say at which tokens the error is, in a sentence, or "" where it is everywhere or nowhere in particular.

    Shapes: actual, expected [T, E]; noise [T], the honest error of each token. `first` is the position of row 0.
    """
    wrong = ~torch.isfinite(actual).all(dim=1)
    if bool(wrong.any()):
        return (
            f"not finite from position {first + int(wrong.nonzero()[0])} on ({int(wrong.sum())} of {len(wrong)} tokens)"
        )
    ratio = (actual.double() - expected.double()).norm(dim=1) / noise
    loud, quiet = ratio > LOUD, ratio < QUIET
    count, tokens = int(loud.sum()), len(ratio)
    if not count or tokens < 4:
        return ""
    places = loud.nonzero()[:, 0]
    start, end = int(places[0]), int(places[-1])
    right = bool(quiet[:start].all()), bool(quiet[end + 1 :].all())
    dense = float(loud[start : end + 1].double().mean()) > 0.5
    growth = _growth(ratio, first)
    if growth and float(ratio[start : start + 3].median()) * JUMP < float(ratio[loud].median()):
        return growth
    if dense and start > 0 and right[0] and end == tokens - 1:
        return f"error appears only at positions >= {first + start}{_edge(first + start, edges)}; equal before"
    if dense and end < tokens - 1 and right[1] and start == 0:
        return f"error appears only at positions < {first + end + 1}{_edge(first + end + 1, edges)}; equal after"
    if dense and right == (True, True) and (start > 0 or end < tokens - 1):
        begin = f"{first + start} to {first + end}{_edge(first + start, edges)}"
        return f"error appears only at {f'positions {begin}' if count > 1 else f'position {first + start}'}"
    if count * 2 <= tokens and bool((loud | quiet).double().mean() > 0.9):
        shown = ", ".join(str(first + int(p)) for p in places[:6])
        return f"error appears only at {count} of {tokens} tokens ({shown}{', ...' if count > 6 else ''})"
    return growth


def _edge(position: int, edges: Mapping[str, int]) -> str:
    """Name a position by the model's own edges, or as a power of two."""
    named = [name for name, value in edges.items() if position in (value, value + 1)]
    if named:
        return f" ({named[0]} is {edges[named[0]]})"
    return f" (2^{int(math.log2(position))})" if position >= 16 and position & (position - 1) == 0 else ""


def _growth(ratio: Tensor, first: int) -> str:
    """Say that the error grows with position, where ranks agree and its size doubles."""
    tokens = len(ratio)
    if tokens < 16:
        return ""
    ranks = ratio.argsort().argsort().double()
    line = torch.arange(tokens).double()
    rho = float(torch.corrcoef(torch.stack((ranks, line)))[0, 1])
    quarter = tokens // 4
    early, late = (float(part.quantile(0.5)) for part in (ratio[:quarter], ratio[-quarter:]))
    if rho < 0.6 or late < 2 * early:
        return ""
    last = first + tokens - 1
    return f"error grows with position: {early:.3g} times the floor's at first, {late:.3g} at position {last}"
