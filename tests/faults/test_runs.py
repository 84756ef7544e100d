"""How runs go on: resumed, after an earlier one, kept going, dry; what a waiver or a requirement does to them."""

from __future__ import annotations

import json
import shutil

import pytest

import checklists

FRAGILE = """
from pathlib import Path

from accel_impl import adapter


def port(checkpoint, setup):
    if (Path(__file__).parent / "unplugged").exists():
        raise RuntimeError("the device is unplugged")
    return adapter(checkpoint, setup)
"""


def test_a_resumed_run_repeats_only_what_ended_in_error(verify, tmp_path):
    """An ERROR is run again; a stage with a verdict is taken from the run before, if its digests still match."""
    (tmp_path / "port.py").write_text(FRAGILE)
    (tmp_path / "unplugged").touch()
    spec, out = f"{tmp_path / 'port.py'}:port", tmp_path / "run"
    assert verify(spec, out=out).stages == {"load": "ERROR"}
    (tmp_path / "unplugged").unlink()
    again = verify(spec, "--resume", out=out)
    assert "taken from the run before" not in again.said
    again.accepted()
    third = verify(spec, "--resume", out=out)
    assert "load: taken from the run before" in third.said
    third.accepted()
    (tmp_path / "port.py").write_text(FRAGILE + "\n# another port\n")
    assert "taken from the run before" not in verify(spec, "--resume", out=out).said


def test_an_earlier_run_stands_only_for_the_same_port(verify, base):
    """After a run with equal digests the stages before need not run; after another port's run they are not covered."""
    same = verify("builtin:accel", "--after", str(base.out), stage="startup")
    assert list(same.stages) == ["startup"]
    assert not any(line.startswith("load:") for line in same.results["scope"]["not_covered"])
    other = verify("nothing", "--after", str(base.out), stage="startup")
    assert other.results["partial"]
    assert any(
        "does not count, for another config and another port" in line for line in other.results["scope"]["not_covered"]
    )


def test_a_refused_run_goes_on_where_it_is_told_to(verify):
    """With --keep-going the later stage runs and has a verdict of its own; the run is still refused."""
    outcome = verify("reinitialised", "--keep-going", stage="startup")
    assert outcome.code == 1
    assert outcome.stages == {"load": "FAILED", "startup": "PASSED"}


def test_a_dry_run_shows_what_would_run_and_loads_nothing(verify):
    """--dry-run prints stages, roles, runs and cost, and leaves neither results nor traces."""
    outcome = verify("hangs_in_load", "--dry-run", stage="startup")
    assert outcome.code == 0
    assert "load/weights" in outcome.said
    assert "startup/ready" in outcome.said
    assert not (outcome.out / "results.json").exists()
    assert not (outcome.out / "traces").exists()


def test_what_is_required_may_not_be_skipped(verify):
    """--require image refuses a port that does not claim images, and says so."""
    outcome = verify("nothing", "--set", "scope.image=false", "--require", "image")
    assert outcome.code == 1
    assert not outcome.results["accepted"]
    assert "image" in json.dumps(outcome.results["problems"])


@pytest.mark.parametrize(
    ("expires", "accepted", "status"), [("2999-01-01", True, "WAIVED"), ("2001-01-01", False, "FAILED")]
)
def test_a_waiver_holds_until_it_expires(verify, tmp_path, expires, accepted, status):
    """A waived failure is shown as WAIVED and accepted; an expired waiver refuses the run and is named."""
    folder = tmp_path / "mine"
    shutil.copytree(next(iter(checklists.__path__)), folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    waived = "".join(
        f'[[waivers]]\ncriterion = "{criterion}"\nsubject = "model.layers.3.*"\nowner = "A. Person"\n'
        f'link = "https://tracker.example/1"\nexpires = "{expires}"\n'
        for criterion in ("load.values", "load.conversion.same")  # what is drawn anew differs from load to load too
    )
    (folder / "waivers.toml").write_text(waived)
    outcome = verify("reinitialised", "--checklists", str(folder))
    assert outcome.results["accepted"] is accepted
    assert outcome.code == (0 if accepted else 1)
    assert outcome.broken("load").get("load.values") == status
    assert accepted or "expired" in json.dumps(outcome.results)
