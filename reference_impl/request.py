"""What one request keeps, and what one call over it is told. Knows tensors by name; must not know weights or layers.

B batch (1)  T tokens of this call  S keys so far  N rows of pictures  D features  K width of a key
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.adapter import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """The rows of a request's pictures and the places of their tokens; `deepstack` are rows for deeper layers."""

    rows_ND: Tensor
    deepstack: Sequence[Tensor]
    places_N: Tensor

    def here(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return which rows belong to tokens [start, stop) as a mask [N], and their places counted from `start`."""
        inside_N = (self.places_N >= start) & (self.places_N < stop)
        return inside_N, self.places_N[inside_N] - start


@dataclass(slots=True)
class Cache:
    """What a request keeps, by name: keys of all tokens, the last inputs of convolutions, states, pictures.

    `rounded` gives what is kept of new values, by name, where a port's cache or state is narrower than its dtype.
    """

    length_tokens: int = 0
    kept: dict[str, Tensor] = field(default_factory=dict)
    pictures: Pictures | None = None
    rounded: Callable[..., Tensor] | None = None

    def extend(self, name: str, new_BTK: Tensor) -> Tensor:
        """Append the keys of this call; return those of all tokens so far."""
        if self.rounded is not None:
            new_BTK = self.rounded(name, new_BTK)
        old = self.kept.get(name)
        self.kept[name] = new_BTK if old is None else torch.cat([old, new_BTK], dim=1)
        return self.kept[name]

    def after_last(self, name: str, new_BTK: Tensor, count: int) -> Tensor:
        """Return the values of this call after the last `count` ones of the calls before, zeros where there are none.

        The last `count` are kept for the next call.
        """
        old = self.kept.get(name)
        if old is None:
            old = new_BTK.new_zeros(new_BTK.shape[0], count, new_BTK.shape[2])
        joined = torch.cat([old, new_BTK], dim=1)
        self.kept[name] = joined[:, joined.shape[1] - count :]
        return joined

    def keep_state(self, name: str, state: Tensor) -> None:
        """Keep a recurrent state in place of the one before."""
        self.kept[name] = state if self.rounded is None else self.rounded(name, state, state=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call: where its tokens stand in the request, the request's length, what it keeps, and the recorder."""

    positions_BT: Tensor
    start: int
    length_tokens: int
    cache: Cache
    record: Recorder

    @property
    def places_T(self) -> Tensor:
        """Places of this call's tokens in the request."""
        return self.start + torch.arange(self.positions_BT.shape[1], device=self.positions_BT.device)
