"""Which of a port's tensors is which canonical tap, told by content. Knows two traces of one request; no limits.

Only layouts are proposed (another name, a split, a concatenation, a permutation, a transposition, a sum of outputs),
never a scale or a sign: those would be the port's mistake, and a mapping must not hide it. Every proposal is computed
by the mapping language itself and held against the expected values before it is printed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from harness.errors import MappingError
from harness.mapping.apply import tokens_of
from harness.mapping.expression import evaluate, parse
from harness.mapping.file import FORMAT, pattern_of
from harness.mapping.layouts import layouts, unit_columns
from harness.taps import DECISION_KINDS, EXACT_KINDS
from harness.types import Trace

TOLERANCE = 0.15
"""Median over tokens of the relative error of what is the same but for rounding. Source: free bf16 runs read 0.004 to
0.05 on small random models, the residual stream one layer further 0.2 and more."""
IDS_DIFFER = 0.3
"""Share of ids that may differ after honest flips; two unrelated choices of 2 in 8 differ in 0.8."""
FARTHER, NEAR = 4.0, 0.02
"""How many times the median error of all proposals one may have, and what is near in any case."""
_PROBED, _FINALISTS = 16, 6
_LAYER = re.compile(r"(?<![\w])(\d+)(?![\w])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A canonical tap, where it comes from, and how far that is from the expected values.

    Of `ids` (routes, selections) `error` is the share that differs.
    """

    tap: str
    source: str
    expr: str
    error: float
    ids: bool = False


@dataclass(frozen=True, kw_only=True)
class View:
    """A recorded tensor seen as rows [T, E]; `expr` makes them of it, `batch` says with a batch of one in front.

    `raw` is the tensor as it is, where its axes may fit as they are.
    """

    source: str
    expr: str
    raw: str
    rows: Tensor
    batch: bool = False

    @cached_property
    def units(self) -> Tensor:
        """Columns centred, of unit length."""
        return unit_columns(self.rows)

    @cached_property
    def probe(self) -> Tensor:
        """A few columns, to tell from afar."""
        return _probe(self.rows)


def propose(actual: Trace, expected: Trace) -> tuple[list[Proposal], dict[str, str]]:
    """Return what could be placed, in the expected order, and for the rest why not. Raises MappingError.

    Both traces must be of one request: rows are compared token by token.
    """
    tokens = tokens_of(expected)
    if tokens < 8 or tokens_of(actual) != tokens:
        raise MappingError(
            f"expected two traces of one request of at least 8 tokens, found {tokens_of(actual)} and {tokens}; record "
            "the same token ids on both sides"
        )
    views = list(_views(actual, tokens))
    if not views:
        raise MappingError(f"none of the {len(actual.tensors)} recorded tensors has an axis of {tokens} tokens")
    placed: list[Proposal] = []
    lost: dict[str, str] = {}
    for name, tap in expected.taps.items():
        if tap.kind in EXACT_KINDS or name.endswith(".scores"):
            continue
        target = expected.tensors[name]
        found = _place(name, target, actual, views, tokens, exact=tap.kind in DECISION_KINDS)
        if isinstance(found, Proposal):
            placed.append(found)
        else:
            lost[name] = found
    doubtful = _doubtful(placed)
    lost |= {p.tap: f"{p.source} is only near it (median relative error {p.error:.2g})" for p in doubtful}
    order = list(expected.taps)
    return [p for p in placed if p not in doubtful], dict(sorted(lost.items(), key=lambda item: order.index(item[0])))


def _doubtful(placed: Sequence[Proposal]) -> list[Proposal]:
    """Return proposals further off than rounding makes the others, or than another tap of the same tensor.

    A residual stream changes little from one place to the next: its neighbour is near it, but not it.
    """
    errors = torch.tensor([p.error for p in placed if not p.ids] or [0.0])
    usual = max(FARTHER * float(errors.median()), NEAR)
    best: dict[tuple[str, str], float] = {}
    values = [p for p in placed if not p.ids]
    for p in values:
        best[p.source, p.expr] = min(p.error, best.get((p.source, p.expr), p.error))
    return [p for p in values if p.error > usual or p.error > 2 * max(best[p.source, p.expr], NEAR / 10)]


def _views(trace: Trace, tokens: int) -> Iterator[View]:
    for name, tensor in trace.tensors.items():
        if ".out." in name:
            continue
        yield from _views_of(name, "out", tensor, tokens)
        others = [n for n in trace.tensors if n.startswith(f"{name}.out.")]
        for number, other in enumerate(others, start=1):
            second = trace.tensors[other]
            yield from _views_of(name, f"out[{number}]", second, tokens)
            if second.shape == tensor.shape and tensor.is_floating_point():
                yield from _views_of(name, f"out[0] + out[{number}]", tensor + second, tokens)


