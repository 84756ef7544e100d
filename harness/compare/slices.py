"""Which rows and channels of a tap belong together: calls, every second token, rows of a picture, ranks.

Knows runs and named axes; must not know limits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from harness.compare.samples import FEWEST_IN_A_MEAN, of_means, worst_of
from harness.compare.values import SMALLEST_SLICE, Ratio
from harness.types import Run, Tap, Trace

STRIDES = (2, 4)
"""Every second and every fourth token: two buffers taken in turn, lanes of a kernel, slots of a small batch."""

Sets = tuple[tuple[str, ...], tuple[str, ...], Tensor]
"""Kinds and labels of some sets of rows, and their members [K, T]."""


def further_slices(
    *, run: Run, tap: Tap, rows: Tensor, total: int, width: int, token: Tensor, samples: Tensor,
    grid: Sequence[Sequence[int]],
) -> list[Ratio]:  # fmt: skip
    """Return the worst mean ratio of the sets of rows that a run's calls, its layout or its pictures make.

    Of sets of one kind and about one size the worst is returned, since a limit depends on the size.
    Shapes: rows [N] are those of `total` rows that are compared, token [N] their error ratios, samples [N] the
    independent numbers behind them. `grid` holds (frames, height, width) of each picture in patches.
    """
    pictures = tuple(tuple(int(x) for x in g) for g in grid) if tap.name.startswith("vision.") else ()
    spans = tuple(run.steps) if run.kind == "steps" else ()
    kinds, labels, member = _sets(spans, run.layout.sp, total, pictures)
    member = member[:, rows]
    size = member.sum(dim=1)
    told = (size >= FEWEST_IN_A_MEAN) & (size * width >= SMALLEST_SLICE) & (size < len(rows))
    mean, inverse = (member.to(torch.float64) @ torch.stack([token, 1 / samples], dim=1)).unbind(dim=1)
    mean, independent = mean / size.clamp(min=1), of_means(size, inverse)
    alike: dict[tuple[str, int], list[int]] = defaultdict(list)
    for place in told.nonzero().reshape(-1).tolist():
        alike[kinds[place], round(len(rows) / int(size[place]))].append(place)
    found = []
    for (kind, _), places in alike.items():
        counted = size[places] * width
        for i, n in worst_of(mean[places], independent[places], counted):
            value, at = float(mean[places[i]]), labels[places[i]]
            found.append(Ratio(slice=kind, value=value, n=n, at=at, counted=int(counted[i])))
    return found


@lru_cache(maxsize=256)
def _sets(
    spans: tuple[tuple[int, int], ...], ranks: int, total: int, pictures: tuple[tuple[int, ...], ...]
) -> Sets:  # fmt: skip
    """Return the sets of rows of a tap with `total` rows; the same for all taps of a run."""
    place = torch.arange(total)
    found: list[tuple[str, str, Tensor]] = []
    if pictures:
        found += _of_pictures(pictures, total)
    else:
        found += [("stride", f"{i} of {n}", place % n == i) for n in STRIDES for i in range(n)]
        ends = [(start, stop if 0 < stop <= total else total + min(0, stop)) for start, stop in spans]
        found += [("call", f"{a}-{b - 1}", (place >= a) & (place < b)) for a, b in ends if b - a > 1]
        found += [("shard", f"rank {i}", place * ranks // total == i) for i in range(ranks) if ranks > 1]
    member = torch.stack([m for _, _, m in found]) if found else torch.zeros(0, total, dtype=torch.bool)
    return tuple(k for k, _, _ in found), tuple(at for _, at, _ in found), member


def _of_pictures(pictures: Sequence[Sequence[int]], total: int) -> list[tuple[str, str, Tensor]]:
    """Return pictures, and their rows and columns of blocks that are merged into one.

    Patches come block by block, or line by line: rows of blocks lie together in both; columns are those of the former.
    """
    patches = sum(t * h * w for t, h, w in pictures)
    step = round((patches / total) ** 0.5) if total and patches % total == 0 else 0
    if step < 1 or step * step * total != patches or any(h % step or w % step for _, h, w in pictures):
        return []
    merge = _merge_of(pictures) if step == 1 else 1
    place, start = torch.arange(total), 0
    found = []
    for number, (frames, high, wide) in enumerate(pictures):
        rows, columns = high // step // merge, wide // step // merge
        count = frames * rows * columns * merge * merge
        inside = (place >= start) & (place < start + count)
        block = (place - start).div(merge * merge, rounding_mode="floor")
        found.append(("picture", f"{number}", inside))
        found += [("row", f"{r} of picture {number}", inside & ((block // columns) % rows == r)) for r in range(rows)]
        found += [("column", f"{c} of picture {number}", inside & (block % columns == c)) for c in range(columns)]
        start += count
    return found


def _merge_of(pictures: Sequence[Sequence[int]]) -> int:
    """Return how many patches by side are surely merged into one: the usual 2 where every side allows it."""
    return 2 if all(h % 2 == 0 and w % 2 == 0 for _, h, w in pictures) else 1


def rank_slices(*, ranks: int, rows: int, channel: Tensor, floor: Tensor) -> list[Ratio]:
    """Return the worst ratio of a rank's share of the channels, as tensor parallelism cuts them.

    Shapes: channel, floor [E] hold squared errors of the port and of the floor by channel.
    """
    width = len(channel)
    n = rows * width // max(1, ranks)
    if ranks < 2 or width % ranks or n < SMALLEST_SLICE:
        return []
    mine, honest = (v.reshape(ranks, -1).sum(dim=1) for v in (channel, floor))
    ratio = torch.where(mine == 0, torch.zeros_like(mine), (mine / honest).sqrt())
    place = int(ratio.argmax())
    return [Ratio(slice="shard", value=float(ratio[place]), n=n, at=f"rank {place}")]


def grid_of(oracle: Trace) -> Sequence[Sequence[int]]:
    """Return (frames, height, width) of each picture of a run, in patches."""
    grid = oracle.tensors.get("inputs.image_grid")
    return grid.reshape(-1, 3).tolist() if grid is not None and grid.numel() % 3 == 0 else ()
