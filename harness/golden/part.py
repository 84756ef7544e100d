"""One safetensors file of a trace, mapped into memory. Knows the container's bytes; must not know traces.

The library's own reader opens a storage for each tensor, which costs as much as touching the bytes of a small one.
Source: the format's README, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch

_LENGTH_BYTES = 8


class Part:
    """Tensors of one file by key, as views on it: what is written into one stays in this process."""

    def __init__(self, path: Path) -> None:
        """Map a file. Raises OSError where it cannot be read, ValueError where it is no safetensors file."""
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        length = int.from_bytes(self._map[:_LENGTH_BYTES], "little")
        self._start = _LENGTH_BYTES + length
        if not 0 < length <= len(self._map) - _LENGTH_BYTES:
            raise ValueError(f"a header of {length} bytes in a file of {len(self._map)}")
        header = json.loads(self._map[_LENGTH_BYTES : self._start])
        if not isinstance(header, dict):
            raise ValueError(f"a header that is a {type(header).__name__}")
        self._header = header

    def tensor(self, key: str, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor. Raises ValueError where the file does not hold one of this size."""
        try:
            begin, end = self._header[key]["data_offsets"]
            inside = 0 <= begin <= end <= len(self._map) - self._start
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no tensor {key!r} in its header ({error!r})") from error
        size = math.prod(shape) * dtype.itemsize
        if not inside or end - begin != size:
            raise ValueError(f"bytes {begin} to {end} for {key!r}, where {size} bytes were expected")
        if size == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        start = self._start + begin
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=start)
        if start % dtype.itemsize:
            flat = flat.clone()  # written by hand: no element lies where its kind must
        return flat.view(dtype).reshape(tuple(shape))
