"""Words that are wrong: exit code 4, one message that says what to type, before any device is touched."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import checklists
from harness import cli

PORT = """
from accel_impl import adapter


def port(checkpoint, setup):
    return adapter(checkpoint, setup)


def number(checkpoint, setup):
    return 7
"""
BROKEN_PORT = "import vendor_kernels_that_are_not_here\n"


@pytest.fixture(autouse=True)
def desk(tmp_path, monkeypatch):
    """A folder with what a user might have lying about: ports, configurations, files in the place of folders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    files = {
        "port.py": PORT,
        "broken.py": BROKEN_PORT,
        "syntax.py": "def port(:\n",
        "file": "not a folder",
        "invalid.toml": "[run\nstage = 'text'\n",
        "typo.toml": "[run]\nprofle = 'quick'\n",
        "section.toml": "[runn]\n",
        "kind.toml": "[run]\nkeep_going = 'perhaps'\n",
        "latin.toml": b"[run]\nout = '\xff'\n",
        "model/config.json": "{}",
        "text/config.json": "[1, 2]",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return tmp_path


def refused(words: list[str], capsys) -> str:
    """Run a command line that must end in exit code 4 with one message and no traceback of ours; return the message."""
    code = cli.run(words)
    out, err = capsys.readouterr()
    assert code == 4, (code, out, err)
    assert err.startswith("day0: "), err
    assert err.count("day0: ") == 1
    return err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--reference hf:nowhere --accel builtin:accel", "expected a transformers checkpoint folder at nowhere"),
        ("--reference hf:file --accel builtin:accel", "expected a transformers checkpoint folder at file"),
        ("--reference hf:model --accel hf:model", "only safetensors are read"),
        ("--reference hf:text --accel hf:text", "expected a JSON object"),
        ("--reference port.py:port --accel port.py:port", "neither SPEC names one"),
        ("--reference hf:model", "no port was named"),
        ("--stage lod", "did you mean 'load'"),
        ("--stage load,,nonsense", "unknown stage 'nonsense'"),
        ("--stage=", "expected at least one stage"),
        ("--stagee load", "try: day0 verify --help"),
        ("--profile fast", "'quick' or 'full'"),
        ("--require imagery", "did you mean 'image'"),
        ("--config nowhere.toml", "no configuration file at nowhere.toml"),
        ("--config invalid.toml", "is not valid TOML"),
        ("--config latin.toml", "latin.toml"),
        ("--config typo.toml", "did you mean 'profile'"),
        ("--config section.toml", "did you mean 'run'"),
        ("--config kind.toml", "keep_going"),
        ("--config .", "expected"),
        ("--set run.keep_gong=true", "did you mean 'keep_going'"),
        ("--set nothing", "expected --set section.key=value"),
        ("--set watchdog.run_s=nan", "greater than 0"),
        ("--set scope.layouts=tp0", "layout"),
        ("--after nowhere", "--after"),
        ("--after .", "--after"),
        ("--goldens file", "--goldens"),
        ("--checklists nowhere", "--checklists"),
        ("--out file", "--out"),
        ("--out file/below", "--out"),
        ("--accel openai:127.0.0.1", "expected a URL"),
        ("--accel biultin:accel", "did you mean 'builtin'"),
        ("--accel :", "expected KIND:TARGET"),
        ("--accel builtin:accel?slots=1&slots=2", "each option once"),
        ("--accel port.py:port?x", "expected ?key=value"),
        ("surplus", "unexpected extra argument"),
    ],
)
def test_wrong_words_end_before_anything_starts(words, message, capsys, monkeypatch):
    """No worker is started: what is wrong is told at once, with the words to correct."""
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: pytest.fail(f"started {a}"))
    told = refused(["verify", *words.split()], capsys)
    assert message in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.py:port", "expected a Python file at"),
        ("port.py:prot", "did you mean 'port'"),
        ("port.py:number", "expected port.py:number to give a torch.nn.Module or an adapter, found int"),
        ("broken.py:port", "No module named 'vendor_kernels_that_are_not_here'"),
        ("syntax.py:port", "SyntaxError"),
        ("not_installed.ports:make", "found no module named 'not_installed'"),
        ("traces:nowhere", "found no manifest.json"),
        ("builtin:acel", "did you mean 'accel'"),
        ("builtin:accel?slotz=1", "did you mean 'slots'"),
    ],
)
def test_a_port_that_cannot_be_imported_is_a_usage_error(spec, message, capsys):
    """The worker that was to import the port says why it could not; nothing was loaded, there are no results."""
    told = refused(["verify", "--stage", "load", "--accel", spec], capsys)
    assert message in told
    assert "harness/plugins.py" not in told
    assert not Path("day0-run/results.json").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('metric = "index_problems"', 'metric = "index_problem"', "did you mean 'index_problems'"),
        ('op = "=="', 'op = "="', "op"),
        ("limit = 0", 'limit = "none"', "limit"),
        ('unit = "count"', 'unit = "counts"', "unit"),
        ('stage = "load"', 'stage = "laod"', "stage"),
        ("[[criteria]]", "[[criterion]]", "did you mean 'criteria'"),
    ],
)
def test_a_wrong_checklist_is_refused(old, new, message, desk, capsys):
    """A criterion that nothing measures, or that cannot be read, is named with its file before anything runs."""
    shutil.copytree(
        next(iter(checklists.__path__)), desk / "mine", ignore=shutil.ignore_patterns("*.py", "__pycache__")
    )
    path = desk / "mine" / "load.toml"
    path.write_text(path.read_text().replace(old, new, 1))
    told = refused(["verify", "--checklists", "mine"], capsys)
    assert "load.toml" in told
    assert message in told
