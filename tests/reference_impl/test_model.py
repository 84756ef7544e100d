"""The model: its taps, its phases, its decisions, its pictures; and that a replay isolates every part."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from harness import taps as tapnames
from harness.adapter import Inputs
from harness.cases import image_case, read_model_info, seeded_image, text_case
from harness.recorder import TraceRecorder
from harness.types import Case
from reference_impl.model import Model
from reference_impl.port import ReferenceAdapter
from reference_impl.request import Cache, Call

INDEXER = [f"indexer.{n}" for n in ("q", "k", "weights", "topk.scores", "topk")]
SPARSE = ["q_a", "q_norm", "q", "kv_latent", "k_rope", *INDEXER, "visual_latent", "core"]
RECURRENT = ["q", "k", "v", "decay", "beta", "core", "norm"]
EXPERTS = [
    "router.logits",
    "router.groups.topk.scores",
    "router.groups.topk",
    "router.topk.scores",
    "router.topk",
    "router.weights",
    "experts",
    "shared_expert",
]


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


def test_taps_are_the_page_s_in_its_order(port, info):
    """A request with a picture records exactly the promised taps, in execution order, with named axes."""
    expected = ["inputs.token_ids", "inputs.position_ids", "inputs.pixel_values", "inputs.image_grid"]
    vision = ("patch_embed", "pos_embed", "blocks.0", "deepstack.0", "blocks.1", "deepstack.1", "blocks.2", "norm")
    expected += [*(f"vision.{n}" for n in (*vision, "merger")), "embed", "merged"]
    moe = [*(f"moe.{e}" for e in EXPERTS), "moe"]
    for n in range(8):
        attn = [f"attn.{t}" for t in (SPARSE if n in (3, 7) else RECURRENT)] + ["attn", "mid", "mlp_mix"]
        mixed = [] if n == 0 else ["attn_mix"]
        inner = ["mlp"] if n == 0 else moe
        expected += [f"layers.{n}.{t}" for t in (*mixed, "input_norm", *attn, "post_attn_norm", *inner)]
        expected.append(f"layers.{n}")
    expected += ["final_mix", "norm", "logits", "mtp.in", "mtp.input_norm"]
    attn = [f"mtp.attn.{t}" for t in SPARSE if t != "visual_latent"]
    expected += [*attn, "mtp.attn", "mtp.mid", "mtp.post_attn_norm", *(f"mtp.{m}" for m in moe)]
    expected += ["mtp", "mtp.norm", "mtp.logits"]
    recorder = TraceRecorder()
    port.forward(port.prepare(image_case(info, [(32, 48)]), recorder), recorder)
    assert list(recorder.taps) == expected
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


def test_what_a_request_keeps_does_not_depend_on_its_calls(load, info):
    """After one prefill, after chunks and after single steps the caches and states are the same, and of one size."""
    port = load("float64")
    inputs = port.prepare(image_case(info, [(32, 48)], length=17), TraceRecorder())
    length, kept = inputs.token_ids.shape[1], []
    for cuts in ((), (3, 9, 14), tuple(range(1, length))):
        slot = port.open()
        for start, stop in zip((0, *cuts), (*cuts, length), strict=True):
            port.step(slot, inputs, start, stop, TraceRecorder())
        kept.append(dict(port._slots[slot].kept))
        port.free(slot)
    for other in kept[1:]:
        assert list(other) == list(kept[0])
        for name, tensor in other.items():
            assert torch.allclose(tensor, kept[0][name], rtol=1e-9, atol=1e-11), name
    assert kept[0]["layers.1.attn.state"].shape == (1, 5, 24, 24)
    assert kept[0]["layers.1.attn.conv"].shape == (1, 3, 360)
    assert kept[0]["mtp.attn.kv_latent"].shape == (1, length, 40)


def test_the_model_stays_sound_over_a_thousand_tokens(port, info):
    """States and streams are as large at the end of a long request as at its beginning."""
    taps = record(port, text_case(info, 1000))
    for name in ("layers.0.attn.core", "layers.6.attn.core", "layers.7", "logits"):
        size = taps[name][0].flatten(1).square().mean(-1).sqrt().view(10, 100).mean(1)
        assert 0.8 < float(size[-1] / size[1]) < 1.25, name
    kept = taps["layers.0.attn.decay"].exp()
    assert kept.min() < 0.1
    assert kept.max() > 0.999


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
    for tap in ("layers.0.attn.q", "layers.0.attn.v", "layers.0.attn.norm"):
        error = (half[tap].double() - exact[tap]).norm() / exact[tap].norm()
        assert half[tap].dtype == torch.bfloat16
        assert 1e-3 < error < 1e-2, tap
    kept = ("attn.indexer.weights", "attn.indexer.topk.scores", "moe.router.logits", "moe.router.weights")
    assert all(half[f"layers.3.{n}"].dtype == torch.float32 for n in kept)
    assert all(half[f"layers.2.attn.{n}"].dtype == torch.float32 for n in ("decay", "beta", "core"))
    assert half["logits"].dtype == torch.float32


@pytest.mark.parametrize("pictures", [(), ((32, 48),)])
def test_the_future_changes_nothing(port, info, pictures):
    """Another last token leaves every tap of the earlier tokens as it was, with a picture before it or without."""
    case = image_case(info, pictures, length=20) if pictures else text_case(info, 20)
    assert case.token_ids is not None
    other = dataclasses.replace(case, token_ids=(*case.token_ids[:-1], (case.token_ids[-1] + 1) % 256))
    a, b = record(port, case), record(port, other)
    for name in (n for n in a if n.startswith(("layers.", "mtp")) and not n.endswith(("scores", "visual_latent"))):
        assert difference(a[name][:, :-1], b[name][:, :-1]) <= 1e-5, name
    assert difference(a["logits"][:, -1], b["logits"][:, -1]) > 0.1


def test_a_later_picture_changes_nothing_before_it(port, info):
    """Logits before a picture's first row do not depend on the picture; those from it on do."""
    case = image_case(info, [(32, 48)], length=21)
    other = dataclasses.replace(case, images=(seeded_image(32, 48, seed=9),))
    a, b = record(port, case), record(port, other)
    first = int((a["inputs.token_ids"][0] == 258).nonzero()[0])
    assert difference(a["logits"][:, :first], b["logits"][:, :first]) <= 1e-5
    assert not torch.isclose(a["logits"][:, first:], b["logits"][:, first:], atol=1e-3).all(-1).any()


