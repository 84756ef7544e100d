"""The model: its taps, its phases, its decisions, its pictures; and that a replay isolates every part."""

from __future__ import annotations

import base64
import dataclasses

import pytest
import torch
from torch import Tensor

from harness import taps as tapnames
from harness.adapter import Inputs
from harness.cases import image_case, read_model_info, seeded_image, text_case
from harness.recorder import TraceRecorder
from harness.types import Case
from reference_impl.port import ReferenceAdapter

INDEXER = [f"attn.indexer.{n}" for n in ("q", "k", "weights", "topk.scores", "topk")]
LATENT = [f"attn.{n}" for n in ("q_a", "q_norm", "q", "kv_latent", "k_rope")]
LAYER = ["input_norm", *LATENT, *INDEXER, "attn.core", "attn", "mid", "post_attn_norm"]
EXPERTS = ["router.logits", "router.topk.scores", "router.topk", "router.weights", "experts", "shared_expert"]


@pytest.fixture(scope="module")
def info(checkpoint):
    return read_model_info(checkpoint)


def record(port: ReferenceAdapter, case: Case, cuts: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Run a case in one prefill, or in calls that end at `cuts` and at its end."""
    recorder = TraceRecorder()
    inputs = port.prepare(case, recorder)
    length = inputs.token_ids.shape[1]
    if not cuts:
        recorder.span(0, length)
        port.forward(inputs, recorder)
        return recorder.tensors()
    slot = port.open()
    for start, stop in zip((0, *cuts), (*cuts, length), strict=True):
        recorder.span(start, stop)
        port.step(slot, inputs, start, stop, recorder)
    port.free(slot)
    return recorder.tensors()


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the largest rms difference relative to each tap's rms; -inf must agree."""
    assert list(a) == list(b)
    return max(difference(a[n], b[n]) for n in a)


def difference(a: Tensor, b: Tensor) -> float:
    finite = torch.isfinite(b.double())
    assert a.shape == b.shape
    assert torch.equal(torch.isfinite(a.double()), finite)
    a, b = a.double()[finite], b.double()[finite]
    return float((a - b).norm() / b.norm().clamp(min=1e-9))


def test_taps_are_the_readme_s_in_its_order(port, info):
    """A request with a picture records exactly the promised taps, in execution order, with named axes."""
    expected = ["inputs.token_ids", "inputs.position_ids", "inputs.pixel_values", "inputs.image_grid"]
    vision = ("patch_embed", "pos_embed", "blocks.0", "blocks.1", "norm", "merger")
    expected += [f"vision.{n}" for n in vision]
    expected += ["embed", "merged"]
    for n in range(5):
        inner = ["mlp"] if n == 0 else [f"moe.{e}" for e in EXPERTS] + ["moe"]
        expected += [f"layers.{n}.{t}" for t in (*LAYER, *inner)] + [f"layers.{n}"]
    recorder = TraceRecorder()
    port.forward(port.prepare(image_case(info, [(32, 48)]), recorder), recorder)
    assert list(recorder.taps) == [*expected, "norm", "logits"]
    for name, tensor in recorder.tensors().items():
        assert len(recorder.taps[name].dims) == tensor.dim(), name
        assert not any(d.startswith("axis") and d != "axis" for d in recorder.taps[name].dims), name


def test_phases_agree(port, info):
    """Chunks, single decode steps and one whole prefill give the same value at every tap."""
    case = text_case(info, 41)
    whole = record(port, case)
    assert worst(record(port, case, (7, 14, 15, 33)), whole) <= 1e-5
    assert worst(record(port, case, (20, *range(21, 41))), whole) <= 1e-5


def test_phases_agree_with_pictures(port, info):
    """A picture that is cut by a chunk's end, and decoded row by row, gives what one prefill gives."""
    case = image_case(info, [(32, 48), (48, 32)])
    whole = record(port, case)
    ids = whole["inputs.token_ids"][0]
    first = int((ids == 258).nonzero()[0])
    assert worst(record(port, case, (first + 2, first + 3, first + 4, first + 9)), whole) <= 1e-5


def test_a_used_slot_is_a_fresh_one(port, info):
    """A second request in a freed slot records bit for bit what it records alone."""
    case = text_case(info, 19, seed=4)
    alone = record(port, case, (5, 6))
    record(port, text_case(info, 33, seed=9), (20,))
    again = record(port, case, (5, 6))
    assert all(torch.equal(alone[n], again[n]) for n in alone)


def test_precisions_agree_as_far_as_they_should(load, info):
    """float32 is within 1e-5 of float64 at every tap; bfloat16 errs visibly and by little where nothing accumulates."""
    case = text_case(info, 24)
    exact, single, half = (record(load(d), case) for d in ("float64", "float32", "bfloat16"))
    assert worst(single, exact) <= 1e-5
    assert all(exact[n].dtype in (torch.float64, torch.int64) for n in exact)
    for tap in ("layers.0.attn.q", "layers.0.attn.kv_latent", "layers.0.attn.indexer.k"):
        error = (half[tap].double() - exact[tap]).norm() / exact[tap].norm()
        assert half[tap].dtype == torch.bfloat16
        assert 1e-3 < error < 1e-2, tap
    kept = ("attn.indexer.weights", "attn.indexer.topk.scores", "moe.router.logits", "moe.router.weights")
    assert all(half[f"layers.2.{n}"].dtype == torch.float32 for n in kept)
    assert half["logits"].dtype == torch.float32


def test_the_future_changes_nothing(port, info):
    """Another last token leaves every tap of the earlier tokens as it was."""
    case = text_case(info, 20)
    assert case.token_ids is not None
    other = dataclasses.replace(case, token_ids=(*case.token_ids[:-1], (case.token_ids[-1] + 1) % 256))
    a, b = record(port, case), record(port, other)
    for name in (n for n in a if n.startswith("layers.") and not n.endswith(".scores")):
        assert difference(a[name][:, :-1], b[name][:, :-1]) <= 1e-5, name
    assert difference(a["logits"][:, -1], b["logits"][:, -1]) > 0.1


def test_selection_drops_keys(port, info):
    """Each query has min(t + 1, 6) keys, all causal; a dropped key does not reach the core, a selected one does."""
    taps = record(port, text_case(info, 24))
    for n in range(5):
        chosen = taps[f"layers.{n}.attn.indexer.topk"][0]
        for t, row in enumerate(chosen.tolist()):
            keys = [k for k in row if k >= 0]
            assert len(set(keys)) == min(t + 1, 6)
            assert all(k <= t for k in keys)
            assert row == sorted(keys) + [-1] * (6 - len(keys))
    last = set(taps["layers.1.attn.indexer.topk"][0, -1].tolist())
    core = taps["layers.1.attn.core"][0, -1]
    for key in range(24):
        changed = _with(port, text_case(info, 24), "layers.1.attn.kv_latent", lambda x, k=key: _noisy(x, k))
        assert torch.equal(changed["layers.1.attn.core"][0, -1], core) == (key not in last)


def test_indexer_scores_are_the_formula_s(port, info):
    """One query's scores, by loops over heads and keys from the recorded parts, give the recorded row and choice."""
    taps = record(port, text_case(info, 17))
    q, k, w = (taps[f"layers.2.attn.indexer.{n}"][0].double() for n in ("q", "k", "weights"))
    t = 12
    row = [
        sum(float(w[t, h]) * max(0.0, float(q[t, h] @ k[s])) for h in range(16)) / (4 * 32**0.5) for s in range(t + 1)
    ]
    found = taps["layers.2.attn.indexer.topk.scores"][0, t]
    assert found[: t + 1].tolist() == pytest.approx(row, rel=1e-4, abs=1e-5)
    assert torch.isneginf(found[t + 1 :]).all()
    best = sorted(sorted(range(t + 1), key=lambda s: -row[s])[:6])
    assert taps["layers.2.attn.indexer.topk"][0, t].tolist() == best


def test_every_expert_is_reached_and_the_bias_only_chooses(port, info):
    """64 seeded tokens reach all experts of all layers; weights come from p without the bias and sum to 2.5."""
    taps = record(port, text_case(info, 64))
    for n in range(1, 5):
        at = f"layers.{n}.moe.router"
        chosen, weights = taps[f"{at}.topk"], taps[f"{at}.weights"]
        assert len(chosen.unique()) == 7
        p = taps[f"{at}.logits"].sigmoid().gather(-1, chosen)
        assert torch.allclose(weights, 2.5 * p / p.sum(-1, keepdim=True), atol=1e-5)
        assert taps[f"{at}.topk.scores"].min() > 6
        without_bias = taps[f"{at}.logits"].topk(2).indices.sort(-1).values
        assert not torch.equal(without_bias, chosen)


def test_logits_feel_the_soft_cap(port, info):
    """Some logits are large enough for the cap to move them by more than 20 %, and none exceeds it."""
    logits = record(port, text_case(info, 64))["logits"]
    assert 16 < logits.abs().max() < 20


def test_pictures_matter_and_do_not_see_each_other(port, info):
    """Another second picture changes its own rows and the text after it, not the first picture's rows."""
    case = image_case(info, [(32, 48), (64, 32)])
    other = dataclasses.replace(case, images=(case.images[0], seeded_image(64, 32, seed=77)))
    a, b = record(port, case), record(port, other)
    first = 2 * 3
    for tap, rows in (("vision.merger", first), ("vision.blocks.1", first * 4)):
        assert torch.equal(a[tap][:rows], b[tap][:rows])
        assert (a[tap][rows:] - b[tap][rows:]).abs().mean() > 0.05 * a[tap][rows:].abs().mean()
    assert not torch.allclose(a["logits"][:, -1], b["logits"][:, -1], atol=0.1)


def test_patches_are_in_merge_block_order(port, info):
    """The second patch lies right of the first, the third below it, the fifth starts the next block of four."""
    image = seeded_image(32, 48, seed=3)
    taps = record(port, Case(id="picture", token_ids=(1, 2), images=(image,), image_at=(1,)))
    pixels = taps["inputs.pixel_values"].view(24, 3, 8, 8)
    raw = base64.b64decode(image.rgb)
    mean, std = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
    for patch, (top, left) in enumerate([(0, 0), (0, 8), (8, 0), (8, 8), (0, 16)]):
        for channel, y, x in ((0, 0, 0), (1, 3, 5), (2, 7, 2)):
            value = raw[((top + y) * 48 + left + x) * 3 + channel] / 255
            assert pixels[patch, channel, y, x].item() == pytest.approx(
                (value - mean[channel]) / std[channel], rel=1e-5
            )
    assert taps["inputs.image_grid"].tolist() == [[1, 4, 6]]


def test_the_position_table_is_resized_and_reordered(port):
    """Rows follow the bilinear formula at half-pixel centres, worked out by hand for one patch of a 4 x 8 grid."""
    taps = record(port, Case(id="picture", token_ids=(1, 2), images=(seeded_image(32, 64, seed=3),), image_at=(1,)))
    table = port._loaded.weights["visual.pos_embed"]
    y, x = 1, 2  # raster place; its block is (0, 1), inside it the third patch
    sy, sx = (y + 0.5) * 6 / 4 - 0.5, (x + 0.5) * 5 / 8 - 0.5
    y0, x0 = int(sy), int(sx)
    fy, fx = sy - y0, sx - x0
    top = table[y0, x0] * (1 - fx) + table[y0, x0 + 1] * fx
    bottom = table[y0 + 1, x0] * (1 - fx) + table[y0 + 1, x0 + 1] * fx
    assert torch.allclose(taps["vision.pos_embed"][4 + 2], top * (1 - fy) + bottom * fy, atol=1e-5)


def _noisy(x: Tensor, token: int) -> Tensor:
    changed = x.clone()
    changed[:, token] += 1.0
    return changed


def _with(port: ReferenceAdapter, case: Case, target: str, change) -> dict[str, Tensor]:
    """Record a prefill in which the recorder returns something else at one tap."""
    found: dict[str, Tensor] = {}

    def replaced(tap: str, tensor: Tensor, *, dims: str = "", kind: str = "") -> Tensor:
        found[tap] = tensor.clone()
        return change(tensor) if tap == target else tensor

    port.forward(port.prepare(case, replaced), replaced)
    return found


def test_the_model_goes_on_with_what_the_recorder_returns(port, info):
    """At every tap but the inputs, another value from the recorder changes what comes after, and nothing before."""
    case = image_case(info, [(32, 32)], length=9)
    plain = record(port, case)
    names = [n for n in plain if not n.startswith("inputs.") and n != "logits" and not _later_layer(n)]
    for name in names:
        changed = _with(port, case, name, _another)
        before = list(plain)[: list(plain).index(name) + 1]
        assert all(torch.equal(changed[n], plain[n]) for n in before), name
        assert not torch.equal(changed["logits"], plain["logits"]), name


def _later_layer(name: str) -> bool:
    return tapnames.layer_of(name) in ("layers.2", "layers.3", "layers.4")


def _another(x: Tensor) -> Tensor:
    """Return something else of the same kind: other choices, scores upside down, values with noise."""
    if x.dtype == torch.int64:
        return x.clamp(min=1) - 1 if x.shape[-1] > 2 else (x + 1) % 7
    if torch.isinf(x).any():
        return torch.where(torch.isfinite(x), -x, x)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    return x + x.pow(2).mean().sqrt() * noise


def test_positions_none_means_counting_from_zero(port, info):
    """Inputs without positions run as inputs with 0..T-1."""
    case = text_case(info, 12)
    prepared = port.prepare(case, TraceRecorder())
    a = port.forward(prepared, TraceRecorder())
    b = port.forward(Inputs(token_ids=prepared.token_ids), TraceRecorder())
    assert torch.equal(a, b)
