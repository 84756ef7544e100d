from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from accel_impl import speculate
from accel_impl.engine import Engine, Growing
from harness.adapter import Inputs, silent
from harness.cases import ModelInfo, image_case, text_case
from harness.errors import PortError

COUNT = 6
TIMEOUT_S = 120.0


@pytest.fixture
def port(opened: Any) -> Any:
    return opened("bfloat16")


@pytest.fixture
def engine(port: Any) -> Iterator[Engine]:
    made = Engine(port)
    yield made
    made.close()


@pytest.fixture
def requests(port: Any, info: ModelInfo) -> list[Inputs]:
    """Texts of several lengths, one with pictures among them."""
    cases = [text_case(info, 9, seed=1), text_case(info, 37, seed=2), image_case(info, [(48, 32), (16, 64)], seed=3)]
    return [port.prepare(case, silent) for case in [*cases, text_case(info, 70, seed=4)]]


def answers(engine: Engine, request: Inputs, count: int = COUNT) -> list[int]:
    return [token for token, _ in engine.tokens(request, count)]


def settled(engine: Engine) -> dict[str, int]:
    """Wait until nothing runs, and return the facts of engine and cache."""
    deadline = time.monotonic() + TIMEOUT_S
    while (found := engine.facts())["requests_running"] + found["requests_waiting"] and time.monotonic() < deadline:
        time.sleep(0.01)
    return {**found, **engine.port.cache_facts()}


def nothing_is_left(engine: Engine) -> None:
    found = settled(engine)
    assert found["requests_running"] == found["requests_waiting"] == 0
    assert found["slots_free"] == found["slots_total"]
    assert found["pages_free"] + found["pages_kept"] == found["pages_total"]


def test_requests_together_give_what_each_gives_alone(engine: Engine, requests: list[Inputs]) -> None:
    """Texts and pictures side by side, prompts in chunks between answers: token by token what the port generates."""
    alone = [engine.port.generate(request, COUNT, silent) for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        assert list(pool.map(lambda request: answers(engine, request), requests)) == alone
    nothing_is_left(engine)


def test_logits_do_not_depend_on_company(engine: Engine, requests: list[Inputs]) -> None:
    """With a step for each request, logits of the same request alone and beside others have the same bits."""
    one = [logits for _, logits in engine.tokens(requests[1], COUNT)]
    engine.reuse.forget()
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(answers, engine, requests[2], 2 * COUNT)
        two = [logits for _, logits in engine.tokens(requests[1], COUNT)]
        other.result()
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_decoding_together_is_decoding(engine: Engine, requests: list[Inputs]) -> None:
    """With one step for all, the logits stay within rounding of those of each alone, and all requests end."""
    alone = {n: list(engine.tokens(requests[n], 3)) for n in (0, 1, 3)}
    engine.reuse.forget()
    engine.together = 8
    with ThreadPoolExecutor(3) as pool:
        together = dict(zip(alone, pool.map(lambda n: list(engine.tokens(requests[n], 3)), alone), strict=True))
    for n, expected in alone.items():
        assert len(together[n]) == len(expected)
        assert torch.equal(together[n][0][1], expected[0][1])  # the prompts are never computed together
        if together[n][0][0] == expected[0][0]:
            assert float((together[n][1][1] - expected[1][1]).norm() / expected[1][1].norm()) < 0.1
    nothing_is_left(engine)


def test_a_cancelled_request_frees_everything(engine: Engine, requests: list[Inputs]) -> None:
    """Who stops listening, in a prompt, in an answer or while waiting, leaves no slot and no page taken."""
    streams = [engine.tokens(requests[n % 4], 200) for n in range(10)]  # more than slots: the last ones wait
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(next, streams[: engine.cache.slots]))
        waiting = [pool.submit(next, stream, None) for stream in streams[engine.cache.slots :]]
        for stream in streams[: engine.cache.slots]:
            stream.close()
        assert all(found.result(TIMEOUT_S) is not None for found in waiting)
    for stream in streams:
        stream.close()
    nothing_is_left(engine)


