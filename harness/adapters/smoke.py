"""Asks an OpenAI-compatible endpoint what any client will ask of it. Knows HTTP; must not know models or limits.

Each check counts its errors and keeps the first few as words. A check that cannot be made says why in `not_applicable`;
a check that was not reached is absent, and the stage measures it as missing. httpx is imported when it is needed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from harness.types import Facts

CHECKS = (
    "health", "models", "completion", "finish_reason", "usage", "stream", "bad_input", "concurrent", "chat",
    "chat_usage",
)  # fmt: skip
_KEPT_DETAILS = 5

Request = Mapping[str, Any]
"""`id`, `max_tokens`, `prompt` (text or token ids) or `messages`; `expected` with `token_ids`, `prompt_tokens`, and
where the port has a text front end `text` and `ended` (the last id is an end-of-sequence id); where the port can tell,
`unlikely(ids)`: the place of the first of other ids that no rounding explains, or None."""


class Client:
    """One endpoint. `base_url` ends in `/v1`."""

    def __init__(self, base_url: str, timeout_s: float = 60.0) -> None:
        import httpx

        self.base_url = base_url.rstrip("/")
        self.http = httpx.Client(timeout=timeout_s, trust_env=False)
        self.model = ""
        self._asks_ids = True

    def get(self, path: str) -> Any:
        """GET a path below the base URL (or beside it, with `..`)."""
        root = self.base_url.rsplit("/", 1)[0] if path.startswith("../") else self.base_url
        return self.http.get(f"{root}/{path.removeprefix('../')}")

    def post(self, path: str, body: Any) -> Any:
        """POST JSON, or raw bytes, below the base URL."""
        if isinstance(body, bytes):
            headers = {"content-type": "application/json"}
            return self.http.post(f"{self.base_url}/{path}", content=body, headers=headers)
        return self.http.post(f"{self.base_url}/{path}", json=body)

    def first_model(self) -> str:
        """Return the id of the first model served. Raises ValueError if there is none."""
        answer = self.get("models")
        answer.raise_for_status()
        data = answer.json().get("data")
        if not data or not isinstance(data[0].get("id"), str) or not data[0]["id"]:
            raise ValueError(f"expected GET /models to list a model with an id, found {str(answer.text)[:200]!r}")
        self.model = str(data[0]["id"])
        return self.model

    def complete(self, request: Request) -> dict[str, Any]:
        """Return the first choice of a greedy completion as `text`, `finish_reason`, `token_ids` (or None), `usage`."""
        path, body = self._body(request)
        answer = self.post(path, {**body, "return_token_ids": True} if self._asks_ids else body)
        if self._asks_ids and answer.status_code in (400, 422):
            answer = self.post(path, body)  # the field is an extension: a strict server refuses it
            self._asks_ids = not answer.is_success
        answer.raise_for_status()
        data = answer.json()
        choice = data["choices"][0]
        text = choice["message"]["content"] if "messages" in request else choice["text"]
        return {
            "text": text or "",
            "finish_reason": choice.get("finish_reason"),
            "token_ids": choice.get("token_ids"),
            "usage": data.get("usage") or {},
        }

    def stream(self, request: Request) -> dict[str, Any]:
        """Return the same from a stream: the joined `text`, `chunks`, whether it ended with `[DONE]`, `first_s`."""
        path, body = self._body(request)
        parts: list[str] = []
        done, first_s, begin = False, None, time.perf_counter()
        with self.http.stream("POST", f"{self.base_url}/{path}", json={**body, "stream": True}) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data:"):
                    continue
                first_s = time.perf_counter() - begin if first_s is None else first_s
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    done = True
                    continue
                for choice in json.loads(data).get("choices", []):
                    piece = choice["delta"].get("content") if "messages" in request else choice.get("text")
                    parts.append(piece or "")
        return {"text": "".join(parts), "chunks": len(parts), "done": done, "first_s": first_s}

    def _body(self, request: Request) -> tuple[str, dict[str, Any]]:
        body = {"model": self.model, "max_tokens": request["max_tokens"], "temperature": 0}
        if "messages" in request:
            return "chat/completions", body | {"messages": request["messages"]}
        return "completions", body | {"prompt": request["prompt"]}

    def close(self) -> None:
        """Close the connections."""
        self.http.close()


class _Checks:
    """Errors by check; whatever the endpoint does wrong in a check is one error of that check."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self.not_applicable: dict[str, str] = {}

    def expect(self, check: str, ok: bool, words: str = "") -> None:
        entry = self.found.setdefault(check, {"errors": 0, "of": 0, "detail": []})
        entry["of"] += 1
        if not ok:
            entry["errors"] += 1
            if len(entry["detail"]) < _KEPT_DETAILS:
                entry["detail"].append(words[:400])

    def attempt(self, check: str, act: Callable[[], Any]) -> Any:
        """Return what `act` returns; None, and one error, where the endpoint fails."""
        import httpx

        try:
            return act()
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            self.expect(check, False, f"{type(error).__name__}: {error}")
            return None


