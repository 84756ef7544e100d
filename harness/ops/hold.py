"""What the outputs of one call are held against: budgets, choices, sets. Must not know devices or limits.

Everything adds up in an `Outcome`: numbers, and the first wrong element in words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from harness.ops.arithmetic import Arithmetic, half_ulp
from harness.ops.case import Case, Chosen, Drawn, Want, Wanted, Within

LEAST_SPREAD = 64
"""Elements from which on a root mean square says something."""
DRAWN_WITHIN = 3.3
"""Largest difference of a drawn distribution from its own, times the root of draws: 1 honest row in 10^9 exceeds it."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one case showed. Counts are elements; `raised` is what the operator raised; `words` tell the first wrong.

    `wrong` marks every wrong element of an output, for patterns.
    """

    case: Case
    given: str = ""
    error_ratio: float = 0.0
    rms_ratio: float = 0.0
    wrong_indices: int = 0
    nonfinite: int = 0
    neighbours: int = 0
    inputs_changed: int = 0
    not_repeated: int = 0
    elements: int = 0
    raised: str = ""
    words: str = ""
    wrong: Tensor | None = field(default=None, repr=False)

    @property
    def bad(self) -> bool:
        """Say whether anything beyond a budget was seen (NaN included)."""
        counts = self.wrong_indices + self.nonfinite + self.neighbours + self.inputs_changed
        return bool(self.raised or counts or not self.error_ratio <= 1.0 or not self.rms_ratio <= 1.0)


def bits_of(x: Tensor) -> Tensor:
    """Return a tensor's bits as integers, contiguous."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    x = x.contiguous()
    return x if x.dtype is torch.bool else x.view(kinds[x.element_size()])


def hold(
    outputs: Sequence[Tensor],
    wanted: Sequence[Wanted],
    arithmetic: Arithmetic,
    outcome: Outcome,
) -> None:
    """Hold outputs against what is wanted, each in its own way; `outcome` keeps what is found."""
    for number, want in enumerate(wanted):
        if isinstance(want, Chosen):
            _chosen(outputs, want, outcome)
        elif number >= len(outputs):
            outcome.error_ratio, outcome.words = math.inf, f"expected {len(wanted)} outputs, found {len(outputs)}"
        elif isinstance(want, Within):
            _within(outputs[number], want, outcome)
        elif isinstance(want, Drawn):
            _drawn(outputs[number], want, outcome)
        else:
            _valued(outputs[number], want, arithmetic, outcome)


def _same_shape(actual: Tensor, shape: Sequence[int], outcome: Outcome) -> bool:
    if tuple(actual.shape) == tuple(shape):
        return True
    outcome.error_ratio, outcome.words = math.inf, f"expected shape {list(shape)}, found {list(actual.shape)}"
    return False


def _valued(actual: Tensor, want: Want, arithmetic: Arithmetic, outcome: Outcome) -> None:
    """Hold numbers against their truth: what is not finite by kind, the rest by its budget."""
    if not _same_shape(actual, want.value.shape, outcome) or not actual.numel():
        return
    outcome.elements += actual.numel()
    if want.exact or not actual.is_floating_point():
        same = bits_of(actual) == bits_of(want.value.to(actual.dtype))
        if actual.is_floating_point() and actual.element_size() > 1:
            same |= (actual == want.value) | (actual.isnan() & want.value.isnan())
        if not bool(same.all()):
            _unequal(~same, actual, want.value, outcome)
        return
    expected, found = want.value, actual.to(torch.float64)
    largest = torch.finfo(actual.dtype).max
    budget = half_ulp(expected, actual.dtype, arithmetic)
    if want.slack is not None:
        budget = budget + want.slack.nan_to_num(0.0, 0.0, 0.0)
    over = expected.abs() + budget >= largest  # may or may not fit the dtype
    alike = (expected.isnan() & found.isnan()) | (expected == found) | (over & (found.abs() >= largest / 2))
    alike = alike | (found == want.also) if want.also is not None else alike
    odd = ~alike & ~(expected.isfinite() & found.isfinite())
    if bool(odd.any()):
        outcome.nonfinite = max(outcome.nonfinite, int(odd.sum()))
        _tell(outcome, odd, actual, expected)
    usual = expected.isfinite() & found.isfinite() & ~alike
    error = torch.where(usual, (found - expected).abs(), 0.0)
    ratio = error / budget
    worst = float(ratio.max())
    if worst > outcome.error_ratio:
        outcome.error_ratio = worst
        if worst > 1:
            _tell(outcome, ratio > 1, actual, expected)
    counted = expected.isfinite() & found.isfinite()
    if want.spread is not None and int(counted.sum()) >= LEAST_SPREAD:
        typical = (half_ulp(expected, actual.dtype, arithmetic) ** 2 + want.spread**2).sqrt()
        rms = float(((error / typical)[counted] ** 2).mean().sqrt())
        outcome.rms_ratio = max(outcome.rms_ratio, rms)
        if rms > 1 and not outcome.words:
            outcome.words = f"errors {rms:.2f} times as large as roundings of independent sign make (root mean square)"


def _unequal(wrong: Tensor, actual: Tensor, expected: Tensor, outcome: Outcome) -> None:
    """Note values that must be equal and are not: by how many halves of an ulp, and integers one by one."""
    _tell(outcome, wrong, actual, expected)
    if not actual.is_floating_point() or actual.element_size() == 1:
        outcome.wrong_indices = max(outcome.wrong_indices, int(wrong.sum()))
        return
    found, right = actual.to(torch.float64), expected.to(torch.float64)
    odd = wrong & ~(found.isfinite() & right.isfinite())
    outcome.nonfinite = max(outcome.nonfinite, int(odd.sum()))
    off = (found - right).abs() / half_ulp(right, actual.dtype, Arithmetic())
    usual = off[wrong & ~odd]
    if usual.numel():
        outcome.error_ratio = max(outcome.error_ratio, 2.0, float(usual.max()))


