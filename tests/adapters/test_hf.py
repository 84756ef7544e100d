"""Transformers folders as ports: one rule set names, records, replays and phases every architecture."""

from __future__ import annotations

import re

import pytest
import torch

from harness.adapter import Inputs, capabilities, silent
from harness.cases import image_case, text_case
from harness.errors import SpecError
from harness.recorder import Pins, TraceRecorder
from harness.taps import level_of
from harness.types import Case, Setup
from tests.adapters.conftest import Opener

pytest.importorskip("transformers")

ARCHITECTURES = ("llama", "gpt_oss", "deepseek_v32", "kimi_linear", "qwen3_next", "glm5_next", "inkling2")
LENGTH = 23


def run(adapter, case: Case, pins: Pins | None = None) -> tuple[TraceRecorder, torch.Tensor, Inputs]:
    recorder = TraceRecorder(pins=pins)
    inputs = adapter.prepare(case, recorder)
    recorder.span(0, inputs.token_ids.shape[-1])
    return recorder, adapter.forward(inputs, recorder), inputs


def pins_of(recorder: TraceRecorder, level: int, dtype=torch.float32, decisions: bool = False) -> Pins:
    return Pins(tensors=recorder.tensors(), taps=recorder.taps, level=level, dtype=dtype, decisions=decisions)


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    where = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(actual), where)
    actual, expected = actual[where].double(), expected[where].double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_taps(opened: Opener, name: str) -> None:
    """Observing changes nothing, and float32 and bf16 show the same taps, canonically named, with every decision."""
    wide, narrow = opened(name), opened(name, "bfloat16")
    case = text_case(wide.info, LENGTH)
    recorder, logits, inputs = run(wide, case)
    assert torch.equal(wide.forward(inputs, silent), logits)
    assert list(run(narrow, case)[0].taps) == list(recorder.taps)
    taps = recorder.taps
    for layer in range(4):
        assert {f"layers.{layer}", f"layers.{layer}.attn", f"layers.{layer}.post_attn_norm"} <= set(taps)
        assert level_of(f"layers.{layer}") == 1
        routed = f"layers.{layer}.moe" in taps
        assert routed == any(re.fullmatch(rf"layers\.{layer}\.moe\.router\.topk(\.\d)?", t) for t in taps)
        assert routed != (f"layers.{layer}.mlp" in taps)
    assert {"embed", "norm", "logits"} <= set(taps)
    assert all(taps[t].dims.count("token") == 1 for t in taps), [t for t in taps if "token" not in taps[t].dims]
    indexed = [t for t in taps if t.endswith("indexer.topk")]
    assert len(indexed) == {"deepseek_v32": 4, "glm5_next": 2}.get(name, 0)
    assert all(taps[t].kind == "selection" and f"{t}.scores" in taps for t in indexed)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_replay(opened: Opener, name: str) -> None:
    """A replay of a model's own values reproduces every tap at every level, and bf16 errs by bf16 only, tap by tap."""
    wide, narrow = opened(name), opened(name, "bfloat16")
    case = text_case(wide.info, LENGTH)
    free = run(wide, case)[0]
    expected = free.tensors()
    for level in (1, 2, 3):
        replayed = run(wide, case, pins_of(free, level))[0]
        found = replayed.tensors()
        assert not replayed.notes
        pinned = {t for t in expected if free.taps[t].kind == "hidden" and level_of(t) <= level}
        assert replayed.pinned == pinned
        assert pinned <= set(found) <= set(expected)
        worst = max((difference(found[t], expected[t]), t) for t in found if found[t].is_floating_point())
        assert worst < (1e-5, "")
    pins = pins_of(free, 3, torch.bfloat16, decisions=True)
    oracle, port = (run(side, case, pins)[0].tensors() for side in (wide, narrow))
    hidden = [t for t in oracle if free.taps[t].kind == "hidden"]
    assert max((difference(port[t].float(), oracle[t]), t) for t in hidden) < (0.01, "")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_phases(opened: Opener, name: str) -> None:
    """Chunks and decode steps give the taps of one whole prefill, also while its values are replayed."""
    adapter = opened(name)
    whole, logits, inputs = run(adapter, text_case(adapter.info, LENGTH))
    expected = whole.tensors()
    for pins in (None, pins_of(whole, 3)):
        recorder = TraceRecorder(pins=pins)
        slot, parts = adapter.open(), []
        for start, stop in ((0, 11), (11, 19), *((i, i + 1) for i in range(19, LENGTH))):
            recorder.span(start, stop)
            parts.append(adapter.step(slot, inputs, start, stop, recorder))
        adapter.free(slot)
        found = recorder.tensors()
        assert not recorder.notes
        assert set(found) == {t for t in expected if not t.startswith("inputs.")}
        worst = max((difference(found[t], expected[t]), t) for t in found if found[t].is_floating_point())
        assert worst < (1e-4, "")
        assert difference(torch.cat(parts, 1), logits) < 1e-4


