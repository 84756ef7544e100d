"""Recordings of statistics alone: a gross difference is shown with its place, and nothing passes."""

import dataclasses
import math

import pytest
import torch
from sides import hidden, noisy, run_of, trace

from harness import dropin
from harness.compare.triage import holds_statistics_alone, triage
from harness.gate import status_of
from harness.golden import load_recordings, save_trace
from harness.offline import compare_dirs
from harness.statistics import as_facts, statistics_of
from harness.types import Criterion, Status, Trace

ORACLE = {name: hidden(i) for i, name in enumerate(("embed", "layers.0", "layers.1", "layers.2"))}
RATIO = Criterion(
    id="c", stage="text", metric="accumulated_ratio", op="<=", limit=2.0, unit="ratio", why="", source=""
)  # fmt: skip


def told(tensors: dict[str, torch.Tensor]) -> Trace:
    """Return the trace of a run that kept statistics alone."""
    kept = as_facts({name: [statistics_of(tensor)] for name, tensor in tensors.items()})
    return trace({}, run_of(0), statistics=kept)


def found(accel: dict[str, torch.Tensor], oracle: Trace | None = None) -> list[tuple[str, str, Status]]:
    floors = [trace(noisy(ORACLE, 1), run_of(0)), trace(noisy(ORACLE, 2), run_of(0))]
    all_of = triage("text", told(accel), oracle or trace(ORACLE, run_of(0)), floors)
    return [(m.subject, m.detail["message"], status_of(RATIO, m)) for m in all_of]


def test_an_honest_run_is_not_judged_and_nothing_is_named() -> None:
    """Statistics that are alike say only that there are no tensors, against tensors or statistics of the reference."""
    for oracle in (trace(ORACLE, run_of(0)), told(ORACLE)):
        ((subject, said, status),) = found(noisy(ORACLE, 9), oracle)
        assert (subject, status) == ("*", Status.INCONCLUSIVE)
        assert "statistics only: 4 taps" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: 2 * x, "rms"),
        (lambda x: x.roll(1, dims=-1), "half of the sketched values"),
        (torch.zeros_like, "rms 0"),
    ],
)
def test_a_gross_difference_is_named_and_not_judged(change, said) -> None:  # type: ignore[no-untyped-def]
    """A factor, values at other places and silence are shown with their tap, first in order; none passes."""
    first, last = found({**noisy(ORACLE, 9), "layers.1": change(ORACLE["layers.1"])})
    assert first[0] == "layers.1"
    assert said in first[1]
    assert {first[2], last[2]} == {Status.INCONCLUSIVE}


def test_what_is_not_finite_has_failed() -> None:
    """A NaN of the port alone fails at its tap; one of the reference says nothing of the port."""
    holed = ORACLE["layers.2"].clone()
    holed[0, 3, 1] = math.nan
    assert found({**noisy(ORACLE, 9), "layers.2": holed})[0][::2] == ("layers.2", Status.FAILED)
    of_both = found({**noisy(ORACLE, 9), "layers.2": holed}, trace({**ORACLE, "layers.2": holed}, run_of(0)))
    assert [status for *_, status in of_both] == [Status.INCONCLUSIVE]


def test_an_engine_that_kept_no_tensor_is_compared_by_its_statistics(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """What the single-file recorder wrote without names is shown beside goldens: where, and that it is no verdict."""
    run = run_of(0)
    ids = torch.tensor(run.case.token_ids)[None]
    for role, tensors in (("oracle", ORACLE), ("floor", noisy(ORACLE, 1))):
        made = trace({"inputs.token_ids": ids, **tensors}, run, {"inputs.token_ids": "batch token"})
        save_trace(
            tmp_path / "gold" / role, dataclasses.replace(made, setup=dataclasses.replace(made.setup, role=role))
        )
    for place, change in (("good", 1.0), ("bad", 3.0)):
        with dropin.Recorder(tmp_path / place) as recorder:
            recorder.tokens("r", range(ids.numel()), ids[0])
            for name, tensor in noisy(ORACLE, 9).items():
                recorder.tap(name, tensor * (change if name == "layers.1" else 1.0))
        (mine,) = load_recordings(tmp_path / place)
        assert holds_statistics_alone(mine)
        (stage,) = compare_dirs(tmp_path / place, tmp_path / "gold").stages
        reasons = " ".join(v.reason for v in stage.verdicts)
        assert stage.status == Status.INCONCLUSIVE
        assert not any(v.status == "PASSED" for v in stage.verdicts)
        assert "statistics only" in reasons
        assert ("(layers.1)" in reasons) == (place == "bad")
