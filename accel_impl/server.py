"""The port's endpoint: OpenAI's completions and chat completions, greedy, on loopback. Knows HTTP, not tensors.

Imported only when the port is asked to serve.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse

from accel_impl.engine import Engine
from accel_impl.tokenizer import StopText, TextStream
from accel_impl.wire import MODEL, BadRequest, Job, job_of, joined, token_logprobs
from harness.errors import Day0Error, PortError

if TYPE_CHECKING:
    from accel_impl.port import AccelAdapter

START_TIMEOUT_S = 30.0


class EventStream(StreamingResponse):
    """Server-sent events whose source ends with the connection, so that a client that leaves frees its slot."""

    def __init__(self, events: Generator[str, None, None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, and end the source whatever happens."""
        try:
            await super().__call__(scope, receive, send)
        finally:  # closing takes a turn, which may have to be waited for: not in the event loop
            threading.Thread(target=self._events.close, daemon=True).start()


class Server:
    """One uvicorn server in a thread of its own, on a port that the system chooses."""

    def __init__(self, port: AccelAdapter) -> None:
        self.port, self.engine = port, Engine(port)
        self.app = self._app()
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self.url = ""

    def start(self) -> str:
        """Start unless it is up, and return the base URL."""
        if self._thread is not None and self._thread.is_alive():
            return self.url
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        self._server = uvicorn.Server(uvicorn.Config(self.app, log_level="warning", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise PortError(
                    f"expected the server to be up at {self.url} within {START_TIMEOUT_S:.0f} s, found none"
                )
            time.sleep(0.01)
        return self.url

    def stop(self) -> None:
        """Stop, and wait for the threads."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(START_TIMEOUT_S)
        self._server = self._thread = None
        self.engine.close()

    # ---- routes

    def _app(self) -> FastAPI:
        app = FastAPI(title=MODEL, docs_url=None, redoc_url=None, openapi_url=None)

        @app.get("/health")
        def health() -> dict[str, Any]:
            return {"status": "ok", **self.port.cache_facts(), **self.engine.facts()}

        @app.get("/v1/models")
        def models() -> dict[str, Any]:
            limit = self.port.config.max_position_embeddings
            entry = {"id": MODEL, "object": "model", "created": 0, "owned_by": "day0", "max_model_len": limit}
            return {"object": "list", "data": [entry]}

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            return await self._answer(await request.body(), chat=False)

        @app.post("/v1/chat/completions")
        async def chat_completions(request: Request) -> Response:
            return await self._answer(await request.body(), chat=True)

        return app

    async def _answer(self, raw: bytes, *, chat: bool) -> Response:
        try:
            job = await run_in_threadpool(job_of, raw, chat, self.port)
            self.engine.check(job.inputs, job.max_tokens)
        except (BadRequest, Day0Error) as error:
            body = {"error": {"message": str(error), "type": "invalid_request_error", "code": 400}}
            return JSONResponse(body, status_code=400)
        if job.stream:
            return EventStream(self._events(job))
        return JSONResponse(await run_in_threadpool(self._whole, job))

    # ---- answers

    def _pieces(self, job: Job) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (text, extra fields of the choice) for every token, then the rest of the text; end at a stop."""
        front = self.port.front()
        text, stop = TextStream(front), StopText(job.stops)
        tokens = self.engine.tokens(job.inputs, job.max_tokens)
        try:
            for token, logits in tokens:
                job.ids.append(token)
                extra: dict[str, Any] = {"token_ids": [token]} if job.token_ids else {}
                if job.logprobs is not None:
                    extra["logprobs"] = token_logprobs(front, token, logits, chat=job.chat, count=job.logprobs)
                piece = stop.push(text.push(token))
                job.stopped = stop.met
                yield piece, extra
                if stop.met:
                    return
            rest = stop.push(text.end()) + stop.end()
            job.stopped = stop.met
            yield rest, {}
        finally:
            tokens.close()

    def _finish(self, job: Job) -> str:
        ended = job.stopped or (job.ids and job.ids[-1] in self.port.eos_ids())
        return "stop" if ended else "length"

    def _whole(self, job: Job) -> dict[str, Any]:
        pieces = list(self._pieces(job))
        text = "".join(piece for piece, _ in pieces)
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._finish(job), "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if job.chat else {"text": text}
        if job.logprobs is not None:
            choice["logprobs"] = joined([extra["logprobs"] for _, extra in pieces if extra])
        if job.token_ids:
            choice |= {"prompt_token_ids": job.prompt_ids, "token_ids": job.ids}
        return {**job.head(chunk=False), "choices": [choice], "usage": job.usage()}

    def _events(self, job: Job) -> Generator[str, None, None]:
        """Yield server-sent events: a piece per token, the reason it ended, usage if asked for, `[DONE]`."""
        head = job.head(chunk=True)

        def event(choice: dict[str, Any]) -> str:
            return f"data: {json.dumps({**head, 'choices': [{'index': 0, 'finish_reason': None} | choice]})}\n\n"

        if job.chat:
            yield event({"delta": {"role": "assistant", "content": ""}})
        for piece, extra in self._pieces(job):
            if piece or extra:
                yield event(({"delta": {"content": piece}} if job.chat else {"text": piece}) | extra)
        last: dict[str, Any] = {"delta": {}} if job.chat else {"text": ""}
        if job.token_ids:
            last["prompt_token_ids"] = job.prompt_ids
        yield event(last | {"finish_reason": self._finish(job)})
        if job.usage_chunk:
            yield f"data: {json.dumps({**head, 'choices': [], 'usage': job.usage()})}\n\n"
        yield "data: [DONE]\n\n"
