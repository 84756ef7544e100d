from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from accel_runs import setup_of

import accel_impl
from accel_impl import wire
from harness.adapter import silent
from harness.types import Case


@pytest.fixture(scope="module")
def port(checkpoint: Any) -> Iterator[Any]:
    """A port of this file alone: what its server keeps of ended requests would be in the way of other tests."""
    made = accel_impl.adapter(checkpoint, setup_of("bfloat16"))
    made.load(checkpoint, setup_of("bfloat16"))
    yield made
    made.close()


def post(port: Any, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{port.serve()}/{path}", json=body, timeout=60, trust_env=False)


def health(port: Any) -> Any:
    return httpx.get(f"{port.serve().removesuffix('/v1')}/health", timeout=60, trust_env=False).json()


def expected(port: Any, case: Case, count: int) -> tuple[list[int], list[int]]:
    inputs = port.prepare(case, silent)
    return inputs.token_ids[0].tolist(), port.generate(inputs, count, silent)


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_completion_is_what_the_port_generates(port: Any) -> None:
    """Text, ids, usage and log-probabilities over HTTP are those of generate and forward."""
    prompt, ids = expected(port, Case(id="p", prompt="Grüße"), 5)
    body = {"prompt": "Grüße", "max_tokens": 5, "temperature": 0, "return_token_ids": True, "logprobs": 2}
    answer = post(port, "completions", body).json()
    choice = answer["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"], choice["text"]) == (prompt, ids, port.decode(ids))
    assert answer["usage"] == {"prompt_tokens": len(prompt), "completion_tokens": 5, "total_tokens": len(prompt) + 5}
    assert choice["finish_reason"] == "length"
    logits = port.forward(port.prepare(Case(id="x", token_ids=tuple(prompt)), silent), silent)[0, -1]
    wanted = float(logits.double().log_softmax(-1)[ids[0]])
    assert choice["logprobs"]["token_logprobs"][0] == pytest.approx(wanted, abs=1e-6)
    assert choice["logprobs"]["token_ids"] == ids
    assert post(port, "completions", {**body, "prompt": prompt}).json()["choices"][0]["token_ids"] == ids


