"""The command line: what it offers, where its messages go, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness import cli, pipeline
from harness.errors import CheckpointError, NothingToVerify, SpecError
from harness.report.results import build_results, write_results
from harness.types import StageResult, Status

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("verify", "record", "compare", "diagnose", "report", "init", "doctor")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Run in a folder without a day0.toml, outside any CI job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


def results(status: Status):
    return build_results([StageResult(name="load", status=status, reason="a reason")])


def test_help_loads_nothing_heavy():
    """The help of day0 and of each command imports neither torch nor what reports and models need."""
    code = f"""
import sys
from harness import cli
for words in ([], *([c, "--help"] for c in {COMMANDS!r})):
    assert cli.run(words) == 0, words
unwanted = ("torch", "numpy", "transformers", "jinja2", "PIL", "fastapi", "harness.config")
heavy = [m for m in unwanted if m in sys.modules]
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert f"  {command} " in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["verfy"], "verify"),
        (["verify", "--stge", "x"], "try: day0 verify --help"),
        (["verify", "--stage", "txt"], "did you mean 'text'"),
        (["verify", "--config", "nowhere.toml"], "no configuration file at nowhere.toml"),
        (["verify", "--set", "run.profil=full"], "did you mean 'profile'"),
        (["verify", "--reference", "hf:/models/x"], "no port was named"),
        (["record"], "add --out DIR"),
        (["compare", "a", "b"], "expected a folder of traces at a"),
        (["report", "nowhere"], "expected the folder of a run at nowhere"),
        (["report", "."], "expected results.json"),
        (["report"], "RUN_DIR"),
    ],
)
def test_wrong_words_are_usage_errors(words, message, capsys):
    """Whatever is typed wrongly ends in exit code 4 and one message on stderr that says what to type."""
    assert cli.run(words) == 4
    out, err = capsys.readouterr()
    assert message in err
    assert err.startswith("day0: ")
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (SpecError("no module x"), 4),
        (CheckpointError("no index"), 1),
        (NothingToVerify("no stage"), 5),
        (KeyboardInterrupt(), 2),
        (ZeroDivisionError("boom"), 3),
    ],
)
def test_what_a_run_raises_becomes_its_exit_code(raised, code, monkeypatch, capsys):
    """Each kind of failure has its exit code; only a mistake inside day0 prints a traceback."""

    def verify(config, display, **more):
        raise raised

    monkeypatch.setattr(pipeline, "verify", verify)
    assert cli.run(["verify"]) == code
    err = capsys.readouterr().err
    assert ("Traceback" in err) == (code == 3)
    assert err.strip()


@pytest.mark.parametrize(
    ("status", "code"), [(Status.PASSED, 0), (Status.FAILED, 1), (Status.ERROR, 1), (Status.SKIPPED, 5)]
)
def test_a_finished_run_gives_its_verdict_as_exit_code(status, code, monkeypatch, capsys, tmp_path):
    """Accepted is 0, refused 1, nothing in scope 5; the verdict is printed, and added to a CI job's summary."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    monkeypatch.setattr(pipeline, "verify", lambda config, display, **more: results(status))
    assert cli.run(["verify"]) == code
    assert status.value in capsys.readouterr().out
    assert status.value in (tmp_path / "summary").read_text()


def test_flags_reach_the_configuration(monkeypatch, tmp_path):
    """Every flag of verify ends in its key of the configuration."""
    for name in ("c/text.toml", "r/results.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("")
    seen = []
    monkeypatch.setattr(
        pipeline, "verify", lambda config, display, **more: seen.append(config) or results(Status.PASSED)
    )
    words = "verify --stage text --reference builtin:reference --accel port.py:f --goldens g --checklists c --out o"
    words += " --profile full --require image,chat --after r --keep-going --resume --set watchdog.run_s=7"
    assert cli.run(words.split()) == 0
    run = seen[0].run
    paths = [str(p) for p in (run.goldens, run.checklists, run.out, run.after)]
    assert paths == ["g", "c", "o", "r"]
    assert (run.stage, run.profile, run.require, run.keep_going, run.resume) == (
        ("text",),
        "full",
        ("image", "chat"),
        True,
        True,
    )
    assert (seen[0].accel.spec, seen[0].watchdog.run_s) == ("port.py:f", 7)


def test_dry_run_prints_rows_and_verifies_nothing(monkeypatch, capsys):
    """--dry-run prints what would run, rows of different keys in one table, and stops."""
    monkeypatch.setattr(pipeline, "verify", lambda *a, **k: pytest.fail("verified"))
    rows = [{"stage": "image", "skipped": "no tower"}, {"stage": "load", "run": "x"}]
    monkeypatch.setattr(pipeline, "dry_run", lambda config, say: rows)
    assert cli.run(["verify", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["stage", "skipped", "run"]
    assert lines[1].split() == ["image", "no", "tower"]
    assert lines[2].split() == ["load", "x"]


def test_reports_are_rendered_again(tmp_path, capsys):
    """`day0 report` and `day0 diagnose` need results.json alone."""
    write_results(results(Status.FAILED), tmp_path)
    assert cli.run(["report", str(tmp_path)]) == 0
    assert (tmp_path / "01-load.md").is_file()
    assert cli.run(["diagnose", str(tmp_path)]) == 0
    assert "The port is not accepted" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["report", "diagnose"])
def test_unreadable_results_are_bad_input(command, tmp_path, capsys):
    """A results.json that is broken or of another format is a usage error that names the file."""
    (tmp_path / "results.json").write_text('{"format": "day0.results/9"}')
    assert cli.run([command, str(tmp_path)]) == 4
    assert "expected format 'day0.results/1'" in capsys.readouterr().err


def test_folders_without_traces_are_bad_input(tmp_path, capsys):
    """`day0 compare` of a folder that holds no traces is a usage error that names it."""
    (tmp_path / "a").mkdir()
    assert cli.run(["compare", "a", "a"]) == 4
    assert "below a" in capsys.readouterr().err


def test_init_writes_once(tmp_path, capsys):
    """`day0 init` writes the two files, says what to type next, and overwrites nothing."""
    assert cli.run(["init", "mine"]) == 0
    assert "day0 verify --stage text --config mine/day0.toml" in capsys.readouterr().out
    (tmp_path / "mine" / "port.py").write_text("# mine")
    assert cli.run(["init", "mine"]) == 4
    assert "nothing was written" in capsys.readouterr().err
    assert (tmp_path / "mine" / "port.py").read_text() == "# mine"


def test_doctor_always_answers(capsys):
    """`day0 doctor` describes the machine and ends well."""
    assert cli.run(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("versions", "torch", "devices", "cpu", "distributed", "can do here"):
        assert word in out


def test_the_scaffolded_port_is_a_port(tmp_path, monkeypatch):
    """The scaffolded port.py gives an adapter for the built-in checkpoint as it stands."""
    import importlib.util

    assert cli.run(["init", "mine"]) == 0
    spec = importlib.util.spec_from_file_location("scaffolded_port", tmp_path / "mine" / "port.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from harness.types import Setup
    from reference_impl import checkpoint

    port = module.port(checkpoint(), Setup(side="accel", role="accel", adapter="port.py:port"))
    assert hasattr(port, "forward")
    assert hasattr(port, "scope")
