"""Error ratios: what an honest port reads, and where each kind of fault shows."""

import math

import pytest
import torch
from sides import TOKENS, WIDTH, compare, hidden, noisy, normal, run_of, trace, value

from harness.compare import execution_order
from harness.types import Failure, Scope

ORACLE = {"embed": hidden(0), "layers.0": hidden(1), "layers.1": hidden(2), "logits": hidden(3)}
SLICES = ("whole", "token", "position", "channel")


def bent(name: str, change: object) -> dict[str, torch.Tensor]:
    """Return an honest accel with one tap changed in place."""
    accel = noisy(ORACLE, 9)
    accel[name] = accel[name].clone()
    change(accel[name])  # type: ignore[operator]
    return accel


@pytest.mark.parametrize("slice", SLICES)
def test_an_honest_port_reads_about_one(slice: str) -> None:
    """Noise of the floor's own size stays inside the shipped limits in every slice."""
    slack = {"whole": 3, "token": 10, "position": 4, "channel": 6}[slice]
    for tap in ORACLE:
        m = value(compare(noisy(ORACLE, 9), ORACLE), "error_ratio", tap, slice)
        assert m.value is not None
        assert 0.5 < m.value <= 1.05 + slack / math.sqrt(m.n)


def test_one_percent_of_scale_shows_in_its_own_layer_only() -> None:
    """A layer scaled by one percent reads well above the limit; the layers beside it do not."""
    found = compare(bent("layers.1", lambda x: x.mul_(1.01)), ORACLE)
    assert value(found, "error_ratio", "layers.1", "whole").value > 1.5
    assert value(found, "error_ratio", "layers.0", "whole").value < 1.1


def test_one_wrong_token_channel_or_stretch_is_located() -> None:
    """The worst slice names the token, the channel or the range of positions that is wrong."""

    def token(x: torch.Tensor) -> None:
        x[0, 17] *= 1.05

    def channel(x: torch.Tensor) -> None:
        x[..., 5] *= 1.05

    assert value(compare(bent("layers.1", token), ORACLE), "error_ratio", "layers.1", "token").where["token"] == 17
    assert value(compare(bent("layers.1", channel), ORACLE), "error_ratio", "layers.1", "channel").where["channel"] == 5
    place = value(compare(bent("layers.1", token), ORACLE), "error_ratio", "layers.1", "position").where["position"]
    first, last = (int(p) for p in place.split("-"))
    assert first <= 17 <= last


