"""The startup stage: one real generation, the text front end fact by fact, two requests in two slots."""

from __future__ import annotations

import base64
import dataclasses
import io
import json

import pytest
import torch

from harness import exercise, served
from harness.adapter import Inputs
from harness.adapters.smoke import CHECKS
from harness.cases import ModelInfo, seeded_image, special_strings
from harness.stages import StageContext, StageView, startup
from harness.types import Case, Failure, Scope, Setup, Trace

EVERYTHING = frozenset({"chat", "phases", "serves"})


def context(capabilities=EVERYTHING, *, path="") -> StageContext:
    return StageContext(
        info=ModelInfo(path=str(path), config={}, vocab_size=300, layers=2, max_length_tokens=64, special_ids=(1,)),
        scope=Scope(serves="serves" in capabilities, off={"operators": "told in tests/ops"}),
        capabilities=capabilities,
        reference_capabilities=EVERYTHING,
        profile="quick",
        dtype="bfloat16",
    )


class Port:
    """Bytes as tokens, 1 in front; a recurrent state per slot. `fault` is what it does wrong."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.slots, self.free_slots = fault, {}, [0, 1, 2]
        self.scope = Scope()

    def encode(self, text):
        if self.fault == "bos_twice":
            return [1, 1, *(b + 2 for b in text.encode())]
        return [1, *(b + 2 for b in text.encode())]

    def decode(self, ids):
        data = bytes(i - 2 for i in ids if i > 1)
        return data.decode(errors="ignore" if self.fault == "cut" else "replace")

    def render(self, messages):
        text = "".join(
            f"<{m['role']}>{m['content'].strip() if self.fault == 'strip' else m['content']}" for m in messages
        )
        return text + "<assistant>"

    def eos_ids(self):
        return frozenset({0} if self.fault == "eos" else {0, 2})

    def prepare(self, case, record):
        ids = list(case.token_ids or self.encode(self.render(case.messages)))
        return Inputs(token_ids=torch.tensor([ids]))

    def open(self):
        slot = 0 if self.fault == "shared_slot" else self.free_slots.pop(0)
        self.slots[slot] = torch.zeros(8)
        return slot

    def step(self, slot, inputs, start, stop, record):
        logits = []
        for token in inputs.token_ids[0, start:stop].tolist():
            self.slots[slot] = torch.sin(self.slots[slot] * 3 + torch.arange(8.0) * (token + 1))
            logits.append(self.slots[slot] @ torch.sin(torch.arange(8 * 300.0).reshape(8, 300)))
        return torch.stack(logits)[None]

    def free(self, slot):
        if self.fault != "shared_slot":
            self.free_slots.append(slot)


def trace_of(run, port):
    setup = Setup(side="accel", role="accel", adapter="x")
    if run.kind == "chat":
        facts = exercise.chat(port, run.options)
    elif run.kind == "concurrent":
        facts = exercise.concurrent(port, run, lambda words: None)
    else:
        facts = {"token_ids": [5, 6], "ttft_s": 0.1, "tokens_per_s": 20.0}
    facts = json.loads(json.dumps(facts))  # as it comes from disk
    return Trace(setup=setup, run=run, taps={}, tensors={}, facts=facts)


def measured(port, *, ctx=None, change=lambda trace: trace):
    ctx = ctx or context(frozenset({"chat", "phases"}))
    runs = startup.plan(ctx)

    def trace(role, run_id):
        run = next(r for r in runs if r.id == run_id)
        return change(trace_of(run, port)) if role == "accel" else trace_of(run, Port())

    return startup.measure(StageView(context=ctx, runs=runs, trace=trace))


def wrong(found):
    return {(m.metric, m.subject) for m in found if m.metric.endswith("_mismatches") and m.value != 0}


def test_what_is_not_claimed_is_not_planned():
    """A port without a text front end, phases or an endpoint is asked for one generation, and nothing else."""
    assert [r.id for r in startup.plan(context(frozenset()))] == ["startup/ready"]
    assert [r.kind for r in startup.plan(context())] == ["generate", "chat", "concurrent", "serve"]


def test_special_strings_of_the_tokenizer_are_asked_for(tmp_path):
    """The texts hold the model's own special strings inside other text, where a tokenizer must not take them apart."""
    tokens = [{"content": "<bos>", "special": True}, {"content": "word", "special": False}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    ctx = context(path=tmp_path)
    assert special_strings(ctx.info) == ("<bos>",)
    chat = next(r for r in startup.plan(ctx) if r.kind == "chat")
    assert "before<bos>after" in chat.options["texts"]


def test_an_equal_front_end_measures_clean():
    """A port whose text front end and slots are right has no mismatch, and every text has been compared."""
    found = measured(Port())
    assert wrong(found) == set()
    assert not [m for m in found if m.problem]
    assert len([m for m in found if m.metric == "tokenizer_mismatches"]) == 3 * len(startup.TEXTS) + 1


@pytest.mark.parametrize(
    ("fault", "places"),
    [
        ("bos_twice", {("tokenizer_mismatches", "tokenizer.encode"), ("template_mismatches", "template.prepared")}),
        ("cut", {("tokenizer_mismatches", "tokenizer.decode_partial")}),
        ("strip", {("template_mismatches", "template.rendered"), ("template_mismatches", "template.prepared")}),
        ("eos", {("eos_mismatches", "eos_ids")}),
        ("shared_slot", {("concurrency_mismatches", "slots")}),
    ],
)
def test_a_fault_of_the_front_end_shows_in_its_place(fault, places):
    """Each fault is counted where it lies, and the fault of one part does not show in the numbers of another."""
    found = wrong(measured(Port(fault)))
    assert places <= found
    assert {metric for metric, _ in found} == {metric for metric, _ in places}


def test_a_mismatch_shows_both_sides_at_the_first_difference():
    """The detail of a mismatch has what was found and what was expected, around the first index that differs."""
    found = [m for m in measured(Port("strip")) if m.subject == "template.rendered" and m.value]
    assert "안녕" in found[0].detail["actual"]
    assert "index 6 on" in found[0].detail["actual"]
    assert found[0].detail["actual"] != found[0].detail["expected"]


def test_ready_is_a_generation():
    """A port that generates nothing has zero ready tokens; one that crashed has no number at all, but an error."""

    def nothing(trace):
        return dataclasses.replace(trace, facts={"token_ids": []})

    def crash(trace):
        return Failure(run=trace.run.id, kind="crash", message="SIGSEGV", last_tap="layers.1")

    ctx = context(frozenset())
    assert [m.value for m in measured(Port(), ctx=ctx) if m.metric == "ready_tokens"] == [2]
    assert [m.value for m in measured(Port(), ctx=ctx, change=nothing) if m.metric == "ready_tokens"] == [0]
    lost = measured(Port(), change=crash)
    assert all(m.problem == "error" and "SIGSEGV" in m.detail["message"] for m in lost)
    assert {m.metric for m in lost} == {
        "ready_tokens", "tokenizer_mismatches", "template_mismatches", "eos_mismatches", "concurrency_mismatches",
    }  # fmt: skip


def test_a_check_of_the_endpoint_that_was_not_reached_is_missing():
    """Errors are counted by check; one that is neither made nor named as not applicable is missing, not zero."""
    ctx = context(frozenset({"serves"}))
    runs = [r for r in startup.plan(ctx) if r.kind == "serve"]
    made = {name: {"errors": 0, "of": 1, "detail": []} for name in CHECKS[:-3]}
    made["stream"] = {"errors": 2, "of": 4, "detail": ["expected 'é', found '��'"]}
    facts = {"checks": made, "not_applicable": {CHECKS[-1]: "no front end"}}
    setup = Setup(side="accel", role="accel", adapter="x")
    trace = Trace(setup=setup, run=runs[0], taps={}, tensors={}, facts=facts)
    found = startup.measure(StageView(context=ctx, runs=runs, trace=lambda role, run_id: trace))
    assert {m.subject: (m.value, m.problem) for m in found if m.value != 0} == {
        "endpoint.stream": (2, ""),
        f"endpoint.{CHECKS[-3]}": (None, "missing"),
        f"endpoint.{CHECKS[-2]}": (None, "missing"),
    }


class Phases:
    """Logits of three words at each place; single steps move the first two apart by twice `moved` at the second."""

    def __init__(self, moved: float) -> None:
        self.logits = torch.tensor([[[9.0, 0, 0], [5.0, 4.9, 1], [0, 7.0, 6.5], [0, 0, 8.0]]])
        self.moved = torch.tensor([moved, -moved, 0.0])
        self.opened, self.positions = 0, None

    def forward(self, inputs, record):
        self.positions = inputs.position_ids
        return self.logits[:, : inputs.token_ids.shape[1]]

    def open(self):
        self.opened += 1
        return 0

    def step(self, slot, inputs, start, stop, record):
        return self.logits[:, start:stop] + (self.moved if stop == 2 else 0)

    def free(self, slot):
        self.opened -= 1


def test_a_token_is_unlikely_where_the_port_s_own_phases_do_not_explain_it():
    """A second best word passes where prefill and steps differ enough to turn the choice, and what follows is judged
    as its sequel; without a difference only the best words pass."""
    positions = torch.tensor([[[0, 4]]])
    for moved, ids, place in ((0.1, [1, 1], None), (0.0, [0, 1], None), (0.0, [1, 1], 0), (0.1, [1, 0, 2], 1)):
        port = Phases(moved)
        inputs = Inputs(token_ids=torch.tensor([[7, 7]]), position_ids=positions)
        assert served._unlikely(port, inputs, ids) == place
        assert port.positions[0, 0].tolist() == [0, 4, *range(5, 5 + len(ids))]
        assert port.opened == 0
    assert served._unlikely(Phases(0.1), inputs, [1, 3]) == 1  # no such word


def test_a_picture_goes_over_the_wire_as_it_is():
    """Marks of pictures become PNG files in order, text stays; an image library reads the very bytes back."""
    from PIL import Image as Pictures

    images = (seeded_image(19, 35, seed=1), seeded_image(16, 16, seed=2))
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    told = ({"role": "user", "content": parts}, {"role": "assistant", "content": "so"})
    first, second = served._over_http(Case(id="c", messages=told, images=images))
    assert second == told[1]
    assert [p["type"] for p in first["content"]] == ["image_url", "text", "image_url"]
    for part, image in zip(first["content"][::2], images, strict=True):
        head, _, data = part["image_url"]["url"].partition(",")
        assert head == "data:image/png;base64"
        with Pictures.open(io.BytesIO(base64.b64decode(data))) as found:
            assert found.size == (image.width, image.height)
            assert base64.b64encode(found.convert("RGB").tobytes()).decode() == image.rgb


def test_the_endpoint_is_shown_a_picture_where_pictures_are_claimed():
    """A port with pictures, words and an endpoint is asked about one that has to be resized; others are not."""
    plain = context()
    info = dataclasses.replace(plain.info, patch_size=8, merge_size=2)
    for image in (True, False):
        ctx = dataclasses.replace(plain, info=info, scope=dataclasses.replace(plain.scope, image=image))
        (run,) = (r for r in startup.plan(ctx) if r.kind == "serve")
        assert run.options.get("picture") == ([35, 83] if image else None)
