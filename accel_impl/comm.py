"""Collectives of one group of ranks: over torch.distributed, between threads, or alone. Knows no layouts, no models."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from harness.errors import PortError

TIMEOUT_S = 60.0


class Comm(Protocol):
    """The collectives of one group. Ranks are counted inside the group."""

    rank: int
    size: int

    def all_reduce(self, value: Tensor) -> Tensor:
        """Return the sum over ranks, the same bits everywhere."""

    def all_gather(self, value: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """Return the ranks' values joined along `dim`; `sizes` says how long each one is there."""

    def broadcast(self, value: Tensor | None, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Return the value of rank `source`."""

    def send(self, value: Tensor, target: int) -> None:
        """Hand a value to another rank."""

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Take a value that another rank sends."""


class Alone:
    """The group of one."""

    rank, size = 0, 1

    def all_reduce(self, value: Tensor) -> Tensor:
        """Return the value."""
        return value

    def all_gather(self, value: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """Return the value."""
        return value

    def broadcast(self, value: Tensor | None, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Return the value."""
        assert value is not None
        return value

    def send(self, value: Tensor, target: int) -> None:
        """Refuse: there is nobody."""
        raise PortError(f"expected a peer {target} to send to, found a group of one")

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Refuse: there is nobody."""
        raise PortError(f"expected a peer {source} to receive from, found a group of one")


class Distributed:
    """A group of torch.distributed. `ranks` are the world's, in the group's order; values live on `device`.

    gloo moves what lies on the host, so what lies elsewhere goes through it; other backends take the device's own.
    """

    def __init__(self, group: Any, ranks: Sequence[int], device: torch.device | str = "cpu") -> None:
        import torch.distributed as dist

        self._dist, self._group, self._ranks = dist, group, list(ranks)
        self.rank, self.size = self._ranks.index(dist.get_rank()), len(ranks)
        self._home = torch.device(device)
        self._road = torch.device("cpu") if dist.get_backend(group) == "gloo" else self._home

    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum in place of a copy."""
        total = value.to(self._road, copy=True).contiguous()
        self._dist.all_reduce(total, group=self._group)
        return total.to(self._home)

    def all_gather(self, value: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """Pad to the longest, gather, cut the padding off."""
        longest, value = max(sizes), value.to(self._road)
        padded = value.new_zeros(*value.shape[:dim], longest, *value.shape[dim + 1 :])
        padded.narrow(dim, 0, value.shape[dim]).copy_(value)
        parts = [torch.empty_like(padded) for _ in sizes]
        self._dist.all_gather(parts, padded, group=self._group)
        whole = torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim=dim)
        return whole.to(self._home)

    def broadcast(self, value: Tensor | None, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Broadcast inside the group."""
        result = torch.empty(*shape, dtype=dtype, device=self._road) if value is None else value.to(self._road)
        result = result.contiguous()
        self._dist.broadcast(result, src=self._ranks[source], group=self._group)
        return result.to(self._home)

    def send(self, value: Tensor, target: int) -> None:
        """Send and wait until the buffer may be used again."""
        self._dist.send(value.to(self._road).contiguous(), dst=self._ranks[target], group=self._group)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Receive into a buffer of its own."""
        value = torch.empty(*shape, dtype=dtype, device=self._road)
        self._dist.recv(value, src=self._ranks[source], group=self._group)
        return value.to(self._home)


@dataclass(kw_only=True)
class Hub:
    """Where the threads of a simulated group meet."""

    size: int
    barrier: threading.Barrier = field(init=False)
    board: list[Any] = field(init=False)
    mail: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    arrived: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)
        self.board = [None] * self.size

    def abort(self) -> None:
        """Wake everybody who waits; they raise."""
        self.barrier.abort()
        with self.arrived:
            self.mail.clear()
            self.arrived.notify_all()


class Simulated:
    """One rank of a simulated group: a thread among threads of one process."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub, self.rank, self.size = hub, rank, hub.size

    def exchange(self, value: Any) -> list[Any]:
        """Return what every rank put in, in rank order."""
        self._hub.board[self.rank] = value
        self._hub.barrier.wait(TIMEOUT_S)
        values = list(self._hub.board)
        self._hub.barrier.wait(TIMEOUT_S)
        return values

    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum in rank order."""
        values = self.exchange(value)
        total = values[0].clone()
        for other in values[1:]:
            total += other
        return total

    def all_gather(self, value: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """Join in rank order."""
        values = self.exchange(value)
        found = [v.shape[dim] for v in values]
        if found != list(sizes):
            raise PortError(f"expected shards of {list(sizes)} along axis {dim}, found {found}")
        return torch.cat(values, dim=dim)

    def broadcast(self, value: Tensor | None, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Take the source's value."""
        result: Tensor = self.exchange(value)[source].clone()
        return result

    def send(self, value: Tensor, target: int) -> None:
        """Leave a copy for the target."""
        with self._hub.arrived:
            self._hub.mail.setdefault((self.rank, target), []).append(value.clone())
            self._hub.arrived.notify_all()

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Wait for the source's value."""
        key = (source, self.rank)
        with self._hub.arrived:
            ready = lambda: bool(self._hub.mail.get(key)) or self._hub.barrier.broken  # noqa: E731
            if not self._hub.arrived.wait_for(ready, TIMEOUT_S) or not self._hub.mail.get(key):
                raise PortError(f"expected a tensor from rank {source} within {TIMEOUT_S:.0f} s, found none")
            return self._hub.mail[key].pop(0)