def test_heads_are_judged_where_the_axis_is_named() -> None:
    """A wrong head is named by its index; without the axis there is no such slice."""
    oracle = {"layers.0.attn.core": hidden(4).reshape(1, TOKENS, 4, WIDTH // 4)}
    accel = noisy(oracle, 9)
    accel["layers.0.attn.core"][:, :, 2] *= 1.03
    run = run_of(3)
    dims = {"layers.0.attn.core": "batch token head feature"}
    assert value(compare(accel, oracle, run, dims=dims), "error_ratio", slice="head").where["head"] == 2
    assert not [m for m in compare(accel, oracle, run) if m.where.get("slice") == "head"]


def test_axes_in_another_order_are_brought_into_one() -> None:
    """A port may give heads before tokens, or leave the batch axis out, as long as it names its axes."""
    oracle = {"layers.0.attn.core": hidden(4).reshape(1, TOKENS, 4, WIDTH // 4)}
    run = run_of(3)
    swapped = {"layers.0.attn.core": oracle["layers.0.attn.core"].transpose(1, 2).contiguous()}
    found = compare(
        trace(swapped, run, {"layers.0.attn.core": "batch head token feature"}), oracle, run,
        dims={"layers.0.attn.core": "batch token head feature"},
    )  # fmt: skip
    assert value(found, "error_ratio", slice="whole").value == 0.0
    squeezed = {k: v[0] for k, v in ORACLE.items()}
    assert value(compare(squeezed, ORACLE), "error_ratio", "layers.0", "whole").value == 0.0


def test_nan_reaches_the_verdict() -> None:
    """One NaN makes the whole, its token, its position and its channel NaN, never a number."""

    def poison(x: torch.Tensor) -> None:
        x[0, 3, 1] = math.nan

    found = compare(bent("layers.1", poison), ORACLE)
    assert all(math.isnan(value(found, "error_ratio", "layers.1", s).value) for s in SLICES)
    assert math.isnan(
        value(compare(bent("layers.1", poison), ORACLE, run_of(0)), "accumulated_ratio", "layers.1").value
    )


def test_a_port_more_precise_than_its_floor_passes() -> None:
    """An exact port reads zero."""
    assert value(compare(ORACLE, ORACLE), "error_ratio", "layers.0", "whole").value == 0.0


def test_the_floor_is_never_below_two_roundings() -> None:
    """With a floor that happens to be exact, a port that rounds once still reads below one; half a percent does not."""
    oracle = {"layers.0": hidden(1)}
    rounded = {"layers.0": hidden(1).bfloat16()}
    assert value(compare(rounded, oracle, floors=0), "error_ratio", "layers.0", "whole").value < 0.6
    scaled = {"layers.0": hidden(1) * 1.005}
    assert value(compare(scaled, oracle, floors=0), "error_ratio", "layers.0", "whole").value > 1.1


def test_a_missing_layer_is_missing_and_other_taps_are_counted() -> None:
    """A layer's tap that the port leaves out is a problem; a deeper one is only counted as unseen."""
    oracle = {**ORACLE, "layers.1.mlp": hidden(7)}
    run = run_of(2)
    accel = {k: v for k, v in noisy(oracle, 9).items() if k not in ("layers.0", "layers.1.mlp")}
    found = compare(accel, oracle, run)
    assert value(found, "error_ratio", "layers.0").problem == "missing"
    assert value(found, "unseen_taps").value == 1
    assert not [m for m in found if m.subject == "layers.1.mlp"]


def test_a_declared_blind_spot_is_not_missing() -> None:
    """A tap that the scope declares unobservable is neither missing nor compared."""
    accel = {k: v for k, v in noisy(ORACLE, 9).items() if k != "embed"}
    found = compare(accel, ORACLE, scope=Scope(unobservable={"embed": "fused into the first kernel"}))
    assert not [m for m in found if m.subject == "embed"]


def test_another_shape_is_an_error_with_both_shapes() -> None:
    """A tap of another shape is not measured, and the message says what was expected and found."""
    accel = noisy(ORACLE, 9)
    accel["layers.0"] = accel["layers.0"][:, :-1]
    m = value(compare(accel, ORACLE), "error_ratio", "layers.0")
    assert m.problem == "error"
    assert f"(1, {TOKENS}, {WIDTH})" in m.detail["message"]
    assert f"(1, {TOKENS - 1}, {WIDTH})" in m.detail["message"]


def test_a_run_that_crashed_is_measured_tap_by_tap() -> None:
    """Every promised tap of a failed run is a measurement with the failure's words; so is a run without an oracle."""
    failure = Failure(run="text/replay1", kind="hang", message="no answer within 3 s", last_tap="layers.1")
    found = compare(failure, ORACLE)
    assert {m.subject for m in found} == set(ORACLE)
    assert all(m.problem == "error" and "no answer within 3 s" in m.detail["message"] for m in found)
    assert {m.metric for m in compare(failure, ORACLE, run_of(0))} == {"accumulated_ratio", "logits_kl_ratio"}
    assert {m.problem for m in compare(None, ORACLE)} == {"error"}


def test_silence_against_silence_passes_and_noise_against_silence_is_no_signal() -> None:
    """Where oracle and floor are exactly zero, only exact zero can be judged."""
    oracle = {"layers.0": torch.zeros(1, TOKENS, WIDTH)}
    assert value(compare(oracle, oracle), "error_ratio", "layers.0", "whole").value == 0.0
    loud = {"layers.0": torch.full((1, TOKENS, WIDTH), 1e-6)}
    assert value(compare(loud, oracle), "error_ratio", "layers.0").problem == "no_signal"


def test_a_reference_that_is_not_finite_cannot_judge() -> None:
    """A NaN of the oracle is an error of the reference, not a verdict on the port."""
    oracle = {"layers.0": hidden(1)}
    oracle["layers.0"][0, 0, 0] = math.nan
    m = value(compare({"layers.0": hidden(1)}, oracle), "error_ratio", "layers.0")
    assert m.problem == "error"
    assert "reference" in m.detail["message"]


def test_a_replay_says_nothing_about_deeper_taps() -> None:
    """At level 1 only layers are isolated, so their children are not compared; at level 2 they are."""
    oracle = {"layers.0.attn": hidden(5), "layers.0": hidden(1)}
    assert {m.subject for m in compare(noisy(oracle, 9), oracle, run_of(1)) if m.metric == "error_ratio"} == {
        "layers.0"
    }
    assert {m.subject for m in compare(noisy(oracle, 9), oracle, run_of(2)) if m.metric == "error_ratio"} == set(oracle)


def test_a_phase_is_judged_from_its_first_token() -> None:
    """A prefill before the steps is another run's business."""

    def early(x: torch.Tensor) -> None:
        x[0, 3] *= 2

    def late(x: torch.Tensor) -> None:
        x[0, 40] *= 2

    run = run_of(1, options={"phase": "decode", "compare_from": 16})
    m = value(compare(bent("layers.1", early), ORACLE, run), "error_ratio", "layers.1", "token")
    assert m.value < 2
    assert m.where["phase"] == "decode"
    m = value(compare(bent("layers.1", late), ORACLE, run), "error_ratio", "layers.1", "token")
    assert m.value > 10
    assert m.where["token"] == 40


def test_a_free_run_is_judged_by_medians_and_distributions() -> None:
    """An outlier token does not move the accumulated ratio, an error everywhere does; logits give nats."""

    def outlier(x: torch.Tensor) -> None:
        x[0, 3] *= 2

    run = run_of(0)
    assert value(compare(bent("layers.1", outlier), ORACLE, run), "accumulated_ratio", "layers.1").value < 1.2
    found = compare(bent("logits", lambda x: x.mul_(1.5)), ORACLE, run)
    assert value(found, "logits_kl_ratio").value > 1000
    assert value(found, "top1_agreement").value > 0.8
    assert 0.0 < value(found, "kl_nats_per_token").value < 2.0


def test_inputs_are_exact_and_pixels_are_not() -> None:
    """Ids and positions must be equal, one position for three axes included; pixels have a relative error."""
    ids = torch.arange(TOKENS).reshape(1, TOKENS)
    oracle = {
        "inputs.token_ids": ids,
        "inputs.position_ids": ids.expand(3, 1, TOKENS),
        "inputs.pixel_values": hidden(8)[0],
    }
    dims = {"inputs.position_ids": "axis batch token", "inputs.token_ids": "batch token", "inputs.pixel_values": "a b"}
    accel = {"inputs.token_ids": ids.clone(), "inputs.position_ids": ids, "inputs.pixel_values": hidden(8)[0] * 1.001}
    run = run_of(0)
    found = compare(trace(accel, run, {**dims, "inputs.position_ids": "batch token"}), oracle, run, dims=dims)
    assert value(found, "exact_mismatches", "inputs.token_ids").value == 0
    assert value(found, "exact_mismatches", "inputs.position_ids").value == 0
    assert value(found, "input_rel_rms_error").value == pytest.approx(0.001, rel=0.01)
    accel["inputs.token_ids"][0, 5] = 0
    found = compare(trace(accel, run, {**dims, "inputs.position_ids": "batch token"}), oracle, run, dims=dims)
    assert value(found, "exact_mismatches", "inputs.token_ids").value == 1


def test_masks_are_compared_by_what_they_allow() -> None:
    """An additive mask equals a boolean one that allows the same keys, and differs by one key."""
    allowed = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    added = torch.zeros(TOKENS, TOKENS).masked_fill(~allowed, torch.finfo(torch.float32).min)
    dims = {"layers.0.attn.mask": "token key"}
    run = run_of(0)
    found = compare({"layers.0.attn.mask": added}, {"layers.0.attn.mask": allowed}, run, dims=dims)
    assert value(found, "exact_mismatches").value == 0
    added[4, 5] = 0
    found = compare({"layers.0.attn.mask": added}, {"layers.0.attn.mask": allowed}, run, dims=dims)
    assert value(found, "exact_mismatches").value == 1


def test_runs_that_keep_other_taps_agree_on_what_comes_first() -> None:
    """A place in execution order does not depend on which other taps a run keeps."""
    oracle = {"embed": hidden(0), "layers.0.attn": hidden(5), "layers.0": hidden(1)}
    places = execution_order(trace(oracle, run_of(0)))
    few = trace({"layers.0": oracle["layers.0"], "extra": hidden(6)}, run_of(1))
    assert execution_order(few, places) == {"layers.0": 2, "extra": 2}
    assert execution_order(few) == {"layers.0": 0, "extra": 1}


def test_one_flipped_token_does_not_stand_for_the_distributions() -> None:
    """The ratio of a free run's logits is one of medians; the mean beside it still shows the token."""
    accel = noisy(ORACLE, 9)
    accel["logits"] = accel["logits"].clone()
    accel["logits"][:, 3] = normal(*accel["logits"][:, 3].shape, seed=5)
    found = compare(accel, ORACLE, run_of(0))
    assert value(found, "logits_kl_ratio").value < 3
    shown = value(found, "kl_nats_per_token")
    assert shown.value > 100 * shown.where["floor"]


def test_padded_columns_must_be_masked() -> None:
    """Logits wider than the vocabulary are judged without the extra columns, which may not be sampled."""
    accel = noisy(ORACLE, 9)
    shape = (*accel["logits"].shape[:-1], 3)
    for fill, least, most in ((float("-inf"), 0.0, 0.0), (-1e4, 0.0, 0.0), (0.0, 1e-3, 1.0)):
        wide = {**accel, "logits": torch.cat((accel["logits"], torch.full(shape, fill)), dim=-1)}
        found = compare(wide, ORACLE, run_of(0))
        assert least <= value(found, "padding_probability").value <= most
        assert value(found, "logits_kl_ratio").value < 3
    assert value(compare(accel, ORACLE, run_of(0)), "padding_probability").value == 0


def test_one_percent_in_one_expert_is_a_slope_of_that_expert() -> None:
    """What the oracle says each expert gave tells a +1 % expert apart, where no ratio of norms would."""
    parts, owner = normal(TOKENS, 2, WIDTH, seed=11), torch.arange(TOKENS)[:, None].add(torch.tensor([0, 3])) % 8
    whole = parts.sum(dim=1).reshape(1, TOKENS, WIDTH)
    name = "layers.0.moe.experts"
    oracle = {name: whole, f"{name}.parts": parts, f"{name}.parts.owner": owner}
    dims = {f"{name}.parts": "token choice feature", f"{name}.parts.owner": "token choice"}
    accel = noisy({name: whole}, 9)
    honest = value(compare(accel, oracle, run_of(3), dims=dims), "slope_beyond_noise", name, "expert")
    accel[name] = accel[name] + 0.01 * (parts * (owner == 5)[..., None]).sum(dim=1)
    found = value(compare(accel, oracle, run_of(3), dims=dims), "slope_beyond_noise", name, "expert")
    assert honest.value == 0
    assert found.value > 3e-3
    assert found.where["expert"] == 5
    assert found.detail["slope"] == pytest.approx(0.01, rel=0.2)
