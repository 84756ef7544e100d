"""What every collective must give, exactly. Knows ranks, counts and dtypes; must not know process groups or limits.

Values are small integers, chosen so that a sum over all ranks is exact in every dtype (256 is the last integer that
bfloat16 holds with all its neighbours): whatever the order of the reduction, one right answer exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
DTYPES: Mapping[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int64": torch.int64}
COUNTS = (1, 7, 256, 4099)
"""Elements per rank: one, odd, a power of two, and a prime beyond one page of bfloat16."""
EXACT_IN_BFLOAT16 = 256


def contribution(*, rank: int, count: int, dtype: torch.dtype, world: int, part: int = 0) -> Tensor:
    """Return what `rank` puts in: integers that differ by rank, place and part. Shapes: [count].

    `part` numbers the pieces that one rank sends to different ranks. In a world of up to 16 no two ranks hold the same
    vector, so a rank that is left out, counted twice or taken for another one changes the answer.
    """
    half = max(1, EXACT_IN_BFLOAT16 // (2 * world))
    places = torch.arange(count, dtype=torch.int64)
    return ((places * 5 + rank * 11 + part * 17 + places // 8 + 3) % (2 * half) - half).to(dtype)


def all_to_all_counts(*, rank: int, count: int, world: int) -> list[int]:
    """Return how many elements `rank` sends to each rank: uneven, and not symmetric between two ranks."""
    return [max(1, count - (rank + 2 * to) % 3) for to in range(world)]


def expected(operation: str, *, rank: int, count: int, dtype: torch.dtype, world: int) -> Tensor:
    """Return what `rank` must hold after a collective over `world` ranks. Shapes: flat.

    `broadcast` comes from the last rank; `send_recv` passes along a ring, from rank r to r + 1.
    """

    def put(source: int, part: int = 0, n: int = count) -> Tensor:
        return contribution(rank=source, count=n, dtype=dtype, world=world, part=part)

    ranks = range(world)
    if operation == "all_reduce":
        return _sum([put(r) for r in ranks])
    if operation == "all_gather":
        return torch.cat([put(r) for r in ranks])
    if operation == "reduce_scatter":
        return _sum([put(r, rank) for r in ranks])
    if operation == "all_to_all":
        return torch.cat([put(r, rank, all_to_all_counts(rank=r, count=count, world=world)[rank]) for r in ranks])
    if operation == "broadcast":
        return put(world - 1)
    if operation == "send_recv":
        return put((rank - 1) % world)
    raise ValueError(f"expected a collective of {OPERATIONS}, found {operation!r}")


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([p.to(torch.int64) for p in parts]).sum(0).to(parts[0].dtype)


def wrong_elements(*, actual: Tensor, expected: Tensor) -> int:
    """Count the elements that are not exactly right; a wrong shape or dtype makes all of them wrong, NaN is wrong."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return max(1, actual.numel(), expected.numel())
    return int((actual.cpu() != expected).sum())


def first_wrong(*, actual: Tensor, expected: Tensor) -> int | None:
    """Return the flat index of the first element that is not exactly right, or None. Shapes must be equal."""
    if actual.shape != expected.shape:
        return 0
    wrong = (actual.cpu() != expected).flatten().nonzero()
    return int(wrong[0]) if len(wrong) else None


def merge_shards(parts: Sequence[Tensor], *, shape: Sequence[int]) -> Tensor | None:
    """Put the ranks' pieces of one tensor together, in rank order; None where they do not add up to `shape`.

    The axis is the only one along which the pieces differ from the whole. Uneven pieces are fine.
    """
    if not parts or any(p.dim() != len(shape) for p in parts):
        return None
    axes = [a for a in range(len(shape)) if any(p.shape[a] != shape[a] for p in parts)]
    if len(axes) != 1 or sum(p.shape[axes[0]] for p in parts) != shape[axes[0]]:
        return None
    return torch.cat(list(parts), dim=axes[0])


def unequal_elements(*, actual: Tensor, expected: Tensor) -> int:
    """Count the elements in which two ranks' copies of one tensor differ; NaN equals NaN, shapes must agree."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return max(1, actual.numel(), expected.numel())
    differ = actual != expected
    if actual.is_floating_point():
        differ &= ~(actual.isnan() & expected.isnan())
    return int(differ.sum())
