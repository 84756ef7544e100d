"""Tensors of a run under way, in files without names: memory that the system can take back. Must not know runs.

What a run of a large model records can be larger than the window that its weights pass through.
"""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path

import torch
from torch import Tensor

SEGMENT_BYTES = 1 << 26
_LEAST_BYTES = 1 << 12
_ALIGNED = 64


class Spool:
    """Copies of tensors in segments of a file, each of which is given back when its last tensor goes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._segment: mmap.mmap | None = None
        self._used = 0

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy on the CPU; in a file, unless it is small."""
        size = tensor.numel() * tensor.element_size()
        if size < _LEAST_BYTES:
            return tensor.detach().to("cpu", copy=True).contiguous()
        if self._segment is None or self._used + size > len(self._segment):
            self._segment, self._used = self._made(max(size, SEGMENT_BYTES)), 0
        flat = torch.frombuffer(self._segment, dtype=torch.uint8, count=size, offset=self._used)
        self._used += size + -size % _ALIGNED
        return flat.view(tensor.dtype).reshape(tensor.shape).copy_(tensor.detach())

    def _made(self, size: int) -> mmap.mmap:
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            file.truncate(size)
            return mmap.mmap(file.fileno(), size)
