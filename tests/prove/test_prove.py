"""`day0 prove`: what it says, what it writes, how it ends."""

from __future__ import annotations

import json
import sys

import pytest

from harness import cli
from harness.errors import Day0Error
from harness.faults import TABLE, Injection, NoPlace
from harness.faults.bench import Row
from harness.faults.jobs import jobs_at_once, rows_of
from harness.faults.pending import PENDING
from harness.faults.prove import _chosen
from harness.faults.table import as_data, failed, markdown, scores


def test_a_fault_of_any_port_is_found_and_written_down(tmp_path, capsys):
    """A fault of the built-in port, at a tap that it shows: refused at its place; cosine passes it."""
    words = ["--architecture", "builtin", "--only", "tap_head_scaled"]
    assert cli.run(["prove", *words, "--out", str(tmp_path)]) == 0
    assert "recording the reference" in capsys.readouterr().err
    data = json.loads((tmp_path / "prove.json").read_text())
    assert data["format"] == "day0.prove/1"
    assert data["proved"]
    (fault,) = data["rows"]
    assert (fault["outcome"], fault["tap"], fault["place_right"]) == ("detected", "layers.2.attn.core", True)
    assert fault["naive"]["cosine 0.99"] is False
    assert "| relative 1e-3 |" in (tmp_path / "prove.md").read_text()


def test_a_module_is_broken_by_structure(tmp_path, capsys):
    """A fault sits in a middle layer, found by its build; its harmless twin passes; one without a place is said."""
    pytest.importorskip("transformers")
    file = tmp_path / "rows.json"
    words = ["--architecture", "llama", "--only", "linear_scaled,TX16,wide_projections"]
    assert cli.run(["prove", *words, "--json", str(file)]) == 0
    said = capsys.readouterr().err
    assert "llama: fault linear_scaled: detected, text at layers.1.attn.o_proj" in said
    assert "llama: fault sinks_dropped: no place" in said
    harmless = next(r for r in json.loads(file.read_text())["rows"] if r["kind"] == "benign")
    assert harmless["outcome"] == "accepted"
    assert harmless["naive"]["relative 1e-3"] is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--architecture", "lama"], "did you mean 'llama'"),
        (["--only", "linear_scald"], "did you mean 'linear_scaled'"),
        (["--only", "MC03"], "pending"),
    ],
)
def test_unknown_words_are_usage_errors(capsys, words, message):
    """A word that names nothing ends with exit 4 and the nearest valid one."""
    assert cli.run(["prove", *words]) == 4
    assert message in capsys.readouterr().err


STUB = """#!{python}
import json, sys
words = dict(zip(sys.argv, sys.argv[1:]))
name = words["--architecture"]
print("heard", name, file=sys.stderr)
row = dict(architecture=name, name="a", id="X", kind="fault", says="s", outcome="detected", place_right=None)
if name != "broken":
    open(words["--json"], "w").write(json.dumps({{"rows": [row]}}))
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Let a small program stand for the command that proves one architecture."""
    program = tmp_path / "python"
    program.write_text(STUB.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr("harness.faults.jobs.sys.executable", str(program))


def test_architectures_are_proved_side_by_side(stub, tmp_path):
    """Each in a process of its own: rows in the order of the names, and what the processes say is heard."""
    heard: list[str] = []
    rows = rows_of(["one", "two"], ["--seed", "1"], at_once=2, scratch=tmp_path, say=heard.append)
    assert [(r.architecture, r.outcome, r.place_right) for r in rows] == [
        ("one", "detected", None),
        ("two", "detected", None),
    ]
    assert sorted(heard) == ["heard one", "heard two"]


def test_a_process_that_gives_no_score_is_an_error(stub, tmp_path):
    """An architecture that ended without rows is named: nothing of the proof passes for it."""
    with pytest.raises(Day0Error, match="broken: expected a score"):
        rows_of(["one", "broken"], [], at_once=1, scratch=tmp_path, say=lambda _: None)


@pytest.mark.parametrize(("asked", "architectures", "expected"), [(1, 5, 1), (8, 3, 3), (0, 1, 1)])
def test_there_are_no_more_processes_than_architectures(asked, architectures, expected):
    """As many processes as are asked for, at most one for each architecture."""
    assert jobs_at_once(asked, architectures) == expected


def test_without_transformers_the_built_in_pair_and_operators_are_proved(monkeypatch, capsys):
    """What is missing is said, with the line that installs it; a named architecture is a usage error."""
    monkeypatch.setattr("harness.faults.prove.importlib.util.find_spec", lambda name: None)
    assert cli.run(["prove", "--architecture", "llama"]) == 4
    assert "pip install 'day0[hf]'" in capsys.readouterr().err
    assert cli.run(["prove", "--only", "linear_scaled"]) == 4
    assert "only the built-in pair and operators are proved" in capsys.readouterr().err


def row(outcome: str, kind: str = "fault", **more) -> Row:
    return Row(architecture="a", name=outcome, id="X", kind=kind, says="s", outcome=outcome, **more)


@pytest.mark.parametrize("outcome", ["missed", "alarmed", "broke", "did not move"])
def test_what_refutes_the_proof_fails_it(outcome):
    """A missed fault, a false alarm, an injection that broke or moved nothing: none of them passes."""
    assert failed([row("detected"), row(outcome)]) == [row(outcome)]


def test_what_had_no_place_counts_nowhere():
    """What has no place is neither detected nor missed; a harmless difference without an effect is not counted."""
    rows = [
        row("detected", place_right=True, naive={"PCC 0.99": True}),
        row("missed"),
        row("no place"),
        row("alarmed", "benign", naive={"PCC 0.99": False}),
        row("accepted", "benign", moved=True),
        row("accepted", "benign", moved=False),
    ]
    own, *common = scores(rows)
    assert (own.right, own.faults, own.places, own.false, own.benign) == (1, 2, 1, 1, 2)
    assert [(s.right, s.false) for s in common if s.rule == "PCC 0.99"] == [(1, 0)]
    assert json.loads(as_data(rows, PENDING))["proved"] is False
    assert "missed" in markdown(rows, PENDING)


def test_the_catalogue_is_large_and_says_what_it_expects():
    """At least 60 faults and 15 differences; every fault names stages and words, every pending one a reason."""
    rows = list(TABLE.rows.values())
    faults = [r for r in rows if r.kind == "fault"]
    assert len(faults) >= 60
    assert len(rows) - len(faults) >= 15
    assert all(r.stages and r.cause and r.says for r in faults)
    assert all(p.why for p in PENDING)


def test_ports_that_declare_the_same_are_proved_together():
    """What needs a declared cache has goldens of its own, after the rest; a sample leaves it out."""
    first, second = _chosen("llama", [], True, 0)
    assert not any(row.declares for row in first)
    assert {row.name for row in second} >= {"cache_in_fp8", "cache_scale_not_delivered"}
    assert {tuple(row.declares) for row in second} == {("cache",)}
    (sample,) = _chosen("llama", [], False, 0)
    assert not any(row.declares for row in sample)


def test_a_place_that_is_not_there_is_said():
    """An injection into something that is no decoder finds no place."""
    import torch

    from harness.faults import Parts

    injection: Injection = TABLE.rows["linear_scaled"]
    with pytest.raises(NoPlace):
        injection.inject(Parts(torch.nn.Linear(2, 2)))
