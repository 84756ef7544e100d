"""Find what explains a weight that differs: each known mistake on a few rows, then on all. No files, no names.

A mistake counts as the cause if it gives exactly what memory holds (rounded to memory's dtype) where it is wrong. Only
where none does, what is merely near is told. A few rows decide, so that nothing is held beyond the two tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from harness.checkpoint.causes.changed import factors, functions, reinterpreted, roundings
from harness.checkpoint.causes.likeness import few_words, likeness_words, moved_words
from harness.checkpoint.causes.misread import Mistake, misread_codes
from harness.checkpoint.causes.misscaled import misread_scales
from harness.checkpoint.causes.pair import Pair, same, sample, wrong_by_row
from harness.checkpoint.causes.stored import Stored
from harness.checkpoint.causes.unwritten import constant_words, initialised_words

EXPLAINS = 0.97
"""Share of the wrong elements of the sample that a cause must give exactly; the rest may be a second mistake."""
_STORED = "what the stored codes give with "
_PRODUCTS = 4 * torch.finfo(torch.float32).eps
"""Products of a code and several factors may be rounded in any order."""
_FEW = 16
"""Wrong elements below which they show no pattern beyond their bits."""
_STRIP = 1 << 18
_NEAR, _CLOSER = 0.15, 4.0
"""A reading that is not exact is believed if it is off by less, and so many times closer than the right one. Source:
rounding to four bits moves a row by 0.14 of its length, to FP8 by 0.03."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What memory holds, in words that go on after "memory holds"; `exact` if every bit of it follows.

    `explained` of `wrong` elements follow from it, counted over the whole weight (0 where it is only near).
    """

    words: str
    exact: bool = False
    explained: int = 0
    wrong: int = 0


Candidate = tuple[str, Callable[[Pair], Tensor]]


def cause_of(
    pair: Pair,
    *,
    stored: Stored | None = None,
    beside: Iterable[Mistake] = (),
    pairs: Collection[str] | None = None,
) -> Cause | None:
    """Return what explains the elements that differ, or None where nothing differs or nothing is known of it.

    `stored`: the weight as codes and factors, if it is quantised; `beside`: readings with parts of other tensors,
    which are only asked for where nothing simpler fits. `pairs`: words of causes found before; of two mistakes at once,
    only those that they name are tried then, and not all.
    """
    by_row = wrong_by_row(pair)
    wrong = int(by_row.sum())
    if not wrong:
        return None
    few = sample(pair, by_row)
    mask = ~same(few.held, few.expected)
    where = _where(wrong, pair)
    constant = constant_words(few.held[mask]) if wrong >= 2 else ""
    if constant and _unwritten(few, mask):
        return Cause(words=_never(constant, where), wrong=wrong)
    if wrong < _FEW:
        return _of_few(pair, stored, beside, few, mask, wrong)
    found = _best(_candidates(few, stored, beside, pairs), few, mask, 0.0)
    if found is not None:
        return _confirmed(found, pair, by_row, wrong, where)
    if constant:
        return Cause(words=_never(constant, where), wrong=wrong)
    moved = moved_words(pair)
    if moved:
        return Cause(words=f"the checkpoint's values with {moved}", exact=True, wrong=wrong, explained=wrong)
    if stored is not None:
        close = _nearest(next(iter(_candidates(few, stored, ()))), few)
        if close is not None:
            return Cause(words=f"{close}{where}", wrong=wrong)
    drawn = initialised_words(few.held[mask], (pair.whole, pair.held.shape[1]))
    near = likeness_words(few, mask, where, drawn)
    return Cause(words=near, wrong=wrong) if near else None


def _where(wrong: int, pair: Pair) -> str:
    return "" if wrong * 10 >= 8 * pair.held.numel() else " in part of it"


def _never(constant: str, where: str) -> str:
    what, colon, why = constant.partition(":")
    return f"{what}{where}:{why}" if colon else f"{what}{where}: never written, or still as it was made"


def _unwritten(few: Pair, mask: Tensor) -> bool:
    """Say whether the constant fills places without a choice: nothing else stands in a row from the first one on."""
    bad = mask.any(dim=1)
    spared = (~mask & (few.expected != 0))[bad]
    first = mask[bad].int().argmax(dim=1)
    return not bool((spared & (torch.arange(mask.shape[1]) >= first[:, None])).any())


def _of_few(
    pair: Pair, stored: Stored | None, beside: Iterable[Mistake], few: Pair, mask: Tensor, wrong: int
) -> Cause | None:
    """Explain a handful of elements: by a mistake that leaves everything else as it is, else by their bits."""
    found = _best(_candidates(few, stored, beside), few, mask, 1.0)
    if found is not None:
        return Cause(words=found[0], exact=True, explained=wrong, wrong=wrong)
    words = few_words(few.held[mask], few.expected[mask])
    return Cause(words=words, wrong=wrong) if words else None


def _candidates(
    few: Pair, stored: Stored | None, beside: Iterable[Mistake], known: Collection[str] | None = None
) -> Iterator[list[Candidate]]:
    """Yield everything that memory may hold instead, the simple ones together before those of two mistakes."""
    if stored is None:
        yield list(_changes(few))
    else:
        mistakes = [*misread_codes(stored), *misread_scales(stored)]
        yield [*(_reading((mistake,), stored) for mistake in mistakes), *_changes(few)]
        yield [_reading((mistake,), stored) for mistake in beside]
        pairs = (p for p in itertools.combinations(mistakes, 2) if p[0].part != p[1].part)
        yield [
            _reading(pair, stored) for pair in pairs
            if known is None or any(all(m.words in words for m in pair) for words in known)
        ]  # fmt: skip


def _reading(mistakes: tuple[Mistake, ...], stored: Stored) -> Candidate:
    """Return an alternative decoding."""

    def value(pair: Pair) -> Tensor:
        changed = stored
        for mistake in mistakes:
            changed = mistake.change(changed)
        return changed.rows(pair.rows)

    return _STORED + ", and ".join(m.words for m in mistakes), value


def _changes(few: Pair) -> Iterator[Candidate]:
    """Yield what can be done to the right values."""
    dtype = few.held.dtype
    for words, change in (*functions(), *roundings(dtype)):
        yield words, partial(_changed, change)
    for factor, name in factors((few.whole, few.held.shape[1])):
        yield f"{name} times the checkpoint's values: a scale", partial(_changed, partial(torch.mul, other=factor))
    for number, (words, _) in enumerate(reinterpreted(few.expected, dtype)):
        yield words, partial(_reinterpreted, number)
    largest = float(few.held.abs().max()) if few.held.is_floating_point() and few.held.element_size() > 1 else 0.0
    if largest:
        words = f"the checkpoint's values clipped at {largest:.4g}"
        yield words, lambda p: p.expected.clamp(-largest, largest)


def _changed(change: Callable[[Tensor], Tensor], pair: Pair) -> Tensor:
    narrow = pair.expected.is_floating_point() and pair.expected.element_size() < 4
    return change(pair.expected.to(torch.float32) if narrow else pair.expected)


def _reinterpreted(number: int, pair: Pair) -> Tensor:
    return list(reinterpreted(pair.expected, pair.held.dtype))[number][1]


def _best(tiers: Iterable[list[Candidate]], few: Pair, mask: Tensor, least: float) -> Candidate | None:
    """Return the candidate that gives (nearly) every wrong element of the sample and spoils fewest right ones.

    Tried on one row at first. Of equals the first is taken, and the next is told with it.
    """
    worst = int(mask.sum(dim=1).argmax())
    one, one_mask = few.take(torch.tensor([worst])), mask[worst : worst + 1]
    for tier in tiers:
        found: list[tuple[float, Candidate]] = []
        for candidate in tier:
            if _agreement(candidate, one, one_mask)[0] >= EXPLAINS:
                explained, agrees = _agreement(candidate, few, mask)
                if explained >= EXPLAINS and agrees >= least:
                    found.append((agrees, candidate))
        if found:
            most = max(agrees for agrees, _ in found)
            alike = [c for agrees, c in found if agrees == most]
            words = alike[0][0] + (f" (or, the same here: {alike[1][0].removeprefix(_STORED)})" if alike[1:] else "")
            return words, alike[0][1]
    return None


def _nearest(candidates: Iterable[Candidate], few: Pair) -> str | None:
    """Return the reading that what memory holds is near to, where it was rounded once more after a mistake."""
    held = few.held.to(torch.float64)
    size = float(held.nan_to_num().norm())
    if not size or not bool(held.isfinite().all()):
        return None
    right = float((held - few.expected).norm()) / size
    best = (min(_NEAR, right / _CLOSER), "")
    for words, value in candidates:
        off = float((held - value(few)).norm()) / size
        if off < best[0]:
            best = off, words
    return f"nearly {best[1]} (off by {best[0]:.2g}, as after one more rounding)" if best[1] else None


def _agreement(candidate: Candidate, pair: Pair, mask: Tensor) -> tuple[float, float]:
    """Return which share of the wrong elements a candidate gives, and which of all."""
    good = same(pair.held, candidate[1](pair), slack=_slack(candidate))
    return int((good & mask).sum()) / int(mask.sum()), float(good.double().mean())


def _slack(candidate: Candidate) -> float:
    return _PRODUCTS if candidate[0].startswith(_STORED) else 0.0


def _confirmed(candidate: Candidate, pair: Pair, by_row: Tensor, wrong: int, where: str) -> Cause:
    """Count over the whole weight how many wrong elements a cause explains, a strip of rows at a time."""
    words, value = candidate
    rows = by_row.nonzero()[:, 0]
    step = max(1, _STRIP // max(1, pair.held.shape[1]))
    explained = 0
    for start in range(0, len(rows), step):
        part = pair.take(rows[start : start + step])
        good = same(part.held, value(part), slack=_slack(candidate))
        explained += int((good & ~same(part.held, part.expected)).sum())
    share = np.floor(1000 * explained / wrong) / 10
    rest = "" if explained == wrong else f" (that is {share:g} % of what is wrong)"
    return Cause(words=f"{words}{where}{rest}", exact=True, explained=explained, wrong=wrong)
