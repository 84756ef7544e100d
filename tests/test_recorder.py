"""The recorder and what a replay overwrites."""

import pytest
import torch

from harness.recorder import Pins, TraceRecorder
from harness.types import Tap

TAPS = {
    "embed": Tap(name="embed", dims=("batch", "token", "feature")),
    "layers.0": Tap(name="layers.0", dims=("batch", "token", "feature")),
    "layers.0.attn": Tap(name="layers.0.attn", dims=("batch", "token", "feature")),
    "layers.0.moe.router.topk": Tap(name="layers.0.moe.router.topk", kind="routing", dims=("token", "choice")),
}
SOURCE = {
    "embed": torch.arange(10.0).reshape(1, 5, 2) / 3,
    "layers.0": torch.arange(10.0).reshape(1, 5, 2) / 7,
    "layers.0.attn": torch.arange(10.0).reshape(1, 5, 2) / 9,
    "layers.0.moe.router.topk": torch.arange(5).reshape(5, 1),
}


def pins(**kwargs):
    return Pins(tensors=SOURCE, taps=TAPS, dtype=torch.bfloat16, **{"level": 1, **kwargs})


def test_a_replay_records_the_own_value_and_hands_out_the_references():
    """What is recorded is the port's own value; what it goes on with is the source, rounded to the port's precision."""
    record = TraceRecorder(pins=pins())
    record.span(0, 5)
    own = torch.full((1, 5, 2), 7.0)
    given = record("layers.0", own)
    assert torch.equal(given, SOURCE["layers.0"].bfloat16().float())
    assert torch.equal(record.tensors()["layers.0"], own)
    assert record.pinned == {"layers.0"}


@pytest.mark.parametrize(("level", "overwritten"), [(0, False), (1, False), (2, True), (3, True)])
def test_only_taps_up_to_the_level_are_overwritten(level, overwritten):
    """A child of a layer is replayed from level 2 on."""
    record = TraceRecorder(pins=pins(level=level))
    record.span(0, 5)
    own = torch.full((1, 5, 2), 7.0)
    assert (record("layers.0.attn", own) is not own) is overwritten


@pytest.mark.parametrize(("keep", "overwritten"), [((), True), (("layers.*",), False)])
def test_what_is_not_kept_is_not_overwritten(keep, overwritten):
    """A value that nobody records goes on as it is, so that its error is seen in what follows."""
    record = TraceRecorder(pins=pins(), keep=keep)
    record.span(0, 5)
    own = torch.full((1, 5, 2), 7.0)
    assert (record("embed", own) is not own) is overwritten
    assert ("embed" in record.tensors()) is overwritten


@pytest.mark.parametrize("decisions", [False, True])
def test_decisions_are_replayed_only_when_asked(decisions):
    """A route is overwritten with pin_decisions, and kept otherwise."""
    record = TraceRecorder(pins=pins(level=3, decisions=decisions))
    record.span(0, 5)
    own = torch.full((5, 1), 9)
    given = record("layers.0.moe.router.topk", own, kind="routing")
    assert torch.equal(given, SOURCE["layers.0.moe.router.topk"]) is decisions


def test_spans_join_along_the_token_axis_and_pin_their_own_tokens():
    """A chunk and a decode step give one tensor of all tokens, each overwritten with the tokens it stands for."""
    record = TraceRecorder(pins=pins())
    parts = []
    for start, stop in ((0, 4), (4, 5)):
        record.span(start, stop)
        parts.append(record("layers.0", torch.full((1, stop - start, 2), float(start))))
    assert torch.equal(torch.cat(parts, dim=1), SOURCE["layers.0"].bfloat16().float())
    assert record.tensors()["layers.0"].shape == (1, 5, 2)
    assert record.tokens("layers.0") == 5


def test_an_input_that_is_the_last_output_is_not_recorded_twice():
    """`X.in` is kept only where something was computed in front of the unit."""
    record = TraceRecorder()
    record.span(0, 5)
    out = record("layers.0", torch.ones(1, 5, 2))
    record("layers.1.in", out)
    record("layers.2.in", out + 0)
    assert "layers.1.in" not in record.taps
    assert "layers.2.in" in record.taps


def test_a_shape_that_does_not_fit_is_noted_and_not_overwritten():
    """A tap of another size is left as it is, with a note that says both shapes."""
    record = TraceRecorder(pins=pins())
    record.span(0, 5)
    own = torch.ones(1, 5, 3)
    assert record("layers.0", own) is own
    assert "(1, 5, 3)" in record.notes["layers.0"]


def test_jitter_moves_some_values_by_one_ulp_and_is_repeatable():
    """About a quarter of the values move, none by more than one ulp, and the same seed gives the same values."""
    values = torch.randn(1, 512, 8)
    taps = {"layers.0": TAPS["layers.0"]}

    def draw(seed):
        return Pins(tensors={"layers.0": values}, taps=taps, level=1, dtype=torch.bfloat16, jitter=seed).value(
            "layers.0", "hidden", 0, 512
        )

    plain, one = draw(0), draw(1)
    steps = (one.view(torch.int16) - plain.view(torch.int16)).abs()
    assert steps.max() == 1
    assert 0.15 < (steps > 0).float().mean() < 0.35
    assert torch.equal(one, draw(1))
    assert not torch.equal(one, draw(2))


def test_a_function_mode_of_the_port_does_not_reach_the_recorder():
    """A mode that changes every call (a cast to float64, say) changes nothing of what is recorded or replayed."""
    from torch.overrides import TorchFunctionMode

    class Refusing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} was reached")

    record = TraceRecorder(pins=pins())
    record.span(0, 5)
    own = torch.full((1, 5, 2), 7.0)
    with Refusing():
        given = record("layers.0", own)
    assert torch.equal(given, SOURCE["layers.0"].bfloat16().float())
