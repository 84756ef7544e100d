from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from accel_impl import speculate
from harness.adapter import Inputs, silent
from harness.cases import ModelInfo, image_case, text_case

COUNT = 10


@pytest.fixture(params=["bfloat16", "float32"])
def port(opened: Any, request: Any) -> Any:
    return opened(request.param)


def filled(port: Any, inputs: Inputs) -> tuple[int, int]:
    """Return a slot that holds a request, and the token that follows."""
    slot = port.open()
    logits = port.step(slot, inputs, 0, inputs.token_ids.shape[-1], silent)
    return slot, int(logits[0, -1].argmax())


@pytest.mark.parametrize("pictures", [False, True])
def test_a_speculated_generation_is_the_greedy_one(port: Any, info: ModelInfo, pictures: bool) -> None:
    """With drafts, right or wrong, the tokens are those of one step after the other; every slot and page comes back."""
    case = image_case(info, [(48, 32)], seed=5) if pictures else text_case(info, 30, seed=5)
    inputs = port.prepare(case, silent)
    plain = port.generate(inputs, COUNT, silent)
    for drafts in (0, 3):
        ids, told = port.speculate(inputs, COUNT, drafts)
        assert ids == plain
        assert told["drafted"] >= told["accepted"] >= 0
        assert (told["drafted"] > 0) == (drafts > 0)
    assert port.cache_facts()["slots_free"] == port.cache_facts()["slots_total"]


def test_right_drafts_save_steps(opened: Any, info: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every guess is right, ten tokens take a prefill, two steps of four and one of what is left."""
    port = opened("float32")
    inputs = port.prepare(text_case(info, 30, seed=5), silent)
    plain = port.generate(inputs, COUNT, silent)
    guesses = iter([plain[1:4], plain[5:8], []])
    monkeypatch.setattr(speculate, "drafted", lambda port, slot, token, count: next(guesses)[:count])
    advance, steps = port.advance, list[int]()

    def counted(slot: int, inputs: Inputs, start: int, stop: int, *how: Any, **more: Any) -> Any:
        steps.append(stop - start)
        return advance(slot, inputs, start, stop, *how, **more)

    monkeypatch.setattr(port, "advance", counted)
    assert port.speculate(inputs, COUNT, 3) == (plain, {"drafted": 6, "accepted": 6})
    assert steps == [30, 4, 4, 1]


def test_a_draft_is_what_the_layer_for_one_more_token_says(port: Any, info: ModelInfo) -> None:
    """The first guess is that layer's best token once the known one is computed; drafting leaves the slot as it was."""
    inputs = port.prepare(text_case(info, 21, seed=6), silent)
    slot, token = filled(port, inputs)
    before = port.mark(slot)
    pages = {key: pool.clone() for key, pool in port.memory.pages.pools.items()}
    guesses = speculate.drafted(port, slot, token, 3)
    after = port.mark(slot)
    assert after.length == before.length
    assert all(torch.equal(a, b) for a, b in zip(after.states.tensors, before.states.tensors, strict=True))
    changed = {layer for (layer, _), pool in port.memory.pages.pools.items() if not torch.equal(pool, pages[layer, _])}
    assert changed == {port.config.further}
    longer = port.prepare(text_case(info, 21, seed=6), silent)
    ids = torch.cat((longer.token_ids, torch.tensor([[token]])), dim=1)
    out = port.advance(slot, Inputs(token_ids=ids), 21, 22, silent)
    assert guesses[0] == int(out.further[0, -1].argmax())
    port.free(slot)


def test_an_end_token_among_drafts_ends_the_text(opened: Any, info: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that were verified behind an end of sequence are not given."""
    port = opened("float32")
    inputs = port.prepare(text_case(info, 30, seed=5), silent)
    plain = port.generate(inputs, COUNT, silent)
    monkeypatch.setattr(port, "config", dataclasses.replace(port.config, eos_token_id=(plain[2],)))
    monkeypatch.setattr(speculate, "drafted", lambda port, slot, token, count: plain[1:4][:count])
    assert port.speculate(inputs, COUNT, 3)[0] == plain[: plain.index(plain[2]) + 1]