def test_a_request_that_fails_ends_alone(
    engine: Engine, requests: list[Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step raises reaches who waits for that request; others go on, and nothing of it is kept."""
    advance = engine.port.advance

    def broken(slot: int, inputs: Inputs, start: int, stop: int, record: Any, **how: Any) -> Any:
        if stop == requests[1].token_ids.shape[-1] + 2:
            raise RuntimeError("out of luck")
        return advance(slot, inputs, start, stop, record, **how)

    monkeypatch.setattr(engine.port, "advance", broken)
    alone = engine.port.generate(requests[0], COUNT, silent)
    with ThreadPoolExecutor(2) as pool:
        bad, good = pool.submit(answers, engine, requests[1]), pool.submit(answers, engine, requests[0])
        with pytest.raises(RuntimeError, match="out of luck"):
            bad.result(TIMEOUT_S)
        assert good.result(TIMEOUT_S) == alone
    nothing_is_left(engine)


def test_a_tower_that_fails_ends_its_request_alone(
    engine: Engine, requests: list[Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in the tower's thread reaches the request with the picture, and nobody else."""
    monkeypatch.setattr(engine.seen, "rows", lambda inputs: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        answers(engine, requests[2])
    assert len(answers(engine, requests[0])) == COUNT
    nothing_is_left(engine)


def test_the_tower_works_beside_the_steps_of_others(
    engine: Engine, requests: list[Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a picture is in the tower another request gets all of its tokens; the answer is the same as serially."""
    serially = answers(engine, requests[2])
    engine.reuse.forget()
    entered, leave, rows = threading.Event(), threading.Event(), engine.seen.rows

    def slow(inputs: Inputs) -> Any:
        entered.set()
        assert leave.wait(TIMEOUT_S)
        return rows(inputs)

    monkeypatch.setattr(engine.seen, "rows", slow)
    with ThreadPoolExecutor(1) as pool:
        pictures = pool.submit(answers, engine, requests[2])
        assert entered.wait(TIMEOUT_S)
        assert len(answers(engine, requests[0])) == COUNT
        leave.set()
        assert pictures.result(TIMEOUT_S) == serially


def test_a_request_that_never_fits_is_refused(engine: Engine, requests: list[Inputs]) -> None:
    """More tokens than all pages hold are an error at once; a closed engine takes nothing."""
    with pytest.raises(PortError, match="expected a request of at most 1024 pages"):
        next(engine.tokens(requests[0], 5000))
    engine.close()
    with pytest.raises(PortError, match="found it closed"):
        next(engine.tokens(requests[0], 1))


def test_closing_ends_requests_under_way(engine: Engine, requests: list[Inputs]) -> None:
    """Who waits for a token when the engine closes gets an error, not silence."""
    stream = engine.tokens(requests[0], 500)
    next(stream)
    engine.close()
    with pytest.raises(PortError, match="the engine was closed"):
        for _ in stream:
            pass


def test_a_mistake_of_the_engine_reaches_everybody(
    engine: Engine, requests: list[Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the thread of steps itself breaks, who waits gets the error, and who comes later a closed engine."""
    monkeypatch.setattr(engine, "_admit", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        next(engine.tokens(requests[0], 1))
    with pytest.raises(PortError, match="found it closed"):
        next(engine.tokens(requests[0], 1))


@pytest.mark.parametrize("right", [0, 1, 2])
def test_drafts_do_not_change_the_answer(
    engine: Engine, requests: list[Inputs], monkeypatch: pytest.MonkeyPatch, right: int
) -> None:
    """With two drafts of which none, one or all are right, the tokens are those of plain decoding."""
    request, count = requests[1], 9
    plain = engine.port.generate(request, count + 3, silent)
    own = speculate.drafted

    def drafted(port: Any, slot: int, token: int, wanted: int) -> list[int]:
        guesses = own(port, slot, token, wanted)
        place = port.memory.pages.lengths[slot] - request.token_ids.shape[-1] + 1
        return [*plain[place : place + right], *((g + 1) % 256 for g in guesses[right:])][:wanted]

    monkeypatch.setattr(speculate, "drafted", drafted)
    engine.drafts = 2
    assert answers(engine, request, count) == plain[:count]
    found = settled(engine)
    assert found["drafted_tokens"] >= found["accepted_tokens"] >= right * 2
    nothing_is_left(engine)


def test_a_growing_request_has_the_positions_that_follow() -> None:
    """Tokens are added in place, at positions one after the other."""
    growing = Growing(Inputs(token_ids=torch.tensor([[5, 6]]), position_ids=torch.tensor([[7, 8]])), 3)
    growing.append(9)
    found = growing.inputs()
    assert found.token_ids.tolist() == [[5, 6, 9]]
    assert found.position_ids is not None
    assert found.position_ids.tolist() == [[7, 8, 9]]
    assert growing.inputs(1).token_ids.tolist() == [[5]]
