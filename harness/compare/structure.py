"""Structure of one tap's error: a mean of its own sign, growth along the sequence. Knows taps; must not know limits.

What counts is how far an effect lies beyond its own interval and beyond what honest runs show, in units of the floor.
The floors are only looked at where the port's error shows something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.compare.sides import Sides
from harness.compare.slopes import FEWEST_TOKENS, TESTS
from harness.metrics.structure import Beyond, clustered, honest_mean, mean_by_channel, mean_by_group, rise, splits_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The effect furthest beyond its interval. `beyond` in units of the floor, `value` the effect itself."""

    metric: str
    slice: str
    at: Any
    beyond: float
    value: float
    n: int

    @property
    def says(self) -> str:
        """Return the effect in a sentence."""
        if self.metric == "growth_beyond_noise":
            return f"from position {self.at} on the error is larger than before it, by {self.value:.2g} of the floor"
        where = "" if self.at is None else f" in {self.slice} {self.at}"
        return f"the error has a mean of its own{where}, {self.value:.2g} of the floor: a constant is off"


def effects_of(sides: Sides) -> list[Effect]:
    """Return the mean error and the rise of a tap's error that lie furthest beyond what noise shows."""
    if len(sides.expected) < FEWEST_TOKENS:
        return []
    return [_bias(sides), _growth(sides)]


def token_ratios(sides: Sides, side: int = 0) -> Tensor:
    """Return the size of each token's error in units of its floor, [T]; side 0 is the port, further ones floors."""
    error, floor = sides.errors.error[side], sides.floor.token
    return torch.where(error == 0, torch.zeros_like(error), (error / floor).sqrt())


def _scaled(sides: Sides, side: int = 0) -> Tensor:
    """Return means of stretches of a side's error in units of the floor of their token and channel, [S, E]."""
    work = torch.float32 if sides.errors.narrow else torch.float64
    error = (sides.actual, *sides.floors)[side].to(work) - sides.expected.to(work)
    error *= sides.floor.weight.sqrt().to(work)[:, None]
    channel = (sides.floor.channel / len(error)).sqrt()
    inverse = torch.where(channel > 0, 1 / channel, torch.zeros_like(channel))
    return clustered(error) * inverse.to(work)


def _bias(sides: Sides) -> Effect:
    """Return the mean error that lies furthest beyond noise: of all channels, of a group or head, or of one."""
    mine = _scaled(sides)
    samples, width = mine.shape
    kinds: list[tuple[str, int, Beyond]] = [
        ("whole", 1, mean_by_group(mine, groups=1, tests=TESTS)),
        ("channel", width, mean_by_channel(mine, tests=TESTS * width)),
    ]
    if sides.groups > 1:
        by_group = mean_by_group(mine, groups=sides.groups, tests=TESTS)
        kinds.append(("head" if sides.by_head else "channels", sides.groups, by_group))
    shows = any(not bool((beyond.excess == 0).all()) for _, _, beyond in kinds)
    others = [_scaled(sides, side) for side in range(1, 1 + len(sides.floors))] if shows else []
    found = []
    for name, count, beyond in kinds:
        excess = _without(beyond.excess, [honest_mean(other, groups=count) for other in others])
        place = int(excess.argmax())  # a NaN is the largest
        at: int | str | None = None if count == 1 else place
        if name == "channels":
            size = width // count
            at = f"{place * size}-{(place + 1) * size - 1}"
        value = float(beyond.effect[place])
        beyond_noise = float(excess[place])
        found.append(Effect(metric="bias_beyond_noise", slice=name, at=at, beyond=beyond_noise, value=value, n=samples))
    return max(found, key=lambda e: float("inf") if e.beyond != e.beyond else e.beyond)


def _growth(sides: Sides) -> Effect:
    """Return by how much the error is larger from one position on than before it."""
    splits = splits_of(len(sides.rows))
    risen = rise(token_ratios(sides), splits=splits, tests=TESTS)
    excess = risen.excess
    if not bool((excess == 0).all()):
        floors = [token_ratios(sides, side) for side in range(1, 1 + len(sides.floors))]
        excess = _without(excess, [rise(f, splits=splits, tests=TESTS).effect for f in floors])
    place = int(excess.argmax())
    return Effect(
        metric="growth_beyond_noise", slice="from", at=int(sides.rows[splits[place]]), beyond=float(excess[place]),
        value=float(risen.effect[place]), n=len(sides.rows),
    )  # fmt: skip


def _without(excess: Tensor, usual: Sequence[Tensor]) -> Tensor:
    """Take away what the worst floor shows; NaN stays NaN."""
    return (excess - torch.stack([torch.zeros_like(excess), *usual]).amax(dim=0)).clamp(min=0)
