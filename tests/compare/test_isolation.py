"""A replay compares only what both sides isolated alike."""

from __future__ import annotations

from sides import hidden, noisy, run_of, trace, value

from harness.compare import compare_run
from harness.types import Scope

ORACLE = {
    name: hidden(seed)
    for seed, name in enumerate(("embed", "layers.0.attn", "layers.0.mlp", "layers.0", "layers.1.attn", "layers.1"))
}


def judged(level: int, shown: set[str], **run: object) -> dict[str, str]:
    """Return the subjects with error ratios where the port shows, and goes on with, some of the taps only."""
    one = run_of(level, **run)
    accel = {k: v for k, v in noisy(ORACLE, 9).items() if k in shown}
    found = compare_run(
        stage="text",
        run=one,
        oracle=trace(ORACLE, one, pinned=sorted(ORACLE)),
        floors=[trace(noisy(ORACLE, 1), one)],
        accel=trace(accel, one, pinned=sorted(shown)),
        scope=Scope(),
        dtype="bfloat16",
    )
    told = value(found, "unseen_taps").detail["not_isolated"]
    subjects = {m.subject for m in found if m.metric == "error_ratio" and not m.problem}
    assert not subjects & set(told)
    return {"judged": " ".join(sorted(subjects)), "told": " ".join(told)}


def test_behind_a_place_that_only_the_reference_overwrote_nothing_is_compared_up_to_the_units_end() -> None:
    """A layer whose attention the port does not show is left to the replay of layers; other layers are judged."""
    shown = {"embed", "layers.0", "layers.0.mlp", "layers.1.attn", "layers.1"}
    found = judged(2, shown)
    assert found["told"] == "layers.0 layers.0.mlp"
    assert found["judged"] == "embed layers.1 layers.1.attn"


def test_the_replay_of_layers_always_judges() -> None:
    """At level 1 every layer is compared, whatever the port does not show inside."""
    found = judged(1, {"embed", "layers.0", "layers.1"})
    assert found["told"] == ""
    assert found["judged"] == "embed layers.0 layers.1"


def test_on_the_ports_own_values_everything_shown_is_compared() -> None:
    """Where the reference is replayed on the port's values, it was overwritten with what the port shows."""
    assert judged(2, {"embed", "layers.0", "layers.1.attn", "layers.1"}, pin_role="accel")["told"] == ""