def test_slots_do_not_meet(opened: Opener) -> None:
    """Two requests in two slots, step by step in turn, give what each gives alone; a freed slot forgets."""
    adapter = opened("qwen3_next")
    cases = [text_case(adapter.info, 13, seed=seed) for seed in (1, 2)]
    inputs = [adapter.prepare(case, silent) for case in cases]
    alone = [adapter.forward(given, silent) for given in inputs]
    for _ in range(2):
        slots, parts = [adapter.open(), adapter.open()], [[], []]
        for start, stop in ((0, 7), (7, 12), (12, 13)):
            for i in (0, 1):
                parts[i].append(adapter.step(slots[i], inputs[i], start, stop, silent))
        for slot in slots:
            adapter.free(slot)
        for i in (0, 1):
            assert difference(torch.cat(parts[i], 1), alone[i]) < 1e-5


@pytest.mark.parametrize("name", ["glm5_next", "inkling2", "qwen3_vl_moe"])
def test_images(opened: Opener, name: str) -> None:
    """Pictures of two sizes reach the tower in its own layout, replay exactly, and a swapped patch moves the logits."""
    adapter = opened(name)
    case = image_case(adapter.info, [(56, 84), (100, 60)])
    free, logits, inputs = run(adapter, case)
    expected = free.tensors()
    assert {"inputs.pixel_values", "inputs.image_grid", "vision.patch_embed", "vision.merger", "merged"} <= set(
        expected
    )
    assert {t for t in expected if re.fullmatch(r"vision\.blocks\.\d", t)} == {"vision.blocks.0", "vision.blocks.1"}
    assert expected["inputs.pixel_values"].dtype == torch.float32
    rows = int((inputs.token_ids == adapter.info.image_token_id).sum())
    assert rows == 2 * 3 + 4 * 2
    assert expected["vision.merger"].shape[0] == rows
    found = run(adapter, case, pins_of(free, 3))[0].tensors()
    assert list(found) == list(expected)
    worst = max((difference(found[t], expected[t]), t) for t in expected if expected[t].is_floating_point())
    assert worst < (1e-5, "")
    pixels = inputs.extras["pixel_values"].clone()
    pixels[[0, 1]] = pixels[[1, 0]]
    moved = Inputs(
        token_ids=inputs.token_ids,
        position_ids=inputs.position_ids,
        extras={**inputs.extras, "pixel_values": pixels},
    )
    assert difference(adapter.forward(moved, silent), logits) > 1e-3
    cut = int(inputs.extras["image_spans"][0, 1]) + 1
    slot = adapter.open()
    parts = [adapter.step(slot, inputs, *span, silent) for span in ((0, cut), (cut, logits.shape[1]))]
    adapter.free(slot)
    assert difference(torch.cat(parts, 1), logits) < 1e-4


def test_float64_is_an_oracle_for_float32(opened: Opener) -> None:
    """In float64 nothing is computed in float32, and float32 differs by rounding only."""
    wide, narrow = opened("deepseek_v32", "float64"), opened("deepseek_v32")
    case = text_case(wide.info, LENGTH)
    recorder, logits, _ = run(wide, case)
    kinds = {v.dtype for v in recorder.tensors().values() if v.is_floating_point()}
    assert kinds == {torch.float64}
    assert difference(run(narrow, case)[1], logits) < 1e-5


def test_compiled_layers_say_what_they_hide(opened: Opener) -> None:
    """Compiled layers give the same layer values; what can no longer be seen is declared, and only that."""
    from fnmatch import fnmatchcase

    plain, compiled = opened("llama"), opened("llama", compile="aot_eager")
    case = text_case(plain.info, LENGTH)
    expected, found = run(plain, case)[0].tensors(), run(compiled, case)[0].tensors()
    hidden = [t for t in expected if any(fnmatchcase(t, glob) for glob in compiled.scope.unobservable)]
    assert [t for t in expected if t not in found] == hidden
    assert "layers.2.attn.q_proj" in hidden
    assert not {"layers.2", "norm", "logits"} & set(hidden)
    assert all(difference(found[t], expected[t]) < 1e-5 for t in found if found[t].is_floating_point())
    assert "compiled" in capabilities(compiled)
    assert "compiled" not in capabilities(plain)
    with compiled.uncompiled():
        again = run(compiled, case)[0].tensors()
    assert torch.equal(again["logits"], expected["logits"])


def test_weights_are_given_as_the_module_holds_them(opened: Opener) -> None:
    """Fused experts stay fused, under the module's own names, so that the order inside them can be compared."""
    given = {w.name: w for w in opened("deepseek_v32").weights()}
    fused = given["model.layers.2.mlp.experts.gate_up_proj"]
    assert fused.checkpoint == ""
    assert fused.tensor.dim() == 3
    assert given["model.norm.weight"].checkpoint == "model.norm.weight"


def test_options(opened: Opener) -> None:
    """An unknown option names the nearest one before anything is loaded; a scope says what it lacks."""
    from harness.adapters.hf import hf_adapter

    folder = opened("llama").checkpoint
    setup = Setup(side="accel", role="accel", adapter="x", options={"atn": "eager"})
    with pytest.raises(SpecError, match="did you mean 'attn'"):
        hf_adapter(folder, setup)
    adapter = opened("llama")
    assert capabilities(adapter) == ["phases", "weights", "precision"]
    assert {"image", "chat", "multi_card"} <= set(adapter.scope.off)
    assert not adapter.scope.image
