"""The side under test runs beside a vendor's own torch: its process needs little."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from source_tree import ROOT, dotted, imports, modules, show

ALLOWED = {"torch", "numpy", "safetensors", "harness"}
LAZY = {
    "transformers": {"harness/adapters/hf.py", "harness/adapters/stream/folder.py"},
    "httpx": {"harness/adapters/server.py", "harness/adapters/smoke.py"},
    "tokenizers": {"harness/adapters/text.py", "harness/adapters/server.py"},
    "jinja2": {"harness/adapters/text.py"},
    "blake3": {f"harness/{x}.py" for x in ("golden/digest", "checkpoint/scan/shard", "checkpoint/scan/manifest")},
    "tomli": {"harness/mapping/file.py"},
}
"""What may be imported inside a function, where a port asks for it, and only there."""

BLOCKED = (
    "pydantic",
    "typer",
    "click",
    "rich",
    "jinja2",
    "transformers",
    "tokenizers",
    "PIL",
    "httpx",
    "fastapi",
    "uvicorn",
    "psutil",
    "blake3",
    "pytest",
)


def reach() -> list[Path]:
    """Return the files that the worker can come to import, lazily or not."""
    by_name = {dotted(p): p for p in modules("harness")}
    todo, seen = (
        ["harness.worker", *(n for n in by_name if n.startswith(("harness.adapters.", "harness.metrics.")))],
        set(),
    )
    while todo:
        name = todo.pop()
        if name in seen or name not in by_name:
            continue
        seen.add(name)
        todo += [other for other, _ in imports(by_name[name]) if other.startswith("harness.")]
    return [by_name[name] for name in sorted(seen)]


def test_worker_imports_little():
    """What the worker reaches imports torch, numpy, safetensors and the standard library; the rest where listed."""
    wrong = []
    for path in reach():
        eager = {name.split(".")[0] for name, _ in imports(path, lazy=False)}
        for name, line in imports(path):
            top, file = name.split(".")[0], str(path.relative_to(ROOT))
            fine = top in ALLOWED or top in sys.stdlib_module_names or top == "__future__"
            if not fine and (top in eager or file not in LAZY.get(top, set())):
                wrong.append(f"{show(path, line)} imports {top}")
    assert wrong == []


def test_worker_reaches_no_border():
    """The worker reaches neither configuration, checklists, gate nor reports."""
    names = {dotted(p).split(".")[1] for p in reach()}
    assert names & {"config", "checklist", "gate", "report", "pipeline", "cli", "stages", "diagnose"} == set()


def test_worker_starts_without_the_rest():
    """With everything else made unimportable, all that the worker reaches still imports."""
    names = [dotted(p) for p in reach()]
    code = f"""
import importlib, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
for name in {names!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