def test_an_end_token_stops_the_answer(port: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation that meets an end-of-sequence id says stop and counts it, in one piece and streamed."""
    prompt, ids = expected(port, Case(id="p", prompt="stop"), 6)
    monkeypatch.setattr(port, "config", _with(port.config, eos_token_id=(ids[2],)))
    wanted = ids[: ids.index(ids[2]) + 1]
    body = {"prompt": prompt, "max_tokens": 6, "return_token_ids": True}
    answer = post(port, "completions", body).json()
    assert answer["choices"][0]["token_ids"] == wanted
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(wanted)
    assert events(post(port, "completions", {**body, "stream": True}).text)[-1]["choices"][0]["finish_reason"] == "stop"


def _with(config: Any, **changes: Any) -> Any:
    import dataclasses

    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_joins_to_the_answer(port: Any, chat: bool) -> None:
    """Streamed text and ids join to the answer in one piece, ended by its reason, usage and [DONE]."""
    body: dict[str, Any] = {"max_tokens": 7, "return_token_ids": True}
    body |= {"messages": [{"role": "user", "content": "ü"}]} if chat else {"prompt": "ü"}
    path = "chat/completions" if chat else "completions"
    answer = post(port, path, body).json()
    chunks = events(post(port, path, {**body, "stream": True, "stream_options": {"include_usage": True}}).text)
    choices = [c["choices"][0] for c in chunks if c["choices"]]
    text = "".join(c["delta"].get("content", "") if chat else c["text"] for c in choices)
    whole = answer["choices"][0]
    assert text == (whole["message"]["content"] if chat else whole["text"])
    assert [i for c in choices for i in c.get("token_ids", [])] == whole["token_ids"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"]
    assert chunks[-1]["usage"] == answer["usage"]


def test_requests_at_once_answer_as_each_does_alone(port: Any) -> None:
    """More requests than slots, of different lengths, all answer as they do alone, and every page comes back."""
    bodies = [{"prompt": "x" * n, "max_tokens": 3, "return_token_ids": True} for n in range(1, 10)]
    alone = [expected(port, Case(id="p", prompt=b["prompt"]), 3)[1] for b in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda b: post(port, "completions", b).json(), bodies))
    assert [a["choices"][0]["token_ids"] for a in answers] == alone
    found = health(port)
    assert found["pages_free"] + found["pages_kept"] == found["pages_total"]
    assert found["requests_running"] == found["requests_waiting"] == 0


def test_a_client_that_leaves_frees_its_slot(port: Any) -> None:
    """A stream that nobody reads any more ends long before its last token, and its slot comes back."""
    body = {"prompt": "x", "max_tokens": 1000, "stream": True}
    with httpx.stream("POST", f"{port.serve()}/completions", json=body, timeout=60, trust_env=False) as answer:
        next(answer.iter_lines())
        assert health(port)["slots_free"] < health(port)["slots_total"]
    deadline, longest = time.monotonic() + 60, 0
    while (found := health(port))["slots_free"] < found["slots_total"] and time.monotonic() < deadline:
        longest = max([longest, *port.memory.pages.lengths.values()])
        time.sleep(0.01)
    assert found["slots_free"] == found["slots_total"]
    assert found["pages_free"] + found["pages_kept"] == found["pages_total"]
    assert longest < 500


def test_a_stop_string_ends_the_answer(port: Any) -> None:
    """The text ends before the first stop string, streamed too, and says stop; what is no stop changes nothing."""
    prompt, ids = expected(port, Case(id="p", prompt="stop at"), 8)
    whole = port.decode(ids)
    body = {"prompt": prompt, "max_tokens": 8}
    stop = next(c for c in whole[2:] if c.isprintable() and c != "\ufffd")
    answer = post(port, "completions", {**body, "stop": [stop, "\x00\x00"]}).json()
    assert answer["choices"][0]["text"] == whole[: whole.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] <= 8
    chunks = events(post(port, "completions", {**body, "stop": stop, "stream": True}).text)
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole[: whole.index(stop)]
    kept = post(port, "completions", {**body, "stop": "\x00\x00"}).json()["choices"][0]
    assert (kept["text"], kept["finish_reason"]) == (whole, "length")


def png(height: int, width: int) -> str:
    from PIL import Image as Pictures

    rgb = bytes((y * 7 + x * 11 + c * 50) % 256 for y in range(height) for x in range(width) for c in range(3))
    file = io.BytesIO()
    Pictures.frombytes("RGB", (width, height), rgb).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def test_a_picture_over_http_is_what_the_port_makes_of_it(port: Any) -> None:
    """A conversation with a PNG answers what generate does for the same pixels and words; another picture differs."""
    answers = []
    for size in ((56, 28), (28, 56)):
        parts = [{"type": "text", "text": "what"}, {"type": "image_url", "image_url": {"url": png(*size)}}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "return_token_ids": True}
        answers.append(post(port, "chat/completions", body).json()["choices"][0])
        told = ({"role": "user", "content": [{"type": "text", "text": "what"}, {"type": "image"}]},)
        prompt, ids = expected(port, Case(id="i", messages=told, images=(wire._picture(png(*size)),)), 4)
        assert (answers[-1]["prompt_token_ids"], answers[-1]["token_ids"]) == (prompt, ids)
        assert prompt.count(port.config.image_token_id) == 8


@pytest.mark.parametrize("url", ["http://127.0.0.1/x.png", "data:image/png;base64,AAAA", "data:image/png;base64,?", 7])
def test_what_is_no_picture_is_refused(port: Any, url: Any) -> None:
    """A picture that would have to be fetched, or that is none, is HTTP 400 with a message."""
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    answer = post(port, "chat/completions", {"messages": [{"role": "user", "content": parts}]})
    assert answer.status_code == 400
    assert "expected a picture as" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": ', [], {}, {"prompt": 7}, {"prompt": []}, {"prompt": [263]}, {"prompt": [-1]}, {"prompt": [True]},
        {"prompt": "x", "max_tokens": 0}, {"prompt": "x", "max_tokens": "3"}, {"prompt": "x", "temperature": 0.7},
        {"prompt": "x", "n": 2}, {"prompt": [0] * 4097}, {"prompt": "x", "logprobs": 99}, {"prompt": "<image>"},
        {"prompt": "x", "model": "another"}, {"prompt": "x", "max_tokens": 5000},
        {"prompt": "x", "stop": [""]}, {"prompt": "x", "stop": 3},
    ],
    ids=lambda body: str(body)[:40],
)  # fmt: skip
def test_bad_input_is_refused_with_400(port: Any, body: Any) -> None:
    """Nonsense, and what is not supported, is HTTP 400 with a message, and the server lives on."""
    url = f"{port.serve()}/completions"
    answer = httpx.post(url, content=body if isinstance(body, bytes) else json.dumps(body), trust_env=False)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert httpx.get(f"{port.serve()}/models", trust_env=False).json()["data"][0]["id"] == wire.MODEL


def test_a_conversation_without_messages_is_refused(port: Any) -> None:
    """Chat needs messages that the template can render."""
    for messages in (None, [], ["x"], [{"role": "robot", "content": "x"}]):
        assert post(port, "chat/completions", {"messages": messages}).status_code == 400


def test_closing_the_port_ends_the_server(checkpoint: Any) -> None:
    """After close nothing listens where the server was."""
    port = accel_impl.adapter(checkpoint, setup_of("bfloat16"))
    port.load(checkpoint, setup_of("bfloat16"))
    url = port.serve()
    assert port.serve() == url
    port.close()
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/models", timeout=5, trust_env=False)


def test_loading_anew_ends_the_server(checkpoint: Any) -> None:
    """A port that is loaded again serves from what it holds now: the old endpoint is gone, a new one answers."""
    port = accel_impl.adapter(checkpoint, setup_of("bfloat16"))
    port.load(checkpoint, setup_of("bfloat16"))
    url = port.serve()
    port.load(checkpoint, setup_of("float32"))
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/models", timeout=5, trust_env=False)
    prompt, ids = expected(port, Case(id="p", prompt="again"), 3)
    body = {"prompt": prompt, "max_tokens": 3, "return_token_ids": True}
    assert post(port, "completions", body).json()["choices"][0]["token_ids"] == ids
    port.close()
