"""Which role does what for each planned run."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.schedule import make_schedule
from harness.types import Case, Run, Setup

CASE = Case(id="a", token_ids=tuple(range(20)))
RUNS = [
    Run(id="text/free", stage="text", kind="forward", case=CASE),
    Run(id="text/replay1", stage="text", kind="forward", case=CASE, level=1, pin="text/free", pin_decisions=True),
    Run(id="text/decode", stage="text", kind="steps", case=CASE, steps=((0, 10), (10, 20)), level=1, pin="text/free",
        pin_decisions=True, options={"phase": "decode"}),
    Run(id="text/plain", stage="text", kind="forward", case=CASE, observe=False),
    Run(id="text/generate", stage="text", kind="generate", case=CASE),
]  # fmt: skip
SETUPS = {
    "oracle": Setup(side="reference", role="oracle", adapter="r", dtype="float32"),
    "floor": Setup(side="reference", role="floor", adapter="r"),
    "accel": Setup(side="accel", role="accel", adapter="p"),
}


def schedule(replay=True, phased=True, runs=RUNS, setups=SETUPS):
    return make_schedule(
        runs, setups=setups, replay=replay, reference_phased=phased, goldens=Path("/g"), traces=Path("/run/traces")
    )


def test_every_phase_is_answered_by_one_whole_prefill_of_the_oracle():
    """The oracle does no phases: decode shares the golden of the whole replay; the floor walks the phase itself."""
    made = schedule()
    assert made.folders["oracle", "text/decode"] == made.folders["oracle", "text/replay1"]
    assert made.folders["floor", "text/decode"] != made.folders["floor", "text/replay1"]
    floor = next(j for j in made.of("floor") if j.folder == made.folders["floor", "text/decode"])
    assert floor.run.steps == ((0, 10), (10, 20))


def test_replays_have_two_jittered_floors_and_free_runs_none():
    """Jitter only makes sense where inputs are replayed."""
    made = schedule()
    assert ("floor_j1", "text/replay1") in made.folders
    assert ("floor_j2", "text/decode") in made.folders
    assert ("floor_j1", "text/free") not in made.folders
    assert {j.run.jitter for j in made.jobs if j.role == "floor_j2"} == {2}


def test_what_a_port_declares_changes_the_floor_alone():
    """A floor recorded for another declaration is not found again, the oracle is; a cache has more draws."""
    plain = schedule()
    setups = {**SETUPS, "floor": replace(SETUPS["floor"], precision={"cache": "float8_e4m3fn:tensor"})}
    made = schedule(setups=setups)
    assert made.folders["oracle", "text/replay1"] == plain.folders["oracle", "text/replay1"]
    for role in ("floor", "floor_j1"):
        assert made.folders[role, "text/replay1"] != plain.folders[role, "text/replay1"]
    assert ("floor_j12", "text/replay1") in made.folders
    assert ("floor_j3", "text/replay1") not in plain.folders


def test_a_run_without_taps_concerns_the_port_alone():
    """The oracle has nothing to say about a run that observes nothing."""
    assert [role for role, run in schedule().folders if run == "text/plain"] == ["accel"]


def test_the_floor_follows_the_tokens_of_the_oracle():
    """The floor's generate run knows where the oracle's tokens are."""
    made = schedule()
    floor = next(j for j in made.jobs if j.role == "floor" and j.run.kind == "generate")
    assert floor.expected == made.folders["oracle", "text/generate"]


def test_a_port_that_cannot_be_replayed_is_judged_in_reverse():
    """Its own free trace is replayed in oracle and floor; it never runs with foreign values."""
    made = schedule(replay=False)
    assert all(j.run.level == 0 and j.pins is None for j in made.of("accel"))
    assert made.folders["accel", "text/replay1"] == made.folders["accel", "text/free"]
    oracle = next(j for j in made.of("oracle") if j.folder == made.folders["oracle", "text/replay1"])
    assert oracle.pins == made.folders["accel", "text/free"]
    decode = next(j for j in made.of("oracle") if j.folder == made.folders["oracle", "text/decode"])
    assert decode.pins == made.folders["accel", "text/decode"]


@pytest.mark.parametrize("change", ["dtype", "case", "level"])
def test_a_golden_is_reused_only_for_the_same_question(change):
    """Another precision, input or level is another golden."""
    import dataclasses

    before = schedule().folders["floor", "text/replay1"]
    runs, setups = list(RUNS), dict(SETUPS)
    if change == "dtype":
        setups["floor"] = dataclasses.replace(setups["floor"], dtype="float16")
    elif change == "case":
        runs[1] = dataclasses.replace(runs[1], case=Case(id="b", token_ids=(1, 2)))
    else:
        runs[1] = dataclasses.replace(runs[1], level=2)
    made = make_schedule(runs, setups=setups, replay=True, reference_phased=True, goldens=Path("/g"), traces=Path("/t"))
    assert made.folders["floor", "text/replay1"] != before
    assert schedule().folders["floor", "text/replay1"] == before


def test_a_run_in_another_precision_moves_all_sides_by_as_much():
    """In float32 the oracle is float64 and the floor float32; those runs come last, so that each model loads once."""
    wide = [Run(id="text/free-float32", stage="text", kind="forward", case=CASE, dtype="float32")]
    made = schedule(runs=[*wide, *RUNS])
    found = {j.role: j.setup.dtype for j in made.jobs if j.run.dtype}
    assert found == {"oracle": "float64", "floor": "float32", "accel": "float32"}
    assert [bool(j.run.dtype) for j in made.jobs] == sorted(bool(j.run.dtype) for j in made.jobs)
    assert made.folders["oracle", "text/free-float32"] != made.folders["oracle", "text/free"]
    assert {j.setup.dtype for j in made.jobs if j.role == "accel" and not j.run.dtype} == {"bfloat16"}
