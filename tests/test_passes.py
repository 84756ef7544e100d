"""Which runs of a streamed side share a pass, and that sharing changes nothing."""

import json
from pathlib import Path

import pytest
import torch

from harness.faults import models
from harness.golden import load_failure, load_trace
from harness.passes import passes, walks
from harness.record import Asked, Session
from harness.schedule import Job, make_schedule
from harness.types import Case, Failure, Run, Setup

CASE = Case(id="a", token_ids=tuple(range(3, 23)), max_new_tokens=3)
PINNED = {"stage": "text", "case": CASE, "level": 1, "pin": "text/free", "pin_decisions": True}
RUNS = [
    Run(id="load/weights", stage="load", kind="weights"),
    Run(id="text/free", stage="text", kind="forward", case=CASE),
    Run(id="text/replay1", kind="forward", **PINNED),
    Run(id="text/decode", kind="steps", steps=((0, 18), (18, 19), (19, 20)), options={"phase": "decode"}, **PINNED),
    Run(id="text/generate", stage="text", kind="generate", case=CASE),
]  # fmt: skip


def jobs_of(folder: Path, spec: str = "r", options: dict[str, str] | None = None):
    rows = {"oracle": "float32", "floor": "bfloat16", "accel": "bfloat16"}
    setups = {
        role: Setup(side="reference", role=role, adapter=spec, dtype=dtype, options=options or {})
        for role, dtype in rows.items()
    }
    made = make_schedule(
        RUNS, setups=setups, replay=True, reference_phased=True, goldens=folder / "g", traces=folder / "t"
    )
    return made.of("oracle", "floor", "floor_j1", "floor_j2")


def test_every_job_is_done_once_and_after_what_it_needs():
    """No job is lost or doubled, and what a job replays or follows is recorded a pass earlier."""
    jobs = jobs_of(Path("/x"))
    alone, groups = passes(jobs)
    assert [job.run.kind for job in alone] == ["weights"]
    order = {job.folder: number for number, group in enumerate(groups) for job in group}
    assert len(order) == sum(map(len, groups)) == len(jobs) - 1
    for group in groups:
        for job in group:
            for source in (job.pins, job.expected):
                assert source is None or order[source] < order[job.folder]


def test_long_jobs_share_their_walks():
    """A free run goes first, so that single steps and generation, which are long, go along with each other."""
    _, groups = passes(jobs_of(Path("/x")))
    assert [max(walks(job) for job in group) for group in groups] == [1, 4, 1]
    assert {"generate", "steps"} <= {job.run.kind for job in groups[1]}


def test_what_is_measured_alone_runs_alone():
    """A run whose memory is judged shares no pass, and neither does one that is timed."""
    setup = Setup(side="accel", role="accel", adapter="r")
    runs = [
        Run(id="memory", stage="long_context", kind="forward", case=CASE, options={"alone": True}),
        Run(id="latency", stage="long_context", kind="latency", case=CASE),
        Run(id="free", stage="long_context", kind="forward", case=CASE),
    ]
    alone, groups = passes([Job(role="accel", run=run, setup=setup, folder=Path(run.id)) for run in runs])
    assert [job.run.id for job in alone] == ["memory", "latency"]
    assert [[job.run.id for job in group] for group in groups] == [["free"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return models.build("qwen3_moe", tmp_path_factory.mktemp("passes") / "model", dtype="bfloat16")


def asked_of(job) -> Asked:
    return Asked(
        run=job.run, setup=job.setup, out=job.folder, pins=job.pins, pin_dtype="bfloat16", expected=job.expected
    )


def test_a_pass_gives_what_each_run_gives_alone(folder: Path, tmp_path: Path):
    """Oracle, floor and jittered floors of one pass leave the very traces of a model that was loaded whole."""
    spec, traces = f"hf:{folder}", []
    for stream in "10":
        session = Session(tmp_path / f"session{stream}", spec=spec, checkpoint=folder)
        jobs = jobs_of(tmp_path / stream, spec, {"stream": stream})
        _, groups = passes(jobs)
        for group in groups:
            if stream == "1":
                assert session.run_together([asked_of(job) for job in group]) == [None] * len(group)
                continue
            for job in group:
                a = asked_of(job)
                failure = session.run(a.run, a.setup, a.out, pins=a.pins, pin_dtype=a.pin_dtype, expected=a.expected)
                assert failure is None
        session.close()
        traces.append([(job.role, job.run, load_trace(job.folder)) for group in groups for job in group])
    for (role, run, actual), (_, same_run, expected) in zip(*traces, strict=True):
        assert run == same_run
        assert list(actual.tensors) == list(expected.tensors), role
        assert all(torch.equal(actual.tensors[name], expected.tensors[name]) for name in actual.tensors), role
        assert actual.facts.get("token_ids") == expected.facts.get("token_ids")
    log = (tmp_path / "session1" / "log.txt").read_text()
    assert "times the checkpoint" in log


def test_a_shard_that_vanishes_is_named_and_what_was_recorded_stays(folder: Path, tmp_path: Path):
    """The runs that reach a vanished shard fail with its name; traces of earlier passes stay as they are."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    session = Session(tmp_path / "session", spec=f"hf:{copy}", checkpoint=copy)
    _, groups = passes(jobs_of(tmp_path, f"hf:{copy}", {"stream": "1"}))
    assert set(session.run_together([asked_of(job) for job in groups[0]])) == {None}
    index = json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"]
    shard = index["model.layers.3.self_attn.q_proj.weight"]
    (copy / shard).unlink()
    failures = session.run_together([asked_of(job) for job in groups[1]])
    session.close()
    for job, failure in zip(groups[1], failures, strict=True):
        assert isinstance(failure, Failure)
        assert shard in failure.message
        assert load_failure(job.folder) == failure
    assert all(load_trace(job.folder).tensors for job in groups[0])