def smoke(
    base_url: str,
    cases: Sequence[Request],
    *,
    chats: Sequence[Request] = (),
    max_length_tokens: int | None = None,
    timeout_s: float = 60.0,
    beat: Callable[[str], None] = lambda words: None,
) -> Facts:
    """Run every check against a server that is up. `cases` are completions, `chats` conversations.

    Returns: `checks` {name: errors, of, detail}, `not_applicable` {name: reason}, `model`, `stream_first_s` [seconds].
    """
    client, checks = Client(base_url, timeout_s), _Checks()
    try:
        beat("endpoint: health")
        _health(client, checks)
        alone = {}
        for request in (*cases, *chats):
            chat = "messages" in request
            beat(f"endpoint: {'chat' if chat else 'completion'} {request['id']}")
            pair = ("chat", "chat_usage") if chat else ("completion", "usage")
            alone[str(request["id"])] = _completion(client, checks, request, *pair)
        first = _streams(client, checks, [*cases, *chats], alone, beat)
        beat("endpoint: concurrent requests")
        _concurrent(client, checks, cases, alone)
        beat("endpoint: bad input")
        _bad_input(client, checks, cases[0], max_length_tokens)
    finally:
        client.close()
    _say_what_was_not_asked(checks, cases, chats)
    return {
        "checks": checks.found,
        "not_applicable": checks.not_applicable,
        "model": client.model,
        "stream_first_s": first,
    }


def _health(client: Client, checks: _Checks) -> None:
    answer = checks.attempt("health", lambda: client.get("../health"))
    if answer is not None:
        # /health is custom, not part of the OpenAI interface: a server without it must at least answer /models
        checks.expect("health", answer.status_code in (200, 404), f"GET /health gave {answer.status_code}")
    name = checks.attempt("models", client.first_model)
    if name is not None:
        checks.expect("models", True)


def _completion(client: Client, checks: _Checks, request: Request, check: str, usage_check: str) -> str | None:
    """Hold one answer against what the port says without HTTP; return its text."""
    answer = checks.attempt(check, partial(client.complete, request))
    if answer is None:
        return None
    expected, name = request.get("expected"), request["id"]
    usage = answer["usage"]
    if expected is None:
        checks.expect(check, bool(answer["text"]), f"{name}: expected some text, found none")
        asked = request["max_tokens"]
        count = usage.get("completion_tokens")
        ok = isinstance(count, int) and 0 < count <= asked
        checks.expect(usage_check, ok, f"{name}: expected 1 to {asked} completion_tokens, found {count}")
        return str(answer["text"])
    rounded = False
    if answer["token_ids"] is not None:
        ids, own = list(answer["token_ids"]), list(expected["token_ids"])
        place = _unlikely(ids, expected, request["max_tokens"])
        rounded = place is None and ids != own
        words = "" if place is None else f"; no rounding of the port's explains number {place + 1}"
        checks.expect(check, place is None, f"{name}: expected ids {own}, found {ids}{words}")
    if "text" in expected and not rounded:  # where a choice was rounded otherwise the two texts go different ways
        ok = answer["text"] == expected["text"]
        checks.expect(check, ok, f"{name}: expected {expected['text']!r}, found {answer['text']!r}")
        wanted = "stop" if expected["ended"] else "length"
        ok = answer["finish_reason"] == wanted
        checks.expect("finish_reason", ok, f"{name}: expected {wanted!r}, found {answer['finish_reason']!r}")
    elif answer["token_ids"] is None:
        checks.expect(check, bool(answer["text"]), f"{name}: expected some text, found none")
    counts = [len(expected["token_ids"])] + [len(expected["token_ids"]) - 1] * bool(expected.get("ended"))
    counts = list(range(1, request["max_tokens"] + 1)) if rounded else counts
    ok = usage.get("prompt_tokens") == expected["prompt_tokens"]
    checks.expect(usage_check, ok, f"{name}: expected {expected['prompt_tokens']} prompt_tokens, found {usage}")
    ok = usage.get("completion_tokens") in counts
    checks.expect(usage_check, ok, f"{name}: expected {counts[0]} completion_tokens, found {usage}")
    return str(answer["text"])


