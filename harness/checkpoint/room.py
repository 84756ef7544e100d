"""Memory for large results. Knows the allocator; must not know formats or files.

The first touch of new memory costs more than decoding into it. numpy asks the system for huge pages where it makes a
large array (Linux), torch does not.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory for a tensor, not yet written."""
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.empty(count * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
