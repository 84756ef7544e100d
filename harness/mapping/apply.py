"""A mapping put to use on one trace. Knows taps and tensors; must not know files or who recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from harness import taps as tapnames
from harness.errors import MappingError, nearest
from harness.mapping.expression import evaluate, names_in
from harness.mapping.file import Row, filled, pattern_of
from harness.types import Tap, Trace


def apply_mapping(trace: Trace, rows: Sequence[Row]) -> Trace:
    """Return the trace with canonical taps made by the rows, in their sources' order; other tensors keep their names.

    Raises MappingError for a row that matches nothing, names a tensor that is not there, or whose shapes do not fit.
    """
    made: dict[str, tuple[int, Tap, Tensor]] = {}
    order = {name: place for place, name in enumerate(trace.tensors)}
    used: set[str] = set()
    for row in rows:
        for numbers in _matches(row, list(order)):
            tap = filled(row.tap, numbers)
            sources = [filled(p, numbers) for p in row.patterns]
            value = _made(row, numbers, trace, tap)
            used.update(sources)
            last = max(order[s] for s in sources if s in order)
            made[tap] = (last, _tap(row, tap, value, trace, sources), value)
    kept = {
        name: (order[name], trace.taps.get(name, Tap(name=name)), trace.tensors[name])
        for name in trace.tensors
        if name not in made and name not in used and not _further(name, used)
    }
    ordered = sorted({**kept, **made}.items(), key=lambda item: item[1][0])
    return dataclasses.replace(
        trace, taps={name: tap for name, (_, tap, _) in ordered}, tensors={name: t for name, (_, _, t) in ordered}
    )


def _further(name: str, used: set[str]) -> bool:
    """Say whether a tensor is a further output of a place that a row has used."""
    head, mark, _ = name.rpartition(".out.")
    return bool(mark) and head in used


def _matches(row: Row, names: Sequence[str]) -> list[Mapping[str, str]]:
    pattern = pattern_of(row.patterns[0])
    found: list[Mapping[str, str]] = [match.groupdict() for name in names if (match := pattern.fullmatch(name))]
    if not found:
        raise MappingError(
            f"the row of {row.tap!r} matches nothing: no recorded tensor is named {row.patterns[0]!r}"
            f"{nearest(row.patterns[0], list(names)[:2000]) if names else ' (none was recorded)'}"
        )
    return found


def _made(row: Row, numbers: Mapping[str, str], trace: Trace, tap: str) -> Tensor:
    def lookup(name: str) -> Tensor:
        whole = filled(name, numbers)
        if whole not in trace.tensors:
            raise MappingError(f"the row of {tap!r} needs the tensor {whole!r}, which was not recorded")
        return trace.tensors[whole]

    def out(number: int) -> Tensor:
        return lookup(row.source if number == 0 else f"{row.source}.out.{number}")

    try:
        return evaluate(row.tree, out=out, tap=lookup)
    except MappingError as error:
        shapes = ", ".join(
            f"{n} {tuple(trace.tensors[n].shape)}"
            for p in dict.fromkeys([*row.patterns, *names_in(row.tree)])
            if (n := filled(p, numbers)) in trace.tensors
        )
        raise MappingError(f"the row of {tap!r}: {error}{f' ({shapes})' if shapes else ''}") from error


def _tap(row: Row, name: str, value: Tensor, trace: Trace, sources: Sequence[str]) -> Tap:
    if row.dims and len(row.dims) != value.dim():
        raise MappingError(
            f"the row of {name!r}: dims {' '.join(row.dims)!r} for a tensor of shape {tuple(value.shape)}"
        )
    kind = row.kind or tapnames.kind_of(name)
    if kind not in tapnames.KINDS:
        raise MappingError(f"the row of {name!r}: unknown kind {kind!r}{nearest(kind, list(tapnames.KINDS))}")
    old = trace.taps.get(sources[0])
    if row.dims:
        return Tap(name=name, kind=kind, dims=row.dims)
    same = old is not None and row.text.strip() == "out"
    dims = old.dims if same and old is not None else token_axes(value, tokens_of(trace))
    return Tap(name=name, kind=kind, dims=dims)


def tokens_of(trace: Trace) -> int:
    """Return how many tokens a trace holds, by its case, its inputs or its named axes; 0 where nothing says."""
    if trace.run.case is not None and trace.run.case.token_ids:
        return len(trace.run.case.token_ids)
    if "inputs.token_ids" in trace.tensors:
        return int(trace.tensors["inputs.token_ids"].numel())
    sizes = [
        int(tensor.shape[tap.dims.index("token")])
        for name, tap in trace.taps.items()
        if "token" in tap.dims and (tensor := trace.tensors[name]).dim() == len(tap.dims)
    ]
    return max(set(sizes), key=sizes.count) if sizes else 0


def token_axes(value: Tensor, tokens: int) -> tuple[str, ...]:
    """Name the axes of a tensor by the number of tokens: one of them, the first where several fit."""
    names = [f"axis{i}" for i in range(value.dim())]
    place = next((i for i, size in enumerate(value.shape) if size == tokens and tokens), None)
    if place is not None:
        names[place] = "token"
        if place == 1 and value.shape[0] == 1:
            names[0] = "batch"
        if value.dim() > place + 1:
            names[-1] = "feature"
        if value.dim() == place + 3:
            names[place + 1] = "head"
    return tuple(names)
