"""Look once more at what is wrong, beside what belongs there. Knows decoders and causes; asks the port a second time.

The first look keeps digests alone, whatever the size of a weight; what they cannot tell (which element, why) is told
here, one weight and one tensor at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from harness.adapter import Weight
from harness.checkpoint.assembled import assemblies
from harness.checkpoint.causes import UNRELATED, Pair, unwritten_words
from harness.checkpoint.causes.pair import same, wrong_by_row
from harness.checkpoint.fact import WeightFact, several
from harness.checkpoint.formats import decode
from harness.checkpoint.gaps import Due
from harness.checkpoint.ledger import Ledger
from harness.checkpoint.missing import row_length
from harness.checkpoint.named import with_difference
from harness.checkpoint.place import place_of
from harness.checkpoint.reasons import reason
from harness.checkpoint.slices import cut_of
from harness.checkpoint.values import difference
from harness.errors import CheckpointError

_WAYS = 24
"""Ways to put a weight together that are tried."""
_ASSEMBLED = 128
"""Weights of which nothing is known that are put together by names."""
_TOLD = 4
"""Wrong tensors within one weight whose cause is looked for."""


def look_again(audit: Ledger, weights: Iterable[Weight] | Callable[[], Iterable[Weight]]) -> None:
    """Compare what a name or an order says should be there with what is there, element by element."""
    wanted = {f.name: at for at, f in enumerate(audit.facts) if f.match == "none" or at in audit.dues}
    if not wanted:
        return
    for name, held in _again(audit, weights, wanted):
        at = wanted[name]
        fact = audit.facts[at]
        try:
            if at in audit.dues:
                audit.facts[at] = _merged(audit, fact, held, audit.dues[at])
            else:
                audit.facts[at] = _due(audit, fact, held) if fact.due else _assembled(audit, fact, held)
        except CheckpointError as error:
            audit.errors[fact.due or fact.name] = str(error)


def _again(
    audit: Ledger, weights: Iterable[Weight] | Callable[[], Iterable[Weight]], wanted: dict[str, int]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that are wanted: from the port if it can be asked twice, else those that are small."""
    if not callable(weights) and iter(weights) is weights:
        for at, pending in audit.pending:
            fact = audit.facts[at]
            if wanted.get(fact.name) == at and pending.small is not None:
                yield fact.name, pending.small.reshape(fact.shape)
        return
    for weight in weights() if callable(weights) else weights:
        if weight.name in wanted:
            yield weight.name, weight.tensor.detach().to("cpu")


def _due(audit: Ledger, fact: WeightFact, held: Tensor) -> WeightFact:
    """Compare a weight that nothing filled with the one tensor that should have."""
    logical = audit.logicals[fact.due]
    if held.numel() != logical.numel:
        return fact
    expected = decode(audit.checkpoint, logical, widen=False)
    diff = difference(actual=held, expected=expected)
    told = with_difference(audit, dataclasses.replace(fact, source=fact.due), logical, diff, held, expected)
    if told.pattern.startswith(UNRELATED):
        pattern = unwritten_words(held) or told.pattern
        return dataclasses.replace(fact, pattern=pattern, file=told.file, offset=told.offset, first=told.first)
    audit.used.add(fact.due)
    return dataclasses.replace(told, match="named")


def _assembled(audit: Ledger, fact: WeightFact, held: Tensor) -> WeightFact:
    """Try the ways in which tensors that are nowhere make up a weight; one that explains its values is believed."""
    if audit.assembled >= _ASSEMBLED:
        return dataclasses.replace(fact, pattern=unwritten_words(held))
    audit.assembled += 1
    free = [x for x in audit.logicals.values() if x.name not in audit.used and not x.problem]
    for assembly in itertools.islice(assemblies(fact, free), _WAYS):
        due = assembly.dues[0]
        length = fact.shape[-2 if assembly.transposed else -1]
        rows = (held.transpose(-1, -2) if assembly.transposed else held).reshape(-1, length)
        value = decode(audit.checkpoint, audit.logicals[due.source], widen=False).reshape(-1, length)
        at, places = _places([due])
        cause = reason(
            audit, audit.logicals[due.source], Pair(held=rows[places], expected=value[at], rows=at, whole=len(value))
        )
        if cause and not cause.startswith(UNRELATED) and "none of them" not in cause:
            audit.used |= {d.source for d in assembly.dues}
            told = dataclasses.replace(fact, match="content", order=assembly.order)
            return _merged(audit, told, held, list(assembly.dues))
    return dataclasses.replace(fact, pattern=unwritten_words(held))


