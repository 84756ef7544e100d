"""How many independent numbers the error of a token, or of a mean over tokens, stands for. Must not know limits.

A limit is a function of n. To count elements is to promise that their errors are independent: what one number makes (a
gated head that nearly cancels, one sharp weight of attention) does not average with width, and the worst of a few
floors may be small by chance just there. So n is taken from the floors where they show it, and is never more than the
count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from harness.metrics.shared import shared_of

FEWEST_IN_A_MEAN = 4
"""Tokens below which no mean is told: the tokens are, each for itself. Source: with the shipped limits, one token at
its own limit beside ordinary ones breaks that of the mean of up to three, whatever the width."""
FEWEST_FLOORS = 3
"""Floors below which what they differ by along an error says nothing."""
USUAL = 8.0
"""Elements of a token for one independent number, for which limits were calibrated. Source: effective n of nine small
architectures is about n / 8."""
CHANCE = 3.0
"""So many times the usual share is what few floors show by chance. Source: two differences of errors that share as
usual show more in exp(-3), 5 % of tokens."""


def samples_of(*, actual: Tensor, floors: Sequence[Tensor], expected: Tensor, ratio: Tensor) -> Tensor:
    """Return the independent numbers behind each token's error, at most its elements.

    1 / n is that of the count, and what floors differ by along the port's error beyond what is usual. Floors are asked
    only where the port's error is larger than they are (`ratio`): elsewhere no limit could be broken.
    Shapes: actual, expected [T, E], floors S x [T, E], ratio [T]; returns [T].
    """
    width = expected.shape[1]
    samples = torch.full((len(ratio),), float(width), dtype=torch.float64)
    rows = (ratio > 1).nonzero().reshape(-1)
    if len(floors) < FEWEST_FLOORS or not len(rows):
        return samples
    shared = shared_of(actual=actual, honest=floors, expected=expected, rows=rows)
    beyond = (shared - CHANCE * USUAL / width).nan_to_num(nan=0.0).clamp(min=0)
    samples[rows] = 1 / (1 / width + beyond)
    return samples


def of_means(count: Tensor, inverse: Tensor) -> Tensor:
    """Return the independent numbers behind means over `count` tokens, whose 1 / samples add up to `inverse`."""
    return count**2 / inverse


def worst_of(value: Tensor, samples: Tensor, counted: Tensor) -> Iterator[tuple[int, int]]:
    """Yield place and n of the worst of slices of one kind: one for each octave that n lacks of its count.

    A limit depends on n, so the worst value is not the worst slice where they differ in it. Each is held to the most n
    that one of its octave has. A NaN is the largest. Shapes: value, samples, counted [K], the latter of about one size.
    """
    lacking = (counted / samples).log2().round().to(torch.int64)
    for octave in sorted(set(lacking.tolist())):
        inside = (lacking == octave).nonzero().reshape(-1)
        place = int(inside[value[inside].argmax()])
        yield place, max(1, int(counted[place] if octave == 0 else samples[inside].max()))
