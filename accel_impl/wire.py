"""The words of the endpoint (OpenAI's): a body becomes a job, tokens become JSON. Must not know the model.

What is not supported is refused (`BadRequest`), never ignored. Pictures come as `data:` URLs in messages of a chat;
nothing is fetched. Beside the standard fields, `return_token_ids` gives `prompt_token_ids` and `token_ids`.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel_impl.tokenizer import REPLACEMENT, TextFront
from harness.adapter import Inputs, silent
from harness.types import Case, Image

if TYPE_CHECKING:
    from accel_impl.port import AccelAdapter

MODEL = "day0-seed"
DEFAULT_MAX_TOKENS = 16
MOST_LOGPROBS = 20
MOST_STOPS = 4
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
"""Files that a picture may come in."""
DEFAULTS: Mapping[str, Any] = {
    "n": 1, "best_of": 1, "temperature": 0, "top_p": 1, "echo": False, "suffix": None, "presence_penalty": 0,
    "frequency_penalty": 0, "logit_bias": None, "tools": None, "response_format": None,
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
    stops: tuple[str, ...] = ()
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex[:24]}")
    created: int = field(default_factory=lambda: int(time.time()))
    ids: list[int] = field(default_factory=list)
    stopped: bool = False

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

    def head(self, *, chunk: bool) -> dict[str, Any]:
        """Return what every answer, or every chunk of one, begins with."""
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": MODEL}


# ---- what is asked


def job_of(raw: bytes, chat: bool, port: AccelAdapter) -> Job:
    """Read a body. Raises BadRequest, or what the port says of its contents."""
    body = _object(raw)
    inputs = _inputs(body, chat, port)
    length, limit = inputs.token_ids.shape[1], port.config.max_position_embeddings
    default = min(DEFAULT_MAX_TOKENS, max(1, limit - length))
    count = _integer(body, "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens", default, 1)
    if length + count > limit:
        raise BadRequest(f"expected at most {limit} tokens with the answer, found {length} + {count}")
    return Job(
        inputs=inputs,
        max_tokens=count,
        chat=chat,
        stream=bool(body.get("stream", False)),
        logprobs=_logprobs(body, chat),
        token_ids=bool(body.get("return_token_ids", False)),
        usage_chunk=bool((body.get("stream_options") or {}).get("include_usage", False)),
        stops=_stops(body.get("stop")),
    )


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise BadRequest(f"expected JSON, found: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest(f"expected a JSON object, found {type(body).__name__}")
    for key, value in DEFAULTS.items():
        if body.get(key) not in (None, value):
            raise BadRequest(f"expected {key} = {value}, found {body[key]!r}: this server decodes greedily, one choice")
    if body.get("model", MODEL) not in (MODEL, None, ""):
        raise BadRequest(f"expected model {MODEL!r}, found {body['model']!r}")
    return body


def _inputs(body: Mapping[str, Any], chat: bool, port: AccelAdapter) -> Inputs:
    images: tuple[Image, ...] = ()
    if chat:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise BadRequest(f"expected messages as a list of objects, found {str(messages)[:80]}")
        messages, images = _pictures(messages)
        case = Case(id="request", messages=tuple(messages), images=images)
    else:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        case = _prompt(prompt, port.config.vocab_size)
    inputs = port.prepare(case, silent)
    if not inputs.token_ids.shape[1]:
        raise BadRequest("expected at least one token, found an empty prompt")
    if not images and (inputs.token_ids == port.config.image_token_id).any():
        raise BadRequest("expected text only, found an <image> token without a picture: send it as an image_url part")
    return inputs


def _prompt(prompt: Any, vocabulary: int) -> Case:
    if isinstance(prompt, str):
        return Case(id="request", prompt=prompt)
    if isinstance(prompt, list) and all(type(i) is int and 0 <= i < vocabulary for i in prompt):
        return Case(id="request", token_ids=tuple(prompt))
    raise BadRequest(f"expected prompt as a string or a list of ids below {vocabulary}, found {str(prompt)[:80]}")


def _pictures(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], tuple[Image, ...]]:
    """Return the messages with a mark in place of each picture, and the pictures in order."""
    found: list[Image] = []

    def part_of(part: Any) -> dict[str, Any]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        if kind == "image_url":
            url = part.get("image_url")
            found.append(_picture(url.get("url") if isinstance(url, dict) else url))
            return {"type": "image"}
        raise BadRequest(f"expected parts of type text or image_url, found {str(part)[:80]}")

    told = [
        {**m, "content": [part_of(p) for p in m["content"]]} if isinstance(m.get("content"), list) else m
        for m in messages
    ]
    return told, tuple(found)


def _picture(url: Any) -> Image:
    from PIL import Image as Pictures
    from PIL import UnidentifiedImageError

    head, _, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise BadRequest(
            f"expected a picture as data:image/...;base64,..., found {str(url)[:40]!r}: nothing is fetched"
        )
    try:
        with Pictures.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=FORMATS) as opened:
            rgb = opened.convert("RGB")
    except (binascii.Error, UnidentifiedImageError, OSError, ValueError, Pictures.DecompressionBombError) as error:
        raise BadRequest(f"expected a picture as {', '.join(FORMATS)}, found: {error}") from error
    return Image(height=rgb.height, width=rgb.width, rgb=base64.b64encode(rgb.tobytes()).decode())


def _integer(body: Mapping[str, Any], key: str, default: int, least: int) -> int:
    value = body.get(key)
    if value is None:
        return default
    if type(value) is not int or value < least:
        raise BadRequest(f"expected {key} as an integer of at least {least}, found {value!r}")
    return value


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise BadRequest(f"expected stop as a string or up to {MOST_STOPS} of them, none empty, found {str(stop)[:80]}")
    return tuple(stops)


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


# ---- what is answered


def token_logprobs(front: TextFront, token: int, logits: Any, *, chat: bool, count: int) -> dict[str, Any]:
    """Return the log-probability of a token and of `count` alternatives, as completions or chat give them."""
    values = logits.double().log_softmax(-1)
    best = values.topk(min(count, len(values)))
    top = [(int(i), float(v)) for v, i in zip(best.values, best.indices, strict=True)]
    if not chat:
        return {
            "tokens": [front.token(token)],
            "token_ids": [token],
            "token_logprobs": [float(values[token])],
            "top_logprobs": [{f"token_id:{i}": v for i, v in top}],
        }

    def entry(index: int, value: float) -> dict[str, Any]:
        own = front.token(index)
        whole = None if REPLACEMENT in own else list(own.encode())  # null: part of a character
        return {"token": own, "token_id": index, "logprob": value, "bytes": whole}

    return {"content": [entry(token, float(values[token])) | {"top_logprobs": [entry(i, v) for i, v in top]}]}


def joined(parts: Sequence[Mapping[str, list[Any]]]) -> dict[str, Any]:
    """Join per-token logprobs into one record of lists."""
    return {key: [value for part in parts for value in part[key]] for key in (parts[0] if parts else {})}
