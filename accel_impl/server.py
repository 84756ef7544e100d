"""The port's endpoint: OpenAI's completions and chat completions, greedy, on loopback. Knows HTTP, not tensors.

Imported only when the port is asked to serve. Beside the standard fields, `return_token_ids` gives `prompt_token_ids`
and `token_ids`. What is not supported is refused with HTTP 400, never ignored.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse

from accel_impl.engine import Engine
from accel_impl.tokenizer import REPLACEMENT, TextStream
from harness.adapter import Inputs, silent
from harness.errors import Day0Error, PortError
from harness.types import Case

if TYPE_CHECKING:
    from accel_impl.port import AccelAdapter

MODEL = "day0-seed"
START_TIMEOUT_S = 30.0
DEFAULT_MAX_TOKENS = 16
MOST_LOGPROBS = 20
DEFAULTS: Mapping[str, Any] = {
    "n": 1, "best_of": 1, "temperature": 0, "top_p": 1, "echo": False, "suffix": None, "stop": None,
    "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": None, "tools": None, "response_format": None,
}  # fmt: skip
"""Fields that may be given, at this value only."""


class BadRequest(Exception):
    """The client's words are wrong; becomes HTTP 400."""


@dataclass(kw_only=True)
class Job:
    """One accepted request. `logprobs` is None, or how many alternatives to give beside the chosen token."""

    inputs: Inputs
    max_tokens: int
    chat: bool
    stream: bool
    logprobs: int | None
    token_ids: bool
    usage_chunk: bool
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex[:24]}")
    created: int = field(default_factory=lambda: int(time.time()))
    ids: list[int] = field(default_factory=list)

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt as the model gets it."""
        return [int(i) for i in self.inputs.token_ids[0]]

    def usage(self) -> dict[str, int]:
        """Count tokens, the end-of-sequence one included."""
        prompt = len(self.prompt_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": len(self.ids),
            "total_tokens": prompt + len(self.ids),
        }


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
        """Stop and wait for the thread."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(START_TIMEOUT_S)
        self._server = self._thread = None

    # ---- routes

    def _app(self) -> FastAPI:
        app = FastAPI(title=MODEL, docs_url=None, redoc_url=None, openapi_url=None)

        @app.get("/health")
        def health() -> dict[str, Any]:
            return {"status": "ok", **self.port.cache_facts()}

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
            job = await run_in_threadpool(self._job, raw, chat)
        except (BadRequest, Day0Error) as error:
            body = {"error": {"message": str(error), "type": "invalid_request_error", "code": 400}}
            return JSONResponse(body, status_code=400)
        if job.stream:
            return EventStream(self._events(job))
        return JSONResponse(await run_in_threadpool(self._whole, job))

    # ---- requests

    def _job(self, raw: bytes, chat: bool) -> Job:
        try:
            body = json.loads(raw)
        except ValueError as error:
            raise BadRequest(f"expected JSON, found: {error}") from error
        if not isinstance(body, dict):
            raise BadRequest(f"expected a JSON object, found {type(body).__name__}")
        for key, value in DEFAULTS.items():
            if body.get(key) not in (None, value):
                raise BadRequest(
                    f"expected {key} = {value}, found {body[key]!r}: this server decodes greedily, one choice"
                )
        if body.get("model", MODEL) not in (MODEL, None, ""):
            raise BadRequest(f"expected model {MODEL!r}, found {body['model']!r}")
        inputs = self._inputs(body, chat)
        length, limit = inputs.token_ids.shape[1], self.port.config.max_position_embeddings
        default = min(DEFAULT_MAX_TOKENS, max(1, limit - length))
        count = _integer(body, "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens", default, 1)
        if length + count > limit:
            raise BadRequest(f"expected at most {limit} tokens with the answer, found {length} + {count}")
        if self.engine.pages(length, count) > int(self.port.cache_facts()["pages_total"]):
            raise BadRequest(f"expected a request that the cache can hold, found {length} + {count} tokens")
        return Job(
            inputs=inputs,
            max_tokens=count,
            chat=chat,
            stream=bool(body.get("stream", False)),
            logprobs=_logprobs(body, chat),
            token_ids=bool(body.get("return_token_ids", False)),
            usage_chunk=bool((body.get("stream_options") or {}).get("include_usage", False)),
        )

    def _inputs(self, body: Mapping[str, Any], chat: bool) -> Inputs:
        if chat:
            messages = body.get("messages")
            if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
                raise BadRequest(f"expected messages as a list of objects, found {messages!r}")
            case = Case(id="request", messages=tuple(messages))
        else:
            prompt = body.get("prompt")
            if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
                prompt = prompt[0]
            case = self._prompt(prompt)
        inputs = self.port.prepare(case, silent)
        if not inputs.token_ids.shape[1]:
            raise BadRequest("expected at least one token, found an empty prompt")
        if (inputs.token_ids == self.port.config.image_token_id).any():
            raise BadRequest("expected text only, found an <image> token: this endpoint takes no pictures")
        return inputs

    def _prompt(self, prompt: Any) -> Case:
        if isinstance(prompt, str):
            return Case(id="request", prompt=prompt)
        vocabulary = self.port.config.vocab_size
        if isinstance(prompt, list) and all(type(i) is int and 0 <= i < vocabulary for i in prompt):
            return Case(id="request", token_ids=tuple(prompt))
        raise BadRequest(f"expected prompt as a string or a list of ids below {vocabulary}, found {str(prompt)[:80]}")

    # ---- answers

    def _pieces(self, job: Job) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (text, extra fields of the choice) for every token, then the rest of the text."""
        text = TextStream(self.port.front())
        for token, logits in self.engine.tokens(job.inputs, job.max_tokens):
            job.ids.append(token)
            extra: dict[str, Any] = {"token_ids": [token]} if job.token_ids else {}
            if job.logprobs is not None:
                extra["logprobs"] = self._token_logprobs(token, logits, job)
            yield text.push(token), extra
        yield text.end(), {}

    def _token_logprobs(self, token: int, logits: Any, job: Job) -> dict[str, Any]:
        values = logits.double().log_softmax(-1)
        best = values.topk(min(job.logprobs or 0, len(values)))
        top = [(int(i), float(v)) for v, i in zip(best.values, best.indices, strict=True)]
        name = self.port.front().token
        if not job.chat:
            return {
                "tokens": [name(token)],
                "token_ids": [token],
                "token_logprobs": [float(values[token])],
                "top_logprobs": [{f"token_id:{i}": v for i, v in top}],
            }

        def entry(index: int, value: float) -> dict[str, Any]:
            own = name(index)
            whole = None if REPLACEMENT in own else list(own.encode())  # null: part of a character
            return {"token": own, "token_id": index, "logprob": value, "bytes": whole}

        chosen = entry(token, float(values[token]))
        return {"content": [chosen | {"top_logprobs": [entry(i, v) for i, v in top]}]}

    def _finish(self, job: Job) -> str:
        return "stop" if job.ids and job.ids[-1] in self.port.eos_ids() else "length"

    def _head(self, job: Job, *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if job.chat else "text_completion"
        return {"id": job.id, "object": kind, "created": job.created, "model": MODEL}

    def _whole(self, job: Job) -> dict[str, Any]:
        pieces = list(self._pieces(job))
        text = "".join(piece for piece, _ in pieces)
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._finish(job), "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if job.chat else {"text": text}
        if job.logprobs is not None:
            choice["logprobs"] = _joined([extra["logprobs"] for _, extra in pieces if extra])
        if job.token_ids:
            choice |= {"prompt_token_ids": job.prompt_ids, "token_ids": job.ids}
        return {**self._head(job, chunk=False), "choices": [choice], "usage": job.usage()}

    def _events(self, job: Job) -> Generator[str, None, None]:
        """Yield server-sent events: a piece per token, the reason it ended, usage if asked for, `[DONE]`."""
        head = self._head(job, chunk=True)

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


def _integer(body: Mapping[str, Any], key: str, default: int, least: int) -> int:
    value = body.get(key)
    if value is None:
        return default
    if type(value) is not int or value < least:
        raise BadRequest(f"expected {key} as an integer of at least {least}, found {value!r}")
    return value


def _logprobs(body: Mapping[str, Any], chat: bool) -> int | None:
    """Return how many alternatives are asked for; chat says `logprobs: true` and `top_logprobs: n` apart."""
    if chat:
        if not body.get("logprobs"):
            return None
        count = _integer(body, "top_logprobs", 0, 0)
    else:
        if body.get("logprobs") is None:
            return None
        count = _integer(body, "logprobs", 0, 0)
    if count > MOST_LOGPROBS:
        raise BadRequest(f"expected at most {MOST_LOGPROBS} logprobs, found {count}")
    return count


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Join per-token logprobs into one record of lists."""
    return {key: [value for part in parts for value in part[key]] for key in (parts[0] if parts else {})}
