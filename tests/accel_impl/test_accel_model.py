from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accel_runs import DECODE_FROM, furthest, setup_of, stepped, whole

import accel_impl
import reference_impl
from accel_impl import ops, sparse
from harness.adapter import capabilities, silent
from harness.cases import ModelInfo, text_case
from harness.errors import PortError
from harness.plugins import open_adapter, parse_spec
from harness.recorder import Pins, TraceRecorder
from harness.types import Case, Setup


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    setup = Setup(side="reference", role="oracle", adapter="builtin:reference", dtype="float32")
    port = reference_impl.adapter(checkpoint, setup)
    port.load(checkpoint, setup)
    return port


@pytest.mark.parametrize("variant", ["custom", "reference"])
@pytest.mark.parametrize("kind", ["text", "pictures"])
def test_every_tap_equals_the_reference(
    opened: Any, reference: Any, request: pytest.FixtureRequest, kind: str, variant: str
) -> None:
    """In float32 both implementations of the page record the same taps, in order, and decide the same."""
    case = request.getfixturevalue(kind)
    actual, expected = whole(opened(ops=variant), case), whole(reference, case)
    assert actual.taps == expected.taps
    assert furthest(actual, expected) < (1e-5, "")


def error_ratios(opened: Any, checkpoint: Path, case: Case) -> dict[str, float]:
    """Return each unit's error against float64, over that of the reference's own float32; inputs are pinned."""
    setup = Setup(side="reference", role="oracle", adapter="builtin:reference", dtype="float64")
    oracle = reference_impl.adapter(checkpoint, setup)
    oracle.load(checkpoint, setup)
    floor = reference_impl.adapter(checkpoint, replace(setup, dtype="float32"))
    floor.load(checkpoint, replace(setup, dtype="float32"))
    free = whole(oracle, case)
    pins = Pins(tensors=free.tensors(), taps=free.taps, level=3, dtype=torch.float32, decisions=True)
    exact, low, port = (whole(p, case, TraceRecorder(pins=pins)).tensors() for p in (oracle, floor, opened()))
    found = {}
    for name, value in exact.items():
        if value.is_floating_point() and not name.startswith("inputs."):
            finite = value.isfinite()
            error = [(t[name].double() - value)[finite].norm() for t in (port, low)]
            guard = value[finite].norm() * 2**-25
            found[name] = float(error[0] / torch.maximum(error[1], guard))
    return found


