from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from accel_impl import engine, server
from harness.adapter import silent
from harness.types import Case


@pytest.fixture
def port(opened: Any) -> Any:
    return opened("bfloat16")


def post(port: Any, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{port.serve()}/{path}", json=body, timeout=60, trust_env=False)


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
    health = httpx.get(f"{port.serve().removesuffix('/v1')}/health", trust_env=False).json()
    assert health["pages_free"] == health["pages_total"]


def test_a_client_that_leaves_frees_its_slot(port: Any) -> None:
    """A stream that nobody reads any more ends long before its last token, and its pages come back."""
    facts = port.cache_facts()
    assert facts["pages_free"] == facts["pages_total"]
    body = {"prompt": "x", "max_tokens": 1000, "stream": True}
    with httpx.stream("POST", f"{port.serve()}/completions", json=body, timeout=60, trust_env=False) as answer:
        next(answer.iter_lines())
        assert port.cache_facts()["pages_free"] < facts["pages_total"]
    deadline, longest = time.monotonic() + 60, 0
    while port.cache_facts()["slots_free"] < facts["slots_total"] and time.monotonic() < deadline:
        longest = max([longest, *port.cache.lengths.values()])
        time.sleep(0.01)
    assert port.cache_facts() == facts
    assert longest < 500


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": ', [], {}, {"prompt": 7}, {"prompt": []}, {"prompt": [263]}, {"prompt": [-1]}, {"prompt": [True]},
        {"prompt": "x", "max_tokens": 0}, {"prompt": "x", "max_tokens": "3"}, {"prompt": "x", "temperature": 0.7},
        {"prompt": "x", "n": 2}, {"prompt": [0] * 1025}, {"prompt": "x", "logprobs": 99}, {"prompt": "<image>"},
        {"prompt": "x", "model": "another"}, {"prompt": "x", "max_tokens": 2000},
    ],
    ids=lambda body: str(body)[:40],
)  # fmt: skip
def test_bad_input_is_refused_with_400(port: Any, body: Any) -> None:
    """Nonsense, and what is not supported, is HTTP 400 with a message, and the server lives on."""
    url = f"{port.serve()}/completions"
    answer = httpx.post(url, content=body if isinstance(body, bytes) else json.dumps(body), trust_env=False)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert httpx.get(f"{port.serve()}/models", trust_env=False).json()["data"][0]["id"] == server.MODEL


def test_a_conversation_without_messages_is_refused(port: Any) -> None:
    """Chat needs messages that the template can render."""
    for messages in (None, [], ["x"], [{"role": "robot", "content": "x"}]):
        assert post(port, "chat/completions", {"messages": messages}).status_code == 400


def test_turns_are_given_in_the_order_they_were_asked_for() -> None:
    """Requests that wait for a turn get it first come, first served."""
    turns, order = engine.Turns(), list[int]()

    def take(name: int) -> None:
        with turns:
            order.append(name)

    with ThreadPoolExecutor(5) as pool, turns:
        for name in range(5):
            pool.submit(take, name)
            while turns._next < name + 2:  # the next one is started when this one waits
                time.sleep(0.001)
    assert order == list(range(5))


def test_closing_the_port_ends_the_server(checkpoint: Any) -> None:
    """After close nothing listens where the server was."""
    from accel_runs import setup_of

    import accel_impl

    port = accel_impl.adapter(checkpoint, setup_of("bfloat16"))
    port.load(checkpoint, setup_of("bfloat16"))
    url = port.serve()
    assert port.serve() == url
    port.close()
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/models", timeout=5, trust_env=False)