def _merged(audit: Ledger, fact: WeightFact, held: Tensor, dues: list[Due]) -> WeightFact:
    """Compare the rows of a merged weight that are nobody's with those that belong there, a tensor at a time."""
    length = row_length(fact)
    transposed = bool(json.loads(fact.order).get("transposed"))
    turned = held.transpose(-1, -2) if transposed else held
    rows = turned.reshape(-1, turned.shape[-1])[:, :length]
    wrong: dict[str, str] = {}
    count = fact.unmatched - length * sum(due.count for due in dues)
    by_source: dict[str, list[Due]] = {}
    for due in dues:
        by_source.setdefault(due.source, []).append(due)
    for source, group in by_source.items():
        base, columns = cut_of(source)
        logical = audit.logicals[base]
        value = decode(audit.checkpoint, logical, widen=False)
        value = value[..., slice(*columns)] if columns else value
        value = value.reshape(-1, length)
        at, places = _places(group)
        pair = Pair(held=rows[places], expected=value[at], rows=at, whole=len(value))
        by_row = wrong_by_row(pair)
        count += int(by_row.sum())
        if not int(by_row.sum()):
            continue
        if not wrong:
            fact = _first(audit, fact, source, pair, places, by_row, transposed=transposed)
        wrong[source] = reason(audit, logical, pair, columns) if len(wrong) < _TOLD else ""
    if not wrong:
        return fact
    return dataclasses.replace(fact, source=several(wrong), unmatched=max(1, count), pattern=_sentence(wrong))


def _sentence(wrong: dict[str, str]) -> str:
    """Put the causes found in the tensors of one weight into words; most are told of one or all alike."""
    told: dict[str, list[str]] = {}
    for source, words in wrong.items():
        if words:
            told.setdefault(words, []).append(source)
    if not told:
        return ""
    if len(told) == 1 and len(wrong) > _TOLD:
        words = next(iter(told))
        return f"{words}, in the place of {next(iter(wrong))} and {len(wrong) - 1} more"
    return "; ".join(f"{words}, in the place of {' and '.join(sources)}" for words, sources in told.items())


def _places(dues: list[Due]) -> tuple[Tensor, Tensor]:
    """Return rows of the source, and the rows of the weight where they belong."""
    at = torch.cat([torch.arange(d.start, d.start + d.count) for d in dues])
    places = torch.cat([d.held + d.step * torch.arange(d.count) for d in dues])
    return at, places


def _first(
    audit: Ledger, fact: WeightFact, source: str, pair: Pair, places: Tensor, by_row: Tensor, *, transposed: bool
) -> WeightFact:
    """Return a fact with the first wrong element of its first wrong tensor: in memory and on disk, expected, found."""
    row = int(by_row.nonzero()[0, 0])
    held, expected = pair.held[row], pair.expected[row].to(pair.held.dtype)
    column = int((~same(held, expected)).int().argmax())
    number = int(pair.rows[row])
    base, columns = cut_of(source)
    logical = audit.logicals[base]
    flat = number * (logical.shape[-1] if columns else len(held)) + column + (columns[0] if columns else 0)
    file, offset = place_of(audit.checkpoint, logical, flat)
    lead = (*fact.shape[:-2], fact.shape[-1]) if transposed else fact.shape[:-1]
    index = tuple(int(i) for i in torch.unravel_index(places[row], lead)) if lead else ()
    first = (*index[:-1], column, index[-1]) if transposed else (*index, column)
    return dataclasses.replace(
        fact, first=first, first_row=number, file=file, offset=offset, expected=repr(float(expected[column])),
        found=repr(float(held[column])), worst=first,
    )  # fmt: skip
