"""One real fault, or one harmless difference, through the real command. Goldens are recorded once for all tests."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.types import STAGES

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one `day0 verify` ended: exit code, results.json (empty if there is none), what it printed, its folder."""

    code: int
    said: str
    out: Path
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def stages(self) -> dict[str, str]:
        """Status by stage."""
        return {s["name"]: s["status"] for s in self.results.get("stages", [])}

    def findings(self, stage: str) -> list[dict[str, Any]]:
        """The findings of a stage, the first wrong place first."""
        return next((s["findings"] for s in self.results.get("stages", []) if s["name"] == stage), [])

    def broken(self, stage: str) -> dict[str, str]:
        """Status of each blocking criterion of a stage that was neither passed nor skipped."""
        verdicts = next((s["verdicts"] for s in self.results.get("stages", []) if s["name"] == stage), [])
        bad = [v for v in verdicts if v["criterion"]["blocking"] and v["status"] not in ("PASSED", "SKIPPED")]
        return {v["criterion"]["id"]: v["status"] for v in bad}

    def refused_at(self, stage: str, *, status: str = "FAILED") -> dict[str, Any]:
        """Assert that the run was refused at this stage, that what follows is BLOCKED, and return the first finding."""
        assert self.code == 1, self
        assert not self.results["accepted"]
        assert self.stages[stage] == status, self
        before = [n for n in STAGES[: STAGES.index(stage)] if n in self.stages]
        after = [n for n in STAGES[STAGES.index(stage) + 1 :] if n in self.stages]
        assert all(self.stages[n] in ("PASSED", "SKIPPED") for n in before), self.stages
        assert all(self.stages[n] in ("BLOCKED", "SKIPPED") for n in after), self.stages
        page = self.out / f"{STAGES.index(stage) + 1:02d}-{stage.replace('_', '-')}.md"
        assert status in page.read_text(), page
        assert (self.out / "summary.md").is_file()
        assert (self.out / "junit.xml").is_file()
        findings = self.findings(stage)
        assert findings, self
        return findings[0]

    def accepted(self) -> None:
        """Assert that the run was accepted."""
        assert self.code == 0, self
        assert self.results["accepted"], self

    def __repr__(self) -> str:
        lines = [f"exit {self.code} {self.stages}"]
        for stage in self.stages:
            lines += [f"{stage}: {self.broken(stage)}"] if self.broken(stage) else []
            lines += [f"{stage}: {f['tap']}: {f['cause']} | {f['message']}" for f in self.findings(stage)[:4]]
        return "\n".join([*lines, self.said[-1500:]])


@pytest.fixture(scope="session")
def run_day0():
    """Return a function that runs one command line in this process and returns (exit code, all that it printed)."""

    def run(*words: str) -> tuple[int, str]:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = cli.run([str(w) for w in words])
        return code, said.getvalue()

    return run


@pytest.fixture(scope="session")
def goldens(tmp_path_factory) -> Path:
    """The folder of reference traces that every run of this folder uses and adds to."""
    return tmp_path_factory.mktemp("goldens")


@pytest.fixture(scope="session")
def verify(tmp_path_factory, goldens, run_day0):
    """Return `verify(accel, *flags, stage=..., reference=...)`, which runs `day0 verify` and returns its Outcome.

    `accel` is a SPEC; the name of a fault of `builtin_ports.py` may stand for one. `out` continues an earlier folder.
    """

    def run(
        accel: str,
        *words: str,
        stage: str = "load",
        reference: str = "builtin:reference",
        out: Path | None = None,
        store: Path | None = None,
    ) -> Outcome:
        spec = accel if ":" in accel else f"{HERE / 'builtin_ports.py'}:port?fault={accel}"
        folder = out or tmp_path_factory.mktemp("run")
        code, said = run_day0(
            "verify", "--stage", stage, "--reference", reference, "--accel", spec, "--out", folder,
            "--goldens", store or goldens, *words,
        )  # fmt: skip
        path = folder / "results.json"
        results = json.loads(path.read_text()) if path.is_file() else {}
        return Outcome(code=code, results=results, said=said, out=folder)

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Return `tiny_model(name)`: the SPEC of a small random model of an architecture, made once."""
    pytest.importorskip("transformers")
    from harness.faults import models

    folder = tmp_path_factory.mktemp("models")
    return lambda name: f"hf:{models.build(name, folder / name)}"


@pytest.fixture(scope="session")
def base(verify) -> Outcome:
    """An accepted run of the first stage, for `--after`: what comes before the stage of a fault is not run again."""
    outcome = verify("builtin:accel")
    outcome.accepted()
    return outcome


@pytest.fixture(scope="session")
def later(verify, base):
    """Return `later(accel, *flags, stage=...)`: as `verify`, but for what the stage of a fault does not need.

    The stages before are not run again; no run is in float32, which only refuses what is refused anyway; prompts are
    short, and the same in all files, so that their goldens are recorded once.
    """

    def run(accel: str, *words: str, length: int = 73, **more: Any) -> Outcome:
        claim = ("scope.precisions=[]", f"scope.max_length_tokens={length}")
        given = [word for each in claim for word in ("--set", each)]
        return verify(accel, "--after", str(base.out), *given, *words, **more)

    return run


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Run in a folder without a day0.toml, outside any CI job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