def test_float32_units_are_as_near_to_float64_as_the_references(
    opened: Any, checkpoint: Path, text: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No unit's error exceeds the reference's own by more than chance; another epsilon in one norm does, there."""
    assert max(error_ratios(opened, checkpoint, text).values()) < 1.5
    monkeypatch.setattr(sparse, "INDEXER_EPS", 1e-5)
    wrong = {name for name, ratio in error_ratios(opened, checkpoint, text).items() if ratio > 1.5}
    assert wrong == {f"{n}.attn.indexer.k" for n in ("layers.3", "layers.7", "mtp")}


@pytest.mark.parametrize("variant", ["custom", "reference"])
def test_prefill_chunk_and_decode_agree(opened: Any, pictures: Case, variant: str) -> None:
    """A request in one piece, and in a prefill, a chunk and single steps, gives the same at every tap."""
    port = opened(ops=variant)
    assert furthest(stepped(port, pictures), whole(port, pictures)) < (1e-5, "")
    facts = port.cache_facts()
    assert facts["pages_free"] == facts["pages_total"]


def test_a_wrong_position_in_decode_is_seen_there_only(
    opened: Any, text: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the decode path moves no token of the prefill or the chunk."""
    port, attend = opened(), ops.attend_decode
    expected = stepped(port, text).tensors()["layers.3.attn.core"]
    monkeypatch.setattr(ops, "attend_decode", lambda use, *a: attend(use, *a[:-1], a[-1] * 1.1))
    moved = (stepped(port, text).tensors()["layers.3.attn.core"] - expected).abs().amax((0, 2, 3)) > 1e-6
    assert moved.nonzero().flatten().tolist() == list(range(DECODE_FROM, len(moved)))


def test_decode_reads_chosen_rows_only(opened: Any, pictures: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single step takes one step of each recurrence, and attends to what is chosen, the window and the pictures."""
    port, asked = opened(), []
    for name in ("attend_prefill", "attend_decode", "scan_chunks", "scan_step"):
        entry = getattr(ops, name)

        def watched(use: Any, *args: Any, name: str = name, entry: Any = entry) -> torch.Tensor:
            asked.append((name, tuple(args[3].shape)[-1] if "attend" in name else 0))
            found: torch.Tensor = entry(use, *args)
            return found

        monkeypatch.setattr(ops, name, watched)
    inputs = port.prepare(pictures, silent)
    slot, length = port.open(), inputs.token_ids.shape[1]
    port.step(slot, inputs, 0, length - 1, silent)
    assert {name for name, _ in asked} == {"attend_prefill", "scan_chunks"}
    asked.clear()
    port.step(slot, inputs, length - 1, length, silent)
    port.free(slot)
    keys, rows = port.config.index_topk + port.config.index_window, port.picture_rows(inputs)
    layers = [*[("scan_step", 0)] * 3, ("attend_decode", keys + rows)] * 2
    assert asked == [*layers, ("attend_decode", keys)]


def test_a_used_slot_says_the_same(opened: Any, info: ModelInfo, text: Case) -> None:
    """A request in a slot and pages that another one used gives the very same bits."""
    port = opened()
    fresh = stepped(port, text).tensors()["logits"]
    stepped(port, text_case(info, 21, seed=5))
    assert torch.equal(stepped(port, text).tensors()["logits"], fresh)


def test_two_requests_in_turn_do_not_touch_each_other(opened: Any, info: ModelInfo) -> None:
    """Two slots stepped in turn give the very bits that each gives alone."""
    port = opened()
    cases = [text_case(info, 8, seed=1), text_case(info, 13, seed=2)]
    inputs = [port.prepare(case, silent) for case in cases]

    def steps(slot: int, index: int) -> Any:
        length = inputs[index].token_ids.shape[1]
        for start, stop in [(0, 5), *((i, i + 1) for i in range(5, length))]:
            yield port.step(slot, inputs[index], start, stop, silent)

    alone = []
    for index in range(2):
        slot = port.open()
        alone.append(list(steps(slot, index)))
        port.free(slot)
    slots = [port.open(), port.open()]
    turns: list[list[torch.Tensor]] = [[], []]
    running = {index: steps(slots[index], index) for index in range(2)}
    while running:
        for index in list(running):
            logits = next(running[index], None)
            if logits is None:
                del running[index]
            else:
                turns[index].append(logits)
    for slot in slots:
        port.free(slot)
    for index in range(2):
        assert torch.equal(torch.cat(turns[index], 1), torch.cat(alone[index], 1))


def test_generation_is_greedy_over_the_cache(opened: Any, text: Case) -> None:
    """Each generated id is the argmax of a whole prefill of everything before it."""
    port = opened()
    inputs = port.prepare(text, silent)
    ids = port.generate(inputs, 5, silent)
    prompt = [int(i) for i in inputs.token_ids[0]]
    case = Case(id="all", token_ids=tuple(prompt + ids))
    logits = port.forward(port.prepare(case, silent), silent)[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == ids


def test_a_replay_isolates_every_unit(opened: Any, text: Case) -> None:
    """With another run's values put in, a fault in one layer is seen in that layer only."""
    port = opened()
    free = whole(port, text)
    pins = Pins(tensors=free.tensors(), taps=free.taps, level=3, dtype=torch.float32, decisions=True)
    port.model.weights["model.layers.3.self_attn.q_a_layernorm.weight"].tensor.mul_(1.01)
    try:
        replayed = whole(port, text, TraceRecorder(pins=pins))
    finally:
        port.model.weights["model.layers.3.self_attn.q_a_layernorm.weight"].tensor.div_(1.01)
    assert not replayed.notes
    expected, actual = free.tensors(), replayed.tensors()
    moved = [
        n for n, v in expected.items() if v.is_floating_point() and (actual[n] - v).nan_to_num(0).abs().max() > 1e-4
    ]
    assert moved == ["layers.3.attn.q_norm"]


def test_pinned_decisions_are_the_ones_used(opened: Any, text: Case) -> None:
    """Where the recorder gives other experts, routing weights follow them."""
    port = opened()
    free = whole(port, text)
    tap = "layers.1.moe.router.topk"
    other = {tap: torch.tensor([4, 5, 6]).expand_as(free.tensors()[tap]).clone()}
    pins = Pins(tensors=other, taps=free.taps, level=3, dtype=torch.float32, decisions=True)
    seen = whole(port, text, TraceRecorder(pins=pins)).tensors()
    p = seen["layers.1.moe.router.logits"].sigmoid()[..., 4:7]
    torch.testing.assert_close(seen["layers.1.moe.router.weights"], 2.5 * p / p.sum(-1, keepdim=True))


def test_bf16_stays_close_to_float32_where_decisions_agree(opened: Any, text: Case) -> None:
    """A bf16 layer fed with the float32 run's values is off by no more than rounding."""
    free = whole(opened("float32"), text)
    pins = Pins(tensors=free.tensors(), taps=free.taps, level=3, dtype=torch.bfloat16, decisions=True)
    low = whole(opened("bfloat16"), text, TraceRecorder(pins=pins))
    exact = whole(opened("float32"), text, TraceRecorder(pins=pins))
    for name, value in exact.tensors().items():
        if value.is_floating_point() and name != "logits":
            finite = value.isfinite()
            error = (low.tensors()[name].float() - value)[finite].norm() / value[finite].norm()
            assert error < 0.01, name


def test_the_port_claims_what_it_has(opened: Any) -> None:
    """Every capability is there, and every tap has a place in the port's own words."""
    port = opened()
    expected = {"phases", "weights", "converts", "chat", "serves", "multi_card", "cache", "operators"}
    assert expected | {"resumes", "rewinds", "batches", "drafts"} == set(capabilities(port))
    levels = {n: op for n, op in port.operators().items() if isinstance(op, str)}
    assert port.scope.fallbacks == tuple(n for n, level in levels.items() if level == "reference")


def test_an_operator_that_is_switched_runs_on_the_reference(opened: Any, pictures: Case) -> None:
    """Named operators run on the reference, are told as fallbacks, and give the same; the others stay as they were."""
    names = "attn.sparse_prefill,recurrent.prefill,moe.experts"
    port = opened(fallback=names)
    assert set(names.split(",")) <= set(port.scope.fallbacks)
    assert port.operators()["attn.sparse_decode"] == "custom"
    assert furthest(whole(port, pictures), whole(opened(), pictures)) < (1e-5, "")


@pytest.mark.parametrize("policies", [("random", "random"), ("random", "block"), ("block", "importance")])
def test_each_policy_chooses_the_same_in_every_phase(
    checkpoint: Path, tmp_path: Path, text: Case, policies: tuple[str, str]
) -> None:
    """Whatever the policy, prefill, chunks and steps choose the same keys; a random one needs no indexer."""
    port = relabelled(
        checkpoint, tmp_path, index_policies=[None, None, None, policies[0], None, None, None, policies[1]]
    )
    free = whole(port, text)
    assert furthest(stepped(port, text), free) < (1e-5, "")
    assert ("layers.3.attn.indexer.q" in free.taps) == (policies[0] != "random")
    assert (free.tensors()["layers.3.attn.indexer.topk"][0, -1] >= 0).all()


def relabelled(checkpoint: Path, folder: Path, **changes: Any) -> Any:
    """Return the port on the same weights under another configuration."""
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((checkpoint / "config.json").read_text()) | changes
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    port = accel_impl.adapter(folder, setup_of("float32"))
    assert not port.load(folder, setup_of("float32"))["unused"]
    return port


def test_decode_side_by_side_says_what_each_says_alone(opened: Any, info: ModelInfo) -> None:
    """Requests of different lengths, one token each in one call, give the logits that they give one after the other."""
    port = opened()
    cases = [text_case(info, n, seed=n) for n in (9, 23, 14)]
    inputs = [port.prepare(case, silent) for case in cases]
    alone, slots = [], []
    for given in inputs:
        slot, length = port.open(), given.token_ids.shape[1]
        port.step(slot, given, 0, length - 1, silent)
        alone.append(port.step(slot, given, length - 1, length, silent)[0, -1])
        port.free(slot)
    for given in inputs:
        slots.append(port.open())
        port.step(slots[-1], given, 0, given.token_ids.shape[1] - 1, silent)
    together = port.decode_together(slots, [int(given.token_ids[0, -1]) for given in inputs]).logits
    for slot in slots:
        port.free(slot)
    torch.testing.assert_close(together[:, 0], torch.stack(alone), atol=2e-5, rtol=1e-5)


def test_every_tap_has_a_place(opened: Any, pictures: Case) -> None:
    """The port's own words for places cover exactly the taps that it records."""
    port = opened()
    assert set(port.module_paths) == set(whole(port, pictures).tensors())


def test_misplaced_pictures_are_refused(opened: Any, pictures: Case) -> None:
    """Fewer places than pictures is an error that says how many were expected."""
    port = opened()
    case = Case(id="bad", token_ids=pictures.token_ids, images=pictures.images, image_at=(1,))
    with pytest.raises(PortError, match="each of 2 pictures"):
        port.prepare(case, silent)


def test_a_users_factory_can_break_the_port(checkpoint: Path, tmp_path: Path, text: Case) -> None:
    """A port file that wraps an operator and returns the built-in port is opened like any other, with its options."""
    file = tmp_path / "broken.py"
    file.write_text(
        "import accel_impl\n"
        "from accel_impl import port\n"
        "class Broken(port.AccelAdapter):\n"
        "    def load(self, checkpoint, setup):\n"
        "        facts = super().load(checkpoint, setup)\n"
        "        self.model.weights['model.layers.3.self_attn.sinks'].tensor.zero_()\n"
        "        return facts\n"
        "def factory(checkpoint, setup):\n"
        "    return Broken(checkpoint, setup)\n"
    )
    setup = setup_of("float32", ops="reference")
    broken = open_adapter(parse_spec(f"{file}:factory"), checkpoint, setup)
    broken.load(checkpoint, setup)
    assert {op for op in broken.operators().values() if isinstance(op, str)} == {"reference"}
    port = accel_impl.adapter(checkpoint, setup)
    port.load(checkpoint, setup)
    actual, expected = whole(broken, text).tensors(), whole(port, text).tensors()
    assert next(n for n, v in expected.items() if not torch.equal(actual[n], v)) == "layers.3.attn.core"