def test_selection_drops_keys(port, info):
    """Each query chooses min(max(t - 4, 0), 8) keys before its window; a key in neither does not reach the core."""
    taps = record(port, text_case(info, 24))
    for at in ("layers.3", "layers.7", "mtp"):
        chosen = taps[f"{at}.attn.indexer.topk"][0]
        for t, row in enumerate(chosen.tolist()):
            keys = [k for k in row if k >= 0]
            assert len(set(keys)) == min(max(t - 4, 0), 8)
            assert all(k <= t - 5 for k in keys)
            assert row == sorted(keys) + [-1] * (8 - len(keys))
    last = {*taps["layers.3.attn.indexer.topk"][0, -1].tolist(), 19, 20, 21, 22, 23}
    core = taps["layers.3.attn.core"][0, -1]
    for key in range(24):
        changed = _with(port, text_case(info, 24), "layers.3.attn.kv_latent", lambda x, k=key: _noisy(x, k))
        assert torch.equal(changed["layers.3.attn.core"][0, -1], core) == (key not in last)


def test_every_expert_is_reached_and_the_bias_only_chooses(port, info):
    """300 seeded tokens reach all experts of all layers; weights come from p without the bias and sum to 2.5."""
    taps = record(port, text_case(info, 300))
    for at in [*(f"layers.{n}.moe.router" for n in range(1, 8)), "mtp.moe.router"]:
        chosen, weights = taps[f"{at}.topk"], taps[f"{at}.weights"]
        assert len(chosen.unique()) == 12, at
        p = taps[f"{at}.logits"].sigmoid().gather(-1, chosen)
        assert torch.allclose(weights, 2.5 * p / p.sum(-1, keepdim=True), atol=1e-5)
        scores = taps[f"{at}.topk.scores"]
        assert scores[scores.isfinite()].min() > 6
        assert (scores.isneginf().view(1, 300, 3, 4).all(-1).sum(-1) == 1).all()
        without_bias = taps[f"{at}.logits"].topk(3).indices.sort(-1).values
        assert not torch.equal(without_bias, chosen)