def _views_of(name: str, expr: str, tensor: Tensor, tokens: int) -> Iterator[View]:
    """Yield a tensor with each axis of `tokens` in front of the rest."""
    batch = tensor.dim() > 2 and tensor.shape[0] == 1 != tokens
    for axis, size in enumerate(tensor.shape[batch:]):
        if size == tokens:
            rest = [i for i in range(tensor.dim() - batch) if i != axis]
            plain = tensor[0] if batch else tensor
            rows = plain.permute([axis, *rest]).reshape(tokens, -1)
            if axis == 0 and len(rest) <= 1:
                yield View(source=name, expr=expr, raw=expr, rows=rows, batch=batch)
                continue
            text = f"squeeze({expr}, 0)" if batch else expr
            text = text if axis == 0 else f"permute({text}, {', '.join(map(str, [axis, *rest]))})"
            flat = text if len(rest) <= 1 else f"flatten({text}, 1, -1)"
            yield View(source=name, expr=flat, raw=expr, rows=rows)


def _place(
    name: str, target: Tensor, actual: Trace, views: Sequence[View], tokens: int, *, exact: bool
) -> Proposal | str:
    """Return the best proposal for a tap, or why there is none."""
    axis = next((i for i, size in enumerate(target.shape) if size == tokens), None)
    if axis is None:
        return f"it has no axis of {tokens} tokens"
    rows = target.movedim(axis, 0).reshape(tokens, -1)
    if not rows.any():
        return "the expected value is zero everywhere"
    near = _nearest(name, rows, views, exact=exact)
    error, best = near[0] if near else (float("inf"), None)
    allowed = IDS_DIFFER if exact else TOLERANCE
    whole = [best] if best is not None and error <= allowed else []
    texts = [(v.source, text) for v in whole for text in (v.raw, _shaped(v.expr, target, axis, batch=v.batch))]
    if not whole and not exact:
        found = layouts(rows, views, alike=lambda s: _alike(s, name))
        texts = [(source, _shaped(expr, target, axis, batch=batch)) for source, expr, batch in found]
    for source, text in texts:
        off = _error(source, text, actual, target, axis, exact=exact)
        if off is not None and off <= allowed:
            return Proposal(tap=name, source=source, expr=text, error=off, ids=exact)
    told = best is not None and error < 1
    return f"nearest is {best.source} (median relative error {error:.2g})" if told and best else "nothing is like it"


def _nearest(name: str, rows: Tensor, views: Sequence[View], *, exact: bool) -> list[tuple[float, View]]:
    """Return the nearest views of the same size, the nearest first: a few columns tell which are looked at whole."""
    probe = _probe(rows)
    alike = [v for v in views if v.rows.shape == rows.shape]
    from_afar = sorted(((distance(v.probe, probe, exact=exact), -_alike(v.source, name), v) for v in alike), key=_rank)
    finalists = [v for error, _, v in from_afar[:_FINALISTS] if error <= 4 * TOLERANCE]
    if not finalists:
        return [(error, view) for error, _, view in from_afar[:1]]
    closer = sorted(((distance(v.rows, rows, exact=exact), -_alike(v.source, name), v) for v in finalists), key=_rank)
    return [(error, view) for error, _, view in closer]


def _rank(item: tuple[float, float, View]) -> tuple[float, float]:
    return item[:2]


def _probe(rows: Tensor) -> Tensor:
    width = rows.shape[1]
    return rows if width <= _PROBED else rows[:, torch.linspace(0, width - 1, _PROBED).long()]


def distance(actual: Tensor, expected: Tensor, *, exact: bool = False) -> float:
    """Return the median over tokens of the relative error; of ids the share that differs. Infinite for other sizes."""
    if actual.shape != expected.shape or actual.is_floating_point() != expected.is_floating_point():
        return float("inf")
    if exact or not expected.is_floating_point():
        return float((actual.sort(-1).values != expected.sort(-1).values).float().mean())
    a, b = actual.float(), expected.float()
    if not bool(torch.isfinite(b.sum())):  # masked scores: what has no value is left out
        finite = torch.isfinite(b)
        a, b = torch.where(finite, a, 0.0), torch.where(finite, b, 0.0)
    error = torch.linalg.vector_norm(a - b, dim=-1) / torch.linalg.vector_norm(b, dim=-1).clamp(min=1e-30)
    middle = float(error.median())
    return middle if middle == middle else float("inf")


def _alike(a: str, b: str) -> float:
    """Return how alike two names are; the same layer number counts most."""
    numbers = _LAYER.findall(a.replace(".", " ")) == _LAYER.findall(b.replace(".", " "))
    return difflib.SequenceMatcher(None, a, b).ratio() + numbers