def _chosen(outputs: Sequence[Tensor], want: Chosen, outcome: Outcome) -> None:
    """Hold chosen values and indices against the scores: values in order, indices by what they point at."""
    scores = want.scores
    order, count = _order(scores, least=want.least), want.count
    shape = (*scores.shape[:-1], count)
    values, indices = (None, outputs[0]) if want.alone else (outputs[0], outputs[1])
    if want.alone and indices.dim() == scores.dim() - 1:
        indices = indices[..., None]
    if not _same_shape(indices, shape, outcome) or not indices.numel():
        return
    outcome.elements += indices.numel()
    best = torch.gather(scores, -1, order[..., :count])
    inside = (indices >= 0) & (indices < scores.shape[-1])
    pointed = torch.gather(scores, -1, indices.clamp(0, max(0, scores.shape[-1] - 1)).long())
    right = inside & _equal(pointed, best)
    twice = torch.zeros_like(right)
    if count > 1:
        ranked = indices.sort(dim=-1)
        same = torch.nn.functional.pad(ranked.values[..., 1:] == ranked.values[..., :-1], (1, 0))
        twice.scatter_(-1, ranked.indices, same)
    if want.ordered:
        right &= indices == order[..., :count]
    wrong = ~right | (twice & right.all(-1, keepdim=True))  # of two equal ones only one is to blame, where any is
    if values is not None:
        off = ~_equal(values.to(best.dtype), best)
        if bool(off.any()):
            _unequal(off, values, best, outcome)
    if bool(wrong.any()):
        outcome.wrong_indices = max(outcome.wrong_indices, int(wrong.sum()))
        _tell(outcome, wrong, indices, order[..., :count], what="index")


def _order(scores: Tensor, *, least: bool) -> Tensor:
    """Return indices from the best score on, NaN the greatest, equal ones as they lie; not by torch's sort."""
    x = scores.numpy()
    nan = np.isnan(x) if scores.is_floating_point() else np.zeros(x.shape, bool)
    key = np.where(nan, 0, x if least else -x)
    return torch.from_numpy(np.lexsort((key, nan if least else ~nan), axis=-1))


def _equal(a: Tensor, b: Tensor) -> Tensor:
    same = a == b
    return same | (a.isnan() & b.isnan()) if a.is_floating_point() else same


def _within(actual: Tensor, want: Within, outcome: Outcome) -> None:
    rows, vocabulary = want.allowed.shape
    found = actual.reshape(rows, -1).long()
    outcome.elements += found.numel()
    inside = (found >= 0) & (found < vocabulary)
    right = inside & torch.gather(want.allowed, 1, found.clamp(0, vocabulary - 1))
    if not bool(right.all()):
        outcome.wrong_indices = max(outcome.wrong_indices, int((~right).sum()))
        row = int((~right).any(1).int().argmax())
        allowed = want.allowed[row].nonzero().flatten().tolist()
        some = f"{allowed[:6]}{'...' if len(allowed) > 6 else ''}"
        outcome.words = outcome.words or f"row {row}: expected one of {some}, found {found[row].tolist()[:6]}"
        outcome.wrong = ~right


def _drawn(actual: Tensor, want: Drawn, outcome: Outcome) -> None:
    """Hold how often each index was drawn against its distribution, the likeliest ones added up first.

    A temperature that is left out moves every index a little, and the likely ones together much.
    """
    rows, vocabulary = want.probabilities.shape
    found = actual.reshape(rows, -1).long()
    outcome.elements += found.numel()
    outside = (found < 0) | (found >= vocabulary)
    draws = found.shape[1]
    often = torch.zeros(rows, vocabulary, dtype=torch.float64)
    often.scatter_add_(1, found.clamp(0, vocabulary - 1), torch.ones(found.shape, dtype=torch.float64))
    order = want.probabilities.argsort(-1, descending=True)
    p, n = (x.gather(1, order).cumsum(1) for x in (want.probabilities, often))
    off = (n / draws - p).abs().amax(1)  # Dvoretzky, Kiefer and Wolfowitz, with Massart's constant
    wrong = int(outside.sum()) + int((off > DRAWN_WITHIN / draws**0.5).sum())
    if wrong:
        outcome.wrong_indices = max(outcome.wrong_indices, wrong)
        row = int(off.argmax())
        few = int((n[row] / draws - p[row]).abs().argmax())
        outcome.words = outcome.words or (
            f"row {row}: the likeliest {few + 1} were drawn {int(n[row, few])} of {draws} times, expected about "
            f"{float(p[row, few]) * draws:.0f}"
        )


def _tell(outcome: Outcome, wrong: Tensor, actual: Tensor, expected: Tensor, what: str = "element") -> None:
    """Keep the first wrong element in words."""
    if outcome.wrong is not None:
        return
    outcome.wrong = wrong
    at = tuple(int(i) for i in wrong.nonzero()[0]) if wrong.dim() else ()
    found, right = actual[at].item(), expected[at].item()
    shown = [f"{v:.6g}" if isinstance(v, float) else str(v) for v in (right, found)]
    outcome.words = (
        f"{what} {list(at)} of {list(actual.shape)}: expected {shown[0]}, found {shown[1]}; "
        f"{int(wrong.sum())} of {wrong.numel()} wrong"
    )
