"""The reference as a port: entry points, cases, generation, slots, weights, refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import reference_impl
from harness.adapter import Inputs, capabilities, silent
from harness.cases import image_case, read_model_info, seeded_image, text_case
from harness.errors import PortError, SpecError
from harness.types import Case, Setup

ROOT = Path(__file__).parents[2]


def test_entry_points_stay_functions_after_use(checkpoint):
    """Using the package puts no module in the place of `adapter` or `checkpoint`."""
    setup = Setup(side="reference", role="oracle", adapter="builtin:reference", dtype="float32")
    for _ in range(2):
        assert reference_impl.adapter(checkpoint, setup).name == "reference"
        assert callable(reference_impl.checkpoint)


def test_importing_the_package_is_light():
    """`import reference_impl` loads neither torch nor numpy, and never the port that it judges."""
    code = "import sys, reference_impl; print([m for m in ('torch', 'numpy', 'accel_impl') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_capabilities_and_scope(port):
    """It claims text, pictures, three phases and its own text front end, on one card."""
    assert capabilities(port) == ["phases", "weights", "chat", "precision"]
    assert port.scope.image
    assert port.scope.phases == ("prefill", "chunk", "decode")
    assert [str(layout) for layout in port.scope.layouts] == ["single"]


@pytest.mark.parametrize(("dtype", "options"), [("float16", {}), ("float3", {}), ("float32", {"attn": "eager"})])
def test_unknown_words_are_usage_errors(checkpoint, dtype, options):
    """A precision or an option that the reference does not have is refused before anything is loaded."""
    setup = Setup(side="reference", role="oracle", adapter="builtin:reference", dtype=dtype, options=options)
    with pytest.raises(SpecError, match="expected"):
        reference_impl.adapter(checkpoint, setup)


def test_weights_are_told_once_and_honestly(load):
    """Every parameter comes once; float32 holds all of them exactly, bfloat16 says which it cannot."""
    single, half = ({w.name: w for w in load(d).weights()} for d in ("float32", "bfloat16"))
    assert set(single) == set(half)
    assert all(w.lossless and w.checkpoint == w.name for w in single.values())
    for name, weight in half.items():
        assert weight.lossless == torch.equal(weight.tensor.float(), single[name].tensor), name
        kept = name.endswith((".sinks", "e_score_correction_bias", ".A_log", ".dt_bias", "_res.query"))
        assert weight.tensor.dtype == (torch.float32 if kept else torch.bfloat16)
    lossy = {n for n, w in half.items() if not w.lossless}
    assert any("q_b_proj" in n for n in lossy)
    assert not any(".experts." in n for n in lossy)


def test_generation_is_the_argmax_of_the_forward(port, checkpoint):
    """Greedy tokens are those of one forward over prompt and continuation, and do not collapse to one token."""
    info = read_model_info(checkpoint)
    inputs = port.prepare(text_case(info, 20, seed=2), silent)
    new = port.generate(inputs, 12, silent)
    whole = torch.cat([inputs.token_ids, torch.tensor([new])], dim=1)
    logits = port.forward(Inputs(token_ids=whole), silent)
    assert new == logits[0, 19:-1].argmax(-1).tolist()
    assert len(set(new)) >= 8
    top = logits[0].topk(2).values
    assert (top[:, 0] - top[:, 1]).median() > 0.3


def test_generation_with_a_picture_records_every_token(port, checkpoint):
    """All calls of a generation join along the token axis, scores included."""
    info = read_model_info(checkpoint)
    inputs = port.prepare(image_case(info, [(32, 32)]), silent)
    length, parts = inputs.token_ids.shape[1], {}

    def collect(tap, tensor, *, dims="", kind=""):
        if "token" in dims.split():
            parts.setdefault(tap, []).append(tensor)
        return tensor

    new = port.generate(inputs, 4, collect)
    tensors = {name: torch.cat(part, dim=1) for name, part in parts.items()}
    assert {t.shape[1] for t in tensors.values()} == {length + len(new) - 1}
    assert tensors["layers.3.attn.indexer.topk.scores"].shape[2] == length + 4
    assert new == tensors["logits"][0, length - 1 :].argmax(-1).tolist()


def test_generation_ends_after_an_end_of_sequence_id(port, checkpoint, monkeypatch):
    """The end-of-sequence id is the last one returned."""
    info = read_model_info(checkpoint)
    inputs = port.prepare(text_case(info, 20, seed=2), silent)
    free = port.generate(inputs, 8, silent)
    monkeypatch.setattr(port, "eos_ids", lambda: frozenset({free[3]}))
    assert port.generate(inputs, 8, silent) == free[: free.index(free[3]) + 1]


def test_slots_are_separate_and_refuse_gaps(port, checkpoint):
    """Slots are given from the lowest free one, do not mix, and take only the next token."""
    info = read_model_info(checkpoint)
    first, second = (port.prepare(text_case(info, n, seed=n), silent) for n in (9, 14))
    a, b = port.open(), port.open()
    assert (a, b) == (0, 1)
    port.step(a, first, 0, 5, silent)
    port.step(b, second, 0, 14, silent)
    mixed = port.step(a, first, 5, 9, silent)
    assert torch.allclose(mixed, port.forward(first, silent)[:, 5:], atol=1e-4)
    with pytest.raises(PortError, match="token 9"):
        port.step(a, first, 5, 9, silent)
    port.free(a)
    assert port.open() == 0
    port.free(0)
    port.free(b)
    with pytest.raises(PortError, match="open slot"):
        port.step(b, second, 0, 3, silent)


def test_too_long_requests_are_refused(port, monkeypatch):
    """A request beyond max_position_embeddings is an error, and a generation stops at it."""
    assert port._loaded.config.max_position_embeddings == 1048576
    monkeypatch.setattr(port._loaded, "config", dataclasses.replace(port._loaded.config, max_position_embeddings=32))
    ids = torch.ones(1, 33, dtype=torch.int64)
    with pytest.raises(PortError, match="32"):
        port.forward(Inputs(token_ids=ids), silent)
    assert len(port.generate(Inputs(token_ids=ids[:, :30]), 8, silent)) <= 2


def test_image_places_count_in_the_text_without_pictures(port):
    """`image_at` indexes the given ids, whichever order the places come in."""
    images = (seeded_image(16, 32, seed=1), seeded_image(32, 16, seed=2))
    case = Case(id="x", token_ids=(10, 11, 12), images=images, image_at=(1, 3))
    assert port.prepare(case, silent).token_ids.tolist() == [[10, 258, 258, 11, 12, 258, 258]]
    with pytest.raises(PortError, match="place"):
        port.prepare(Case(id="x", token_ids=(10, 11, 12), images=images, image_at=(1,)), silent)
    few = Case(id="x", token_ids=(10, 11), images=images[:1], image_at=(1,))
    inputs = port.prepare(few, silent)
    with pytest.raises(PortError, match="image tokens"):
        port.forward(Inputs(token_ids=inputs.token_ids[:, :2], extras=inputs.extras), silent)


def test_pictures_of_any_size_are_resized(port):
    """A picture whose sides are no multiples of a merge block takes as many rows as its resized form has."""
    case = Case(id="x", token_ids=(10, 11), images=(seeded_image(41, 30, seed=1),), image_at=(1,))
    inputs = port.prepare(case, silent)
    assert inputs.extras["image_grid"].tolist() == [[1, 6, 4]]
    assert inputs.token_ids.tolist() == [[10, *[258] * 6, 11]]
    assert port.forward(inputs, silent).isfinite().all()


def test_text_round_trips_byte_for_byte(port):
    """Any UTF-8 text comes back as it was; a prompt starts with exactly one `<bos>`; ids are the bytes."""
    for text in ("plain", "Grüße, 한국어 🚀", " two  spaces\n\ttab", ""):
        ids = port.encode(text)
        assert ids == [256, *text.encode()]
        assert port.decode(ids) == text


def test_a_conversation_has_one_bos(port):
    """Rendered conversations bring their own `<bos>`, and special tokens are single ids."""
    messages = (
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "é"},
    )
    assert port.render(messages) == "<bos><user>hi<end><assistant>yo<end><user>é<end><assistant>"
    ids = port.prepare(Case(id="chat", messages=messages), silent).token_ids[0].tolist()
    assert ids == [256, 259, *b"hi", 261, 260, *b"yo", 261, 259, *"é".encode(), 261, 260]
    with pytest.raises(PortError, match="system"):
        port.render([{"role": "system", "content": "x"}])


def test_pictures_in_a_conversation(port):
    """A picture part becomes one run of `<image>` ids as long as its rows; missing pictures are an error."""
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    messages = ({"role": "user", "content": parts},)
    case = Case(id="chat", messages=messages, images=(seeded_image(32, 48, seed=1),))
    ids = port.prepare(case, silent).token_ids[0].tolist()
    assert ids == [256, 259, ord("a"), *[258] * 6, ord("b"), 261, 260]
    with pytest.raises(PortError, match="<image>"):
        port.prepare(Case(id="chat", messages=messages), silent)


class Halved:
    """A declaration that halves what is kept, so that a test sees where it was asked."""

    def __init__(self) -> None:
        self.states: list[str] = []
        self.caches: list[str] = []

    def weight(self, name, tensor):
        return tensor

    def inputs(self):
        return contextlib.nullcontext()

    def writer(self):
        def write(name, value, *, state=False):
            (self.states if state else self.caches).append(name)
            return value / 2

        return write


def test_what_is_kept_passes_the_declared_rounding(checkpoint):
    """Keys, latents and rows of pictures are rounded as a cache, recurrent states as a state, once for each call."""
    setup = Setup(side="reference", role="floor", adapter="builtin:reference", dtype="float32")
    port, rounding = reference_impl.adapter(checkpoint, setup), Halved()
    port.load(checkpoint, setup)
    inputs = port.prepare(image_case(read_model_info(checkpoint), [(32, 32)], length=9), silent)
    plain = port.forward(inputs, silent)
    port.round_with(rounding)
    slot = port.open()
    port.step(slot, inputs, 0, 7, silent)
    halved = port.step(slot, inputs, 7, inputs.token_ids.shape[1], silent)
    assert sorted(set(rounding.states)) == [f"layers.{n}.attn.state" for n in (0, 1, 2, 4, 5, 6)]
    assert len(rounding.states) == 12
    cached = {f"{at}.attn.{k}" for at in ("layers.3", "layers.7", "mtp") for k in ("kv_latent", "k_rope", "indexer.k")}
    assert set(rounding.caches) == cached | {f"layers.{n}.attn.visual_latent" for n in (3, 7)}
    assert not torch.allclose(halved, plain[:, 7:], atol=0.1)
