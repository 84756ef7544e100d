"""Requests side by side over one cache: admission and turns. Knows the port's stream; must not know HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from harness.adapter import Inputs, silent

if TYPE_CHECKING:
    from accel_impl.port import AccelAdapter


class Turns:
    """A lock that is given in the order in which it was asked for, so that requests take steps in turn."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = self._serving = 0

    def __enter__(self) -> None:
        with self._changed:
            ticket, self._next = self._next, self._next + 1
            self._changed.wait_for(lambda: self._serving == ticket)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._serving += 1
            self._changed.notify_all()


class Engine:
    """Admits a request when its pages and a slot are free, then gives it one step per turn."""

    def __init__(self, port: AccelAdapter) -> None:
        self.port = port
        self._turns = Turns()
        self._room = threading.Condition()
        self._running = 0
        self._promised_pages = 0

    def pages(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Return the pages that a request may come to need."""
        return -(-(prompt_tokens + max_new_tokens) // self.port.config.page_tokens)

    def tokens(self, inputs: Inputs, max_new_tokens: int) -> Iterator[tuple[int, Tensor]]:
        """Yield greedy ids and the logits each was chosen from; other requests take steps in between."""
        facts = self.port.cache_facts()
        need = self.pages(inputs.token_ids.shape[1], max_new_tokens)
        with self._room:
            self._room.wait_for(
                lambda: self._running < facts["slots_total"] and self._promised_pages + need <= facts["pages_total"]
            )
            self._running += 1
            self._promised_pages += need
        stream = self.port.stream(inputs, max_new_tokens, silent)
        try:
            while True:
                with self._turns:
                    item = next(stream, None)
                if item is None:
                    return
                yield item
        finally:
            with self._turns:
                stream.close()
            with self._room:
                self._running -= 1
                self._promised_pages -= need
                self._room.notify_all()
