"""What is kept of a weight that no name settled: digests of its rows, no values. Knows one tensor, no checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.checkpoint.rows import Hashes, constant_rows, row_hashes
from harness.checkpoint.values import rounded_digests

_SMALL_ELEMENTS = 1 << 18
Key = tuple[torch.dtype, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Digests of a weight's rows, taken one way: its last axis, or the one before as rows (`transposed`).

    `length`: elements of a row. `cut`: columns of zeros at the end that were left out (padding, if it matches so).
    """

    transposed: bool
    length: int
    hashes: Hashes
    cut: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """What is kept of a weight that no name settled: digests of its rows, taken in each way that may match.

    `small`: the values of a weight that is small, if they are wanted.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    readings: tuple[Reading, ...]
    constant_rows: int
    digests: Mapping[str, str]
    small: Tensor | None

    @staticmethod
    def of(held: Tensor, *, keep: bool = True) -> Pending:
        """Digest a weight; scalars are taken as one row of one element."""
        value = held.reshape(1) if held.dim() == 0 else held
        ways = [(False, value)] + ([(True, value.transpose(-1, -2))] if value.dim() >= 2 else [])
        readings = tuple(r for transposed, v in ways for r in _readings(v, transposed=transposed))
        return Pending(
            dtype=held.dtype,
            shape=tuple(value.shape),
            readings=readings,
            constant_rows=constant_rows(value),
            digests=rounded_digests(held, readings[0].hashes),
            small=value.flatten().clone() if keep and value.numel() <= _SMALL_ELEMENTS else None,
        )

    @property
    def numel(self) -> int:
        """Elements in memory."""
        return torch.Size(self.shape).numel()

    def keys(self) -> set[Key]:
        """Return the row lengths worth looking for."""
        return {(self.dtype, r.length) for r in self.readings}


def _readings(value: Tensor, *, transposed: bool) -> Iterator[Reading]:
    length = value.shape[-1]
    yield Reading(transposed=transposed, length=length, hashes=row_hashes(value))
    if length < 2 or value.dim() < 2 or value.element_size() == 1 or bool(value[..., -1].any()):
        return
    used = value.reshape(-1, length).any(dim=0).nonzero()
    width = int(used[-1, 0]) + 1 if len(used) else 0
    if 2 * width >= length:
        yield Reading(
            transposed=transposed, length=width, hashes=row_hashes(value[..., :width]), cut=length - width
        )  # fmt: skip
