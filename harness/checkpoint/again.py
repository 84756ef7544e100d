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
from harness.checkpoint.causes import UNRELATED, Pair, cause_of, stored_weight
from harness.checkpoint.causes.pair import same, wrong_by_row
from harness.checkpoint.fact import WeightFact
from harness.checkpoint.formats import decode
from harness.checkpoint.gaps import Due
from harness.checkpoint.ledger import Ledger
from harness.checkpoint.missing import row_length
from harness.checkpoint.named import with_difference
from harness.checkpoint.place import place_of
from harness.checkpoint.values import difference
from harness.errors import CheckpointError

_TOLD = 4
"""Wrong tensors within one weight whose cause is looked for."""


def look_again(audit: Ledger, weights: Iterable[Weight] | Callable[[], Iterable[Weight]]) -> None:
    """Compare what a name or an order says should be there with what is there, element by element."""
    wanted = {f.name: at for at, f in enumerate(audit.facts) if f.due or at in audit.dues}
    if not wanted:
        return
    for name, held in _again(audit, weights, wanted):
        at = wanted[name]
        fact = audit.facts[at]
        try:
            audit.facts[at] = _due(audit, fact, held) if fact.due else _merged(audit, fact, held, audit.dues[at])
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
        return dataclasses.replace(fact, pattern=told.pattern, file=told.file, offset=told.offset, first=told.first)
    audit.used.add(fact.due)
    return dataclasses.replace(told, match="named")


def _merged(audit: Ledger, fact: WeightFact, held: Tensor, dues: list[Due]) -> WeightFact:
    """Compare the rows of a merged weight that are nobody's with those that belong there, a tensor at a time."""
    length = row_length(fact)
    transposed = bool(json.loads(fact.order).get("transposed"))
    rows = (held.transpose(-1, -2) if transposed else held).reshape(-1, length)
    wrong: list[str] = []
    words: dict[str, int] = {}
    for source, group in itertools.groupby(sorted(dues, key=lambda d: d.source), key=lambda d: d.source):
        logical = audit.logicals[source]
        value = decode(audit.checkpoint, logical, widen=False).reshape(-1, length)
        at, places = _places(list(group))
        pair = Pair(held=rows[places], expected=value[at], rows=at, whole=len(value))
        by_row = wrong_by_row(pair)
        if not int(by_row.sum()):
            continue
        if not wrong:
            fact = _first(audit, fact, source, pair, places, by_row, transposed=transposed)
        wrong.append(source)
        if len(wrong) <= _TOLD:
            parts = audit.parts(logical)
            cause = cause_of(pair, stored=stored_weight(logical, parts) if parts is not None else None)
            if cause is not None:
                words[cause.words] = words.get(cause.words, 0) + 1
    if not wrong:
        return fact
    return dataclasses.replace(fact, source=", ".join(wrong), pattern=_sentence(words, wrong))


def _sentence(words: dict[str, int], wrong: list[str]) -> str:
    """Put the causes found in tensors of one weight into words."""
    if not words:
        return ""
    told = max(words, key=lambda w: words[w])
    where = wrong[0] if len(wrong) == 1 else f"{wrong[0]} and {len(wrong) - 1} more"
    return f"{told}, in the place of {where}"


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
    file, offset = place_of(audit.checkpoint, audit.logicals[source], number * len(held) + column)
    lead = (*fact.shape[:-2], fact.shape[-1]) if transposed else fact.shape[:-1]
    index = tuple(int(i) for i in torch.unravel_index(places[row], lead)) if lead else ()
    first = (*index[:-1], column, index[-1]) if transposed else (*index, column)
    return dataclasses.replace(
        fact, first=first, first_row=number, file=file, offset=offset, expected=repr(float(expected[column])),
        found=repr(float(held[column])), worst=first,
    )  # fmt: skip