def _shaped(expr: str, target: Tensor, axis: int, *, batch: bool) -> str:
    """Return an expression of rows [T, E] put into the target's axes, those of size 1 apart."""
    sizes = [size for i, size in enumerate(target.shape) if size != 1 or i == axis]
    place = sum(1 for i, size in enumerate(target.shape) if i < axis and size != 1)
    rest = sizes[:place] + sizes[place + 1 :]
    if place and batch:
        expr = f"squeeze({expr}, 0)"
    if len(rest) > 1:
        expr = f"unflatten({expr}, -1, {', '.join(map(str, rest))})"
    if place:
        order = [i + 1 if i < place else 0 if i == place else i for i in range(len(sizes))]
        expr = f"permute({expr}, {', '.join(map(str, order))})"
    return expr


def _error(source: str, expr: str, actual: Trace, target: Tensor, axis: int, *, exact: bool) -> float | None:
    """Return how far an expression is from the target, computed as the mapping will compute it."""

    def out(number: int) -> Tensor:
        return actual.tensors[source if number == 0 else f"{source}.out.{number}"]

    try:
        value = evaluate(parse(expr), out=out, tap=lambda name: actual.tensors[name])
        if [n for n in value.shape if n != 1] != [n for n in target.shape if n != 1]:
            return None
        value = value.reshape(target.shape)
    except (MappingError, RuntimeError, KeyError):
        return None
    rows = [t.movedim(axis, 0).reshape(target.shape[axis], -1) for t in (value, target)]
    return distance(rows[0], rows[1], exact=exact)


def proposal_text(placed: Sequence[Proposal], lost: Mapping[str, str], actual: Trace) -> str:
    """Return a mapping file: a row for each place or for all layers alike, the rest as comments."""
    lines = [
        "# Proposed by content: read it before you use it. A permutation may be the port's layout, or its mistake.",
        f'format = "{FORMAT}"',
    ]
    for tap, source, expr, errors, ids in _grouped(placed, list(actual.tensors)):
        what = "share of ids that differ" if ids else "median relative error"
        lines += ["", f"# {what} {max(errors):.2g}" + (f", {len(errors)} places" * (len(errors) > 1))]
        lines += ["[[taps]]", f'tap = "{tap}"', f'from = "{source}"']
        lines += [f"expr = '{expr}'"] if expr != "out" else []
    lines += ["", *_remarks("not placed", lost)]
    used = {p.source for p in placed} | {n for p in placed for n in re.findall(r'tap\("([^"]*)"\)', p.expr)}
    lines += _remarks("not used", {n: "" for n in actual.tensors if n not in used and ".out." not in n})
    return "\n".join(lines) + "\n"


def _remarks(what: str, names: Mapping[str, str]) -> list[str]:
    """Return a comment for each name, or one for a name that comes in several layers, with the first reason."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "{n}", name, count=1), []).append(name)
    lines = []
    for generic, members in groups.items():
        alone = len(members) == 1
        name, why = (members[0] if alone else f"{generic} ({len(members)} places)"), names[members[0]]
        lines.append(f"# {what}: {name}" + (f": {why}" if why else ""))
    return lines


def _grouped(placed: Sequence[Proposal], names: Sequence[str]) -> list[tuple[str, str, str, list[float], bool]]:
    """Put proposals that differ in a number alone into one row, where that row then matches nothing else."""
    groups: dict[tuple[str, str, str], list[Proposal]] = {}
    for p in placed:
        groups.setdefault(_generic(p), []).append(p)
    rows = []
    for (tap, source, expr), members in groups.items():
        matched = {m for m in names if pattern_of(source).fullmatch(m)}
        if "{n}" in tap and len(members) > 1 and matched == {p.source for p in members}:
            rows.append((tap, source, expr, [p.error for p in members], members[0].ids))
        else:
            rows += [(p.tap, p.source, p.expr, [p.error], p.ids) for p in members]
    return rows


def _generic(p: Proposal) -> tuple[str, str, str]:
    """Return a proposal with its layer's number as {n}, where its names share one."""
    number = re.search(r"(?<=\.)\d+(?=\.|$)", p.tap)
    if number is None:
        return p.tap, p.source, p.expr
    one = re.compile(rf"(?<=\.){number.group()}(?=\.|$)")
    inside = re.compile(rf'(?<=\.){number.group()}(?=\.|")')
    if not one.search(p.source):
        return p.tap, p.source, p.expr
    return one.sub("{n}", p.tap, count=1), one.sub("{n}", p.source, count=1), inside.sub("{n}", p.expr)
