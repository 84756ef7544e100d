"""This rank's place in a layout, and all places of one in threads. Knows how things are cut; must not know the model.

A cut never goes through a head, an expert, a layer or a quantisation block; earlier ranks take the larger share.
Partial sums are reduced in float32 and rounded once.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accel_impl.comm import TIMEOUT_S, Alone, Comm, Distributed, Hub, Simulated
from harness.adapter import Recorder
from harness.errors import PortError, UsageError
from harness.types import Layout


def shares(total: int, parts: int, *, unit: int = 1) -> list[range]:
    """Cut `total` into `parts` consecutive ranges at multiples of `unit`; earlier parts take the larger share."""
    blocks = -(-total // unit)
    if blocks < parts:
        raise UsageError(
            f"expected at least {parts} blocks of {unit} to cut {total} over {parts} ranks, found {blocks}"
        )
    counts = [blocks // parts + (index < blocks % parts) for index in range(parts)]
    starts = [sum(counts[:index]) * unit for index in range(parts + 1)]
    return [range(start, min(stop, total)) for start, stop in itertools.pairwise(starts)]


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank's place. Ranks are stage-major: rank = stage * group size + place in the group.

    Expert parallelism reuses the tensor-parallel ranks, so `tp` and `ep` are equal or one of them is 1. `leader` says
    that this rank speaks for its stage.
    """

    layout: Layout = field(default_factory=Layout)
    rank: int = 0
    inner: Comm = field(default_factory=Alone)
    everyone: Comm = field(default_factory=Alone)
    idle: bool = False

    @property
    def width(self) -> int:
        """Ranks of one pipeline stage."""
        return max(self.layout.tp, self.layout.ep)

    @property
    def stage(self) -> int:
        """Pipeline stage of this rank."""
        return self.rank // self.width

    @property
    def first(self) -> bool:
        """True where the embedding lives."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """True where the final norm and lm_head live."""
        return self.stage == self.layout.pp - 1

    @property
    def leader(self) -> bool:
        """True for the first rank of each stage."""
        return self.rank % self.width == 0

    @property
    def tp(self) -> Comm:
        """The group that cuts matrices."""
        return self.inner if self.layout.tp > 1 else Alone()

    @property
    def ep(self) -> Comm:
        """The group that cuts the list of experts."""
        return self.inner if self.layout.ep > 1 else Alone()

    def cut(self, total: int, *, unit: int = 1) -> range:
        """Return this rank's tensor-parallel share."""
        return shares(total, self.layout.tp, unit=unit)[self.tp.rank]

    def experts(self, total: int) -> range:
        """Return the experts held here."""
        return shares(total, self.layout.ep)[self.ep.rank]

    def expert_cut(self, total: int, *, unit: int) -> range:
        """Return this rank's share inside each expert: all of it where experts are spread whole."""
        return range(total) if self.layout.ep > 1 else self.cut(total, unit=unit)

    def layers(self, total: int) -> range:
        """Return the layers held here."""
        return shares(total, self.layout.pp)[self.stage]

    def reduce(self, partial: Tensor) -> Tensor:
        """Sum a row-parallel result over the tensor-parallel group."""
        return self.tp.all_reduce(partial) if self.tp.size > 1 else partial

    def reduce_experts(self, partial: Tensor) -> Tensor:
        """Sum what each rank's experts (or shares of experts) gave."""
        return self.inner.all_reduce(partial) if self.inner.size > 1 else partial

    def gather(self, value: Tensor, total: int, dim: int, *, unit: int = 1) -> Tensor:
        """Join a tensor-parallel result along `dim`."""
        sizes = [len(share) for share in shares(total, self.layout.tp, unit=unit)]
        return self.tp.all_gather(value, sizes, dim) if self.tp.size > 1 else value

    def record_cut(self, record: Recorder, tap: str, value: Tensor, total: int, dim: int, dims: str) -> Tensor:
        """Record a cut tensor whole, and return this rank's part of what the recorder gave back."""
        if self.tp.size == 1:
            return record(tap, value, dims=dims)
        share = self.cut(total)
        return record(tap, self.gather(value, total, dim), dims=dims).narrow(dim, share.start, len(share))

    def send_on(self, hidden: Tensor) -> None:
        """Hand the hidden state to the same place of the next stage."""
        self.everyone.send(hidden, self.rank + self.width)

    def take_over(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Take the hidden state of the stage before."""
        return self.everyone.receive(shape, dtype, self.rank - self.width)

    def share_logits(self, logits: Tensor | None, shape: Sequence[int]) -> Tensor:
        """Give every stage the last one's logits."""
        if self.layout.pp == 1:
            assert logits is not None
            return logits
        return self.everyone.broadcast(logits, shape, torch.float32, (self.layout.pp - 1) * self.width)


def check_layout(layout: Layout) -> None:
    """Raise UsageError for a layout that this port does not know."""
    if layout.sp != 1:
        raise UsageError(f"expected sp = 1, found {layout}: this port has no sequence parallelism")
    if layout.tp > 1 and layout.ep > 1 and layout.tp != layout.ep:
        raise UsageError(
            f"expected tp = ep where both are used, found {layout}: experts reuse the tensor-parallel ranks"
        )


def distributed_place(layout: Layout, device: torch.device | str = "cpu") -> Place:
    """Take this process's place in a layout; every rank of the world must call it. Ranks beyond the layout are idle."""
    import torch.distributed as dist

    check_layout(layout)
    if not dist.is_initialized() or dist.get_world_size() < layout.world_size:
        found = dist.get_world_size() if dist.is_initialized() else "no process group"
        raise UsageError(
            f"expected a world of at least {layout.world_size} ranks for {layout}, found {found}; use torchrun"
        )
    me, width = dist.get_rank(), max(layout.tp, layout.ep)
    everyone = list(range(layout.world_size))
    groups = [(everyone, dist.new_group(everyone))]
    for stage in range(layout.pp):
        ranks = everyone[stage * width : (stage + 1) * width]
        groups.append((ranks, dist.new_group(ranks)))
    if me >= layout.world_size:
        return Place(layout=layout, rank=me, idle=True)
    ranks, group = groups[1 + me // width]
    inner, outer = Distributed(group, ranks, device), Distributed(groups[0][1], everyone, device)
    return Place(layout=layout, rank=me, inner=inner, everyone=outer)


class Fleet:
    """All ranks of a layout as threads of this process."""

    def __init__(self, layout: Layout) -> None:
        check_layout(layout)
        self.layout, self.width = layout, max(layout.tp, layout.ep)
        self._all = Hub(size=layout.world_size)
        self._stages = [Hub(size=self.width) for _ in range(layout.pp)]

    def place(self, rank: int) -> Place:
        """Return one rank's place."""
        inner: Comm = Simulated(self._stages[rank // self.width], rank % self.width) if self.width > 1 else Alone()
        return Place(layout=self.layout, rank=rank, inner=inner, everyone=Simulated(self._all, rank))

    def run(self, work: Callable[[int], Tensor]) -> list[Tensor]:
        """Call `work(rank)` on every rank and return the results. Raises what the first failing rank raised."""
        results: list[Any] = [None] * self.layout.world_size
        failures: list[tuple[int, BaseException]] = []

        def body(rank: int) -> None:
            try:
                with torch.no_grad():
                    results[rank] = work(rank)
            except Exception as error:  # carried to the caller below
                failures.append((rank, error))
                for hub in (self._all, *self._stages):
                    hub.abort()

        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(self.layout.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10 * TIMEOUT_S)
        if failures:
            rank, error = next((f for f in failures if not isinstance(f[1], threading.BrokenBarrierError)), failures[0])
            raise PortError(f"rank {rank} of {self.layout}: {type(error).__name__}: {error}") from error
        return results


class SharedRecorder:
    """The recorder of one simulated stage: its leader records; where that overwrites a tensor, its peers take it over.

    A peer goes on with its own value where nothing was overwritten, so that ranks which drift apart stay visible.
    """

    def __init__(self, record: Recorder, inner: Comm) -> None:
        self._record, self._inner = record, inner

    def __call__(self, tap: str, tensor: Tensor, *, dims: str = "", kind: str = "") -> Tensor:
        """Record on the leader, hand an overwritten value to its peers."""
        given = None
        if self._inner.rank == 0:
            result = self._record(tap, tensor, dims=dims, kind=kind)
            given = None if result is tensor else result
        if isinstance(self._inner, Simulated):
            given = self._inner.exchange(given)[0]
        return tensor if given is None else given
