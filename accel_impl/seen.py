"""Rows of pictures that the tower has seen, kept by content. Knows digests and rows; must not know requests' tokens.

Each picture goes through the tower on its own, so its rows do not depend on its company, and are the same when they are
taken from here. The least recently used go first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accel_impl.model import Pictures
from accel_impl.prefix import picture_digests
from accel_impl.prepare import placeholders
from harness.adapter import Inputs, silent
from harness.errors import PortError

if TYPE_CHECKING:
    from accel_impl.port import AccelAdapter


class SeenPictures:
    """The tower of a port behind a store of at most `most_rows` rows."""

    def __init__(self, port: AccelAdapter, *, most_rows: int) -> None:
        self.port, self.most_rows = port, most_rows
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = 0

    @torch.no_grad()
    def rows(self, inputs: Inputs) -> Pictures:
        """Return what the tower makes of a request's pictures."""
        grids = inputs.extras["image_grid"]
        parts = inputs.extras["pixel_values"].split([int(n) for n in grids.prod(-1)])
        digests = picture_digests(inputs.extras)
        given = torch.cat([self._one(*picture) for picture in zip(digests, parts, grids, strict=True)], dim=1)
        places_M = placeholders(inputs, self.port.config.image_token_id)
        return Pictures(rows_MF=given[0], deepstack=tuple(given[1:]), places_M=places_M)

    def _one(self, digest: bytes, patches: Tensor, grid: Tensor) -> Tensor:
        """Return one picture's rows [1 + outlets, M, F]: at the placeholders, then of each outlet."""
        with self._lock:
            if digest in self._kept:
                self.hits += 1
                self._kept.move_to_end(digest)
                return self._kept[digest]
        if self.port.model is None or self.port.model.tower is None:
            raise PortError("expected a loaded port with a vision tower, found none; call load first")
        rows, deepstack = self.port.model.tower(patches, grid[None], silent)
        found = torch.stack((rows, *deepstack))
        with self._lock:
            self._kept[digest] = found
            while sum(kept.shape[1] for kept in self._kept.values()) > self.most_rows and len(self._kept) > 1:
                self._kept.popitem(last=False)
        return found
