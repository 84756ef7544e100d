"""The weight whose codes are being read: decode each piece, look at its values. Knows pieces; must not know files.

A piece is looked at by whichever thread is free; what it showed is added in the order of the rows.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.decoders import as_bytes
from harness.checkpoint.formats import Logical, decode_parts
from harness.checkpoint.room import room
from harness.checkpoint.scan.convert import Conversion, Fp8Blocks
from harness.checkpoint.scan.pieces import MX_FOUR_BIT, Piece, Pieces
from harness.checkpoint.scan.statistics import Look, Profile, Statistics

IN_FLIGHT = 4
"""Pieces that wait for each helping thread, at most."""


class _Scratch(threading.local):
    """Memory of one thread that each piece is decoded into, and squared in."""

    values: Tensor | None = None
    squares: Tensor | None = None


_SCRATCH = _Scratch()


def _scratch(elements: int) -> tuple[Tensor, Tensor]:
    values, squares = _SCRATCH.values, _SCRATCH.squares
    if values is None or squares is None or values.numel() < elements:
        values, squares = (room((elements,), torch.float32) for _ in range(2))
        _SCRATCH.values, _SCRATCH.squares = values, squares
    return values, squares


@dataclass(frozen=True, slots=True, kw_only=True)
class Helpers:
    """Threads that look at pieces while the next ones are read. `executor` None: the reading thread looks itself."""

    executor: Executor | None = None
    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Due:
    """A piece that was handed to a helper."""

    piece: Piece
    view: memoryview
    parts: dict[str, Tensor]
    look: Future[Look | None]


class Body:
    """What the pieces of one weight decode to, matrix by matrix. `done` gets a piece's memory back.

    Raises:
        CheckpointError: scales cannot be read or, in `take`, do not fit.
        OSError: scales cannot be read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        logical: Logical,
        pieces: Pieces,
        helpers: Helpers,
        done: Callable[[memoryview], None],
    ) -> None:
        self._pieces, self._helpers, self._done = pieces, helpers, done
        self._name, self._format = logical.name, logical.format
        # scales are a small share of a weight; they are read once more where they lie
        self._sides = {role: checkpoint.read(name) for role, name in logical.parts.items() if role != "weight"}
        self._profile = Profile(pieces.block, pieces.rows)
        self._fp8 = self._conversion(0)
        self._due: deque[_Due] = deque()
        self.statistics: list[Statistics] = []
        self.conversions: list[Conversion] = []

    def _conversion(self, matrix: int) -> Fp8Blocks | None:
        """Return what counts the blocks of one matrix of the stack, where its format is one that is converted."""
        scale, pieces = self._sides.get("scale"), self._pieces
        if self._format not in MX_FOUR_BIT or scale is None or matrix >= pieces.matrices:
            return None
        if scale.numel() * 16 != pieces.ref.nbytes or not scale.numel():
            return None  # it does not fit, which decoding tells
        return Fp8Blocks(as_bytes(scale).reshape(pieces.matrices, pieces.rows, -1)[matrix])

    def take(self, view: memoryview, piece: Piece) -> None:
        """Look at one piece, or have it looked at."""
        parts = self._pieces.parts(view, piece, self._sides)
        if self._helpers.executor is None:
            self._add(piece, parts, self._look(parts, self._profile, piece))
            self._done(view)
            return
        look = self._helpers.executor.submit(self._look, parts, self._profile, piece)
        self._due.append(_Due(piece=piece, view=view, parts=parts, look=look))
        if len(self._due) >= IN_FLIGHT * self._helpers.count or piece.stop == self._pieces.rows:
            self._settle(keep=0 if piece.stop == self._pieces.rows else self._helpers.count)

    def _look(self, parts: dict[str, Tensor], profile: Profile, piece: Piece) -> Look | None:
        weight, logical = parts["weight"], self._pieces.logical
        assert logical is not None
        values, squares = _scratch(
            max(1, logical.numel // max(1, self._pieces.matrices * self._pieces.rows)) * len(weight)
        )
        return profile.look(decode_parts(logical, parts, out=values), piece.start, squares)

    def _settle(self, keep: int) -> None:
        while len(self._due) > keep:
            due = self._due.popleft()
            try:
                self._add(due.piece, due.parts, due.look.result())
            finally:
                self._done(due.view)

    def drop(self) -> None:
        """Wait for what was handed to helpers, and forget it: its memory may be written over afterwards."""
        for due in self._due:
            due.look.exception()
            self._done(due.view)
        self._due.clear()

    def _add(self, piece: Piece, parts: dict[str, Tensor], look: Look | None) -> None:
        self._profile.add(look)
        if self._fp8 is not None:
            self._fp8.take(parts["weight"], piece.start)
        if piece.stop == self._pieces.rows:
            self._next(piece)

    def _next(self, piece: Piece) -> None:
        pieces = self._pieces
        name = f"{self._name}[{piece.matrix}]" if pieces.matrices > 1 else self._name
        at = pieces.ref.begin + piece.matrix * pieces.rows * pieces.row_bytes
        self.statistics.append(
            self._profile.result(name=name, format=self._format, file=pieces.ref.file, offset=at)
        )  # fmt: skip
        self._profile = Profile(pieces.block, pieces.rows)
        if self._fp8 is not None:
            self.conversions.append(self._fp8.result(name))
            self._fp8 = self._conversion(piece.matrix + 1)
