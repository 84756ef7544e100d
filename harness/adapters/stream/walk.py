"""Several forwards that go through the same places together. Knows threads and turns; must not know weights.

Each forward has a thread of its own, and one of them runs at a time, so what they compute is what they would compute
alone. Who comes to a place that is not open waits; when all wait, the next place in order is opened and they pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Walk:
    """Turns. `is_open` says whether a place can be entered; `open_place` opens one for those who ask for it by key."""

    def __init__(
        self, order: Sequence[str], is_open: Callable[[str], bool], open_place: Callable[[str, Sequence[str]], None]
    ) -> None:
        self._order = {place: number for number, place in enumerate(order)}
        self._is_open, self._open_place = is_open, open_place
        self._changed = threading.Condition()
        self._waiting: dict[int, tuple[str, str] | None] = {}
        self._turn: int | None = None
        self._at = -1
        self._mine = threading.local()

    def together(self, tasks: Sequence[Callable[[], T]]) -> list[T | BaseException]:
        """Do tasks in lock-step; return what each gave, or raised. Two that need no place run one after the other."""
        if not tasks:
            return []
        self._waiting = dict.fromkeys(range(len(tasks)))
        with ThreadPoolExecutor(max_workers=len(tasks), thread_name_prefix="walk") as threads:
            futures = [threads.submit(self._do, number, task) for number, task in enumerate(tasks)]
            with self._changed:
                self._pass_on()
        return [future.exception() or future.result() for future in futures]

    def wait(self, place: str, key: str) -> None:
        """Return when a place is open and it is this thread's turn. Called by what runs in `together`."""
        me: int = self._mine.number
        with self._changed:
            if self._is_open(place):
                return
            self._waiting[me] = (place, key)
            self._pass_on()
            self._changed.wait_for(lambda: self._turn == me)

    @property
    def inside(self) -> bool:
        """Say whether this thread is one that walks."""
        return getattr(self._mine, "number", None) is not None

    def _do(self, number: int, task: Callable[[], T]) -> T:
        self._mine.number = number
        with self._changed:
            self._changed.wait_for(lambda: self._turn == number)
        try:
            return task()
        finally:
            with self._changed:
                self._pass_on()

    def _pass_on(self) -> None:
        """Give the turn to the first who can go on; where nobody can, open the next place."""
        ready = self._ready()
        if not ready and self._waiting:
            asked = [each for each in self._waiting.values() if each is not None]
            place = min((place for place, _ in asked), key=self._distance)
            self._at = self._order.get(place, -1)
            self._open_place(place, list(dict.fromkeys(key for at, key in asked if at == place)))
            ready = self._ready()
        self._turn = min(ready) if ready else None
        if self._turn is not None:
            del self._waiting[self._turn]
        self._changed.notify_all()

    def _ready(self) -> list[int]:
        return [number for number, each in self._waiting.items() if each is None or self._is_open(each[0])]

    def _distance(self, place: str) -> int:
        """Return how many places further on one is, round and round."""
        return (self._order.get(place, 0) - self._at - 1) % max(1, len(self._order))
