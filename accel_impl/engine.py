"""Requests side by side: admission, chunks of prompts between steps of answers, the tower beside both.

Knows the port's steps; must not know HTTP or the model. One thread takes all steps, so a step never waits for another;
a second one runs the tower, whose rows depend on nothing else. In every round each answer goes on by a step, then one
prompt by a chunk.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_impl.cache import pages_for
from accel_impl.seen import SeenPictures
from accel_impl.speculate import turn
from harness.adapter import Inputs, silent
from harness.errors import PortError

if TYPE_CHECKING:
    from accel_impl.port import AccelAdapter

CLOSE_TIMEOUT_S = 30.0
SEEN_ROWS = 16384
"""Rows of pictures that are kept beside the cache."""


class Growing:
    """A request whose tokens become more, in buffers that hold all of them from the beginning."""

    def __init__(self, inputs: Inputs, more: int) -> None:
        length = inputs.token_ids.shape[-1]
        self.prompt, self.length, self.extras = length, length, inputs.extras
        self._ids = torch.nn.functional.pad(inputs.token_ids, (0, more))
        positions = inputs.position_ids if inputs.position_ids is not None else torch.arange(length)[None]
        further = positions[..., -1:].amax() + torch.arange(1, more + 1)
        self._positions = torch.cat((positions, further.expand(*positions.shape[:-1], more)), dim=-1)

    def append(self, token: int) -> None:
        """Add a token."""
        self._ids[0, self.length] = token
        self.length += 1

    def inputs(self, length: int | None = None) -> Inputs:
        """Return the first tokens, all of them by default."""
        stop = self.length if length is None else length
        return Inputs(token_ids=self._ids[:, :stop], position_ids=self._positions[..., :stop], extras=self.extras)


@dataclass(eq=False, kw_only=True)
class Request:
    """One request on its way. `done` tokens are in the cache; None or an exception ends its `answers`."""

    tokens: Growing
    left: int
    pages: int
    answers: SimpleQueue[tuple[int, Tensor] | BaseException | None] = field(default_factory=SimpleQueue)
    cancelled: bool = False
    slot: int = -1
    done: int = 0
    rows: Future[Any] | None = None

    @property
    def filling(self) -> bool:
        """Say whether more than the newest token is to be computed: a prompt, not an answer."""
        return self.done < self.tokens.prompt


class Engine:
    """Admits a request when a slot and all the pages that it may come to need are free, first come, first served."""

    def __init__(self, port: AccelAdapter) -> None:
        self.port, self.cache = port, port.memory_in_use().pages
        self.chunk, self.together, self.drafts = (int(port.options[key]) for key in ("chunk", "together", "drafts"))
        self.reuse = port.reuse()
        self.seen = SeenPictures(port, most_rows=SEEN_ROWS)
        self._changed = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._promised_pages = 0
        self._thread: threading.Thread | None = None
        self._tower = ThreadPoolExecutor(1, thread_name_prefix="tower")
        self._closed = False
        self.drafted = self.accepted = 0

    # ---- asked from any thread

    def pages(self, inputs: Inputs, max_new_tokens: int) -> int:
        """Return the pages that a request may come to need, those for the keys of its pictures included."""
        tokens = inputs.token_ids.shape[-1] + max_new_tokens + self.drafts
        return pages_for(tokens, self.port.picture_rows(inputs), self.port.config.page_tokens)

    def check(self, inputs: Inputs, max_new_tokens: int) -> None:
        """Raise PortError for a request that the cache could not hold if it were empty."""
        need, total = self.pages(inputs, max_new_tokens), self.cache.pages
        if need > total:
            length = inputs.token_ids.shape[-1]
            raise PortError(
                f"expected a request of at most {total} pages, found {length} + {max_new_tokens} tokens, {need} pages"
            )

    def tokens(self, inputs: Inputs, max_new_tokens: int) -> Generator[tuple[int, Tensor], None, None]:
        """Yield greedy ids and the logits [vocabulary] each was chosen from. Closing it frees everything.

        Raises what the request's step raised.
        """
        self.check(inputs, max_new_tokens)
        request = Request(
            tokens=Growing(inputs, max_new_tokens + self.drafts),
            left=max_new_tokens,
            pages=self.pages(inputs, max_new_tokens),
        )
        self._submit(request)
        try:
            while (item := request.answers.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            with self._changed:
                request.cancelled = True
                self._changed.notify_all()

    def facts(self) -> dict[str, int]:
        """Return how many requests wait and run, and what prefixes and drafts saved."""
        with self._changed:
            found = {"requests_waiting": len(self._waiting), "requests_running": len(self._running)}
        drafts = {"drafted_tokens": self.drafted, "accepted_tokens": self.accepted, "pictures_seen": self.seen.hits}
        return {**found, **drafts, **self.reuse.facts()}

    def close(self) -> None:
        """End all requests and both threads, and forget every prefix."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        self._tower.shutdown(wait=True, cancel_futures=True)
        self.reuse.forget()

    def _submit(self, request: Request) -> None:
        with self._changed:
            if self._closed:
                raise PortError("expected an open engine, found it closed")
            self._waiting.append(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    # ---- the thread of steps

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._ready())
                if self._closed:
                    for request in [*self._running, *self._waiting]:
                        self._end(request, PortError("the engine was closed"))
                    return
            try:
                with torch.no_grad():
                    self._round()
            except Exception as error:  # a mistake of the engine itself: nobody may wait for ever
                with self._changed:
                    self._closed = True
                    for request in [*self._running, *self._waiting]:
                        request.answers.put(error)
                return

    def _ready(self) -> bool:
        """Say whether a round would do anything."""
        if any(r.cancelled for r in [*self._running, *self._waiting]):
            return True
        return any(_can_go(r) for r in self._running) or bool(self._waiting and self._fits(self._waiting[0]))

    def _fits(self, request: Request) -> bool:
        promised = self._promised_pages + request.pages
        return len(self._running) < self.cache.slots and promised <= self.cache.pages

    def _round(self) -> None:
        for request in [r for r in [*self._running, *self._waiting] if r.cancelled]:
            self._end(request, None)
        self._admit()
        answering = [r for r in self._running if not r.filling]
        for at in range(0, len(answering), self.together):
            self._guarded(answering[at : at + self.together], self._answer)
        filling = next((r for r in self._running if r.filling and _can_go(r)), None)
        if filling is not None:
            self._guarded([filling], self._fill)

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0]):
            with self._changed:
                request = self._waiting.popleft()
                self._running.append(request)
                self._promised_pages += request.pages
            self._guarded([request], self._begin)

    def _guarded(self, requests: list[Request], act: Callable[[list[Request]], None]) -> None:
        """Do something for requests; what it raises ends them, and nobody else."""
        try:
            act(requests)
        except Exception as error:  # handed to the requests' own threads
            for request in requests:
                self._end(request, error)

    def _end(self, request: Request, error: BaseException | None) -> None:
        """Free everything that a request holds, and say so to who waits for it."""
        with self._changed:
            if request in self._waiting:
                self._waiting.remove(request)
            if request in self._running:
                self._running.remove(request)
                self._promised_pages -= request.pages
        if request.rows is not None:
            request.rows.cancel()
        if request.slot >= 0:  # what a step that failed left behind is not kept
            self.reuse.free(request.slot, request.tokens.inputs() if error is None else None)
            request.slot = -1
        request.answers.put(error)

    # ---- steps

    def _begin(self, requests: list[Request]) -> None:
        """Take a slot, with what is there of the request already; send its pictures to the tower."""
        (request,) = requests
        inputs = request.tokens.inputs()
        request.slot, request.done = self.reuse.resume(inputs, further=self.drafts > 0)
        if self.port.needs_rows(request.slot, inputs, request.done):
            request.rows = self._tower.submit(self.seen.rows, inputs)
            request.rows.add_done_callback(self._wake)

    def _wake(self, _: Any) -> None:
        with self._changed:
            self._changed.notify_all()

    def _fill(self, requests: list[Request]) -> None:
        """Take a prompt on by one chunk; the last one gives the first token."""
        (request,) = requests
        if request.rows is not None:
            self.port.attach(request.slot, request.rows.result())
            request.rows = None
        prompt = request.tokens.prompt
        stop = self.reuse.stop(request.done, prompt, self.chunk)
        inputs = request.tokens.inputs(prompt)
        found = self.port.advance(request.slot, inputs, request.done, stop, silent, further=self.drafts > 0)
        request.done = stop
        self.reuse.keep(request.slot, inputs)
        if stop == prompt:
            self._give(request, found.logits[0, -1])

    def _answer(self, requests: list[Request]) -> None:
        """Take answers on: several by one step together, one by a step or a turn of drafts of its own."""
        if len(requests) > 1:
            last = [int(r.tokens.inputs().token_ids[0, -1]) for r in requests]
            logits_BTV = self.port.decode_together([r.slot for r in requests], last, further=self.drafts > 0).logits
            for request, logits_TV in zip(requests, logits_BTV, strict=True):
                self._took(request, [logits_TV[-1]])
            return
        (request,) = requests
        inputs = request.tokens.inputs()
        if self.drafts and request.left > 1:
            taken = turn(self.port, request.slot, inputs, min(self.drafts, request.left - 1))
            self.drafted, self.accepted = self.drafted + taken.drafted, self.accepted + taken.accepted
            self._took(request, list(taken.logits))
        else:
            length = request.tokens.length
            found = self.port.advance(request.slot, inputs, request.done, length, silent, further=self.drafts > 0)
            self._took(request, [found.logits[0, -1]])

    def _took(self, request: Request, logits: list[Tensor]) -> None:
        """Hand out what each of some places says comes next, and keep what the slot holds where that is due."""
        for one in logits:
            request.done += 1
            if not self._give(request, one):
                return
        self.reuse.keep(request.slot, request.tokens.inputs())

    def _give(self, request: Request, logits: Tensor) -> bool:
        """Hand out the next token; end the request after its last one, and say whether it goes on."""
        token = int(logits.argmax())
        request.tokens.append(token)
        request.left -= 1
        request.answers.put((token, logits.cpu()))
        limit = self.port.config.max_position_embeddings
        if token in self.port.config.eos_token_id or not request.left or request.tokens.length > limit:
            self._end(request, None)
            return False
        return True


def _can_go(request: Request) -> bool:
    return not request.filling or request.rows is None or request.rows.done()