def _unlikely(found: list[int], expected: Mapping[str, Any], most: int) -> int | None:
    """Return the place of the first token of an answer that is not the port's, nor what rounding may make of it."""
    wanted = list(expected["token_ids"])
    place = next((i for i, (mine, own) in enumerate(zip(found, wanted, strict=False)) if mine != own), None)
    if place is None:  # one is the beginning of the other
        return None if len(found) == len(wanted) else min(len(found), len(wanted))
    if "unlikely" not in expected:
        return place
    unlikely: int | None = expected["unlikely"](found[:most])
    return unlikely


def _streams(
    client: Client,
    checks: _Checks,
    requests: Sequence[Request],
    alone: Mapping[str, str | None],
    beat: Callable[[str], None],
) -> list[float | None]:
    """A stream must join to the very text of the answer in one piece: split multi-byte characters show here."""
    first = []
    for request in requests:
        beat(f"endpoint: stream {request['id']}")
        streamed = checks.attempt("stream", partial(client.stream, request))
        whole = alone[str(request["id"])]
        if streamed is None or whole is None:
            continue
        words = f"{request['id']}: expected {whole!r}, found {streamed['text']!r}"
        checks.expect("stream", streamed["text"] == whole, words)
        checks.expect("stream", streamed["done"], f"{request['id']}: the stream did not end with [DONE]")
        first.append(streamed["first_s"])
    return first


def _concurrent(client: Client, checks: _Checks, cases: Sequence[Request], alone: Mapping[str, str | None]) -> None:
    """Two requests of different length at once must answer as each does alone."""
    ordered = sorted(cases, key=lambda r: len(r["prompt"]))
    pair = [ordered[0], ordered[-1]]
    if len(ordered) == 1:
        shorter = {
            **ordered[0],
            "id": "shorter",
            "prompt": ordered[0]["prompt"][: max(1, len(ordered[0]["prompt"]) // 2)],
        }
        answer = checks.attempt("concurrent", lambda: client.complete(shorter))
        pair, alone = [shorter, ordered[0]], {**alone, "shorter": answer["text"] if answer else None}
    with ThreadPoolExecutor(max_workers=2) as pool:
        futures = [pool.submit(client.complete, request) for request in pair]
        answers = [checks.attempt("concurrent", future.result) for future in futures]
    for request, answer in zip(pair, answers, strict=True):
        if answer is not None:
            before, now = alone[str(request["id"])], answer["text"]
            words = f"{request['id']}: alone {before!r}, beside another request {now!r}"
            checks.expect("concurrent", before == now, words)


def _bad_input(client: Client, checks: _Checks, good: Request, max_length_tokens: int | None) -> None:
    """Nonsense must be refused as the client's error, and the server must live on."""
    _, body = client._body(good)
    wrong: dict[str, Any] = {
        "broken JSON": b'{"prompt": ',
        "no prompt": {k: v for k, v in body.items() if k != "prompt"},
        "negative max_tokens": {**body, "max_tokens": -1},
        "a prompt that is a number": {**body, "prompt": 7},
    }
    if good.get("expected") is not None and max_length_tokens is not None and max_length_tokens <= 1_000_000:
        wrong["a prompt longer than the model takes"] = {**body, "prompt": [0] * (max_length_tokens + 1)}
    for name, request in wrong.items():
        answer = checks.attempt("bad_input", partial(client.post, "completions", request))
        if answer is not None:
            code = answer.status_code
            checks.expect("bad_input", 400 <= code < 500, f"{name}: expected HTTP 400, found {code}")
    answer = checks.attempt("bad_input", lambda: client.complete(good))
    if answer is not None:
        checks.expect("bad_input", True)


def _say_what_was_not_asked(checks: _Checks, cases: Sequence[Request], chats: Sequence[Request]) -> None:
    if not chats:
        reason = "the port has no text front end of its own to hold the endpoint's conversations against"
        checks.not_applicable |= {"chat": reason, "chat_usage": reason}
    if not any("text" in (r.get("expected") or {}) for r in [*cases, *chats]):
        checks.not_applicable["finish_reason"] = (
            "without the port's own token ids it is not known which reason is right"
        )