def test_every_parameter_is_used(load, info):
    """Whatever the outputs are differentiable in moves them; a bias or an indexer moves what is chosen."""
    port = load("float64")
    weights = {k: v.clone().requires_grad_() for k, v in port._loaded.weights.items()}
    model, recorder = Model(port._loaded.config, weights), TraceRecorder()
    inputs = port.prepare(image_case(info, [(32, 48)], length=300), recorder)
    ids, out = inputs.token_ids, {}

    def keep(tap: str, tensor: Tensor, *, dims: str = "", kind: str = "") -> Tensor:
        out[tap] = tensor
        return tensor

    cache = Cache(pictures=model.look(inputs.extras["pixel_values"], inputs.extras["image_grid"], ids, keep))
    positions = torch.arange(ids.shape[1])[None]
    model.forward(ids, Call(positions_BT=positions, start=0, length_tokens=ids.shape[1], cache=cache, record=keep))
    noise = torch.randn(out["logits"].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores = [v[v.isfinite()].square().sum() for k, v in out.items() if k.endswith("indexer.topk.scores")]
    biased = [v[v.isfinite()].square().sum() for k, v in out.items() if k.endswith("router.topk.scores")]
    (sum((out[n] * noise).sum() for n in ("logits", "mtp.logits")) + sum(scores) + sum(biased)).backward()
    for name, weight in weights.items():
        assert weight.grad is not None, name
        assert weight.grad.abs().max() > 0, name


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
    for tap, rows in (("vision.merger", first), ("vision.deepstack.1", first), ("vision.blocks.2", first * 4)):
        assert torch.equal(a[tap][:rows], b[tap][:rows])
        assert (a[tap][rows:] - b[tap][rows:]).abs().mean() > 0.05 * a[tap][rows:].abs().mean()
    assert not torch.allclose(a["logits"][:, -1], b["logits"][:, -1], atol=0.1)


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
    case = image_case(info, [(32, 32)], length=17)
    plain = record(port, case)
    skipped = ("inputs.token_ids", "inputs.position_ids", "inputs.image_grid", "logits", "mtp.logits")
    names = [n for n in plain if n not in skipped and not n.endswith(".scores") and not _like_another(n)]
    for name in names:
        changed = _with(port, case, name, _another)
        before = list(plain)[: list(plain).index(name) + 1]
        assert all(torch.equal(changed[n], plain[n]) for n in before), name
        end = "mtp.logits" if name.startswith("mtp") else "logits"
        assert not torch.equal(changed[end], plain[end]), name


def _like_another(name: str) -> bool:
    """Say whether a tap is one of another layer of the same kind, which was looked at."""
    seen = name.startswith("layers.1.attn.") or (name.startswith("mtp.") and name.count(".") > 1)
    return seen or tapnames.layer_of(name) in ("layers.2", "layers.4", "layers.5", "layers.6", "layers.7")


def _another(x: Tensor) -> Tensor:
    """Return something else of the same kind: other choices, scores upside down, values with noise."""
    if x.dtype == torch.int64:
        return {2: (x + 1) % 3, 3: (x + 1) % 12}.get(x.shape[-1], torch.full_like(x, -1))
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    return x + x.pow(2).mean().sqrt() * noise


def test_positions_none_means_counting_from_zero(port, info):
    """Inputs without positions run as inputs with 0..T-1."""
    case = text_case(info, 12)
    prepared = port.prepare(case, TraceRecorder())
    a = port.forward(prepared, TraceRecorder())
    b = port.forward(Inputs(token_ids=prepared.token_ids), TraceRecorder())
    assert torch.equal(a, b)
