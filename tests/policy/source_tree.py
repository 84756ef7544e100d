"""What the policy tests read: the project's modules as syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("harness", "reference_impl", "accel_impl", "checklists")
TEXT = (".py", ".md", ".toml", ".txt", ".j2", ".json", ".yml", ".yaml")


def modules(*packages: str) -> list[Path]:
    """Return the Python files of packages (all of them unless named)."""
    return [p for name in packages or PACKAGES for p in sorted((ROOT / name).rglob("*.py"))]


def texts() -> list[Path]:
    """Return every text file of the project that people read."""
    folders = [ROOT / name for name in (*PACKAGES, "tests", "examples", "benchmarks", ".ci") if (ROOT / name).is_dir()]
    found = [p for folder in folders for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    found += [p for p in ROOT.iterdir() if p.is_file()]
    return sorted(p for p in found if p.suffix in TEXT or p.parent.name == ".ci")


@cache
def tree(path: Path) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def dotted(path: Path) -> str:
    """Return a file's module name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, lazy: bool = True) -> Iterator[tuple[str, int]]:
    """Yield imported modules with their line. Without `lazy`, only what importing the file itself imports."""
    nodes = ast.walk(tree(path)) if lazy else _eager(tree(path).body)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (whole if _is_module(whole) else node.module), node.lineno


def _eager(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for node in body:
        if isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.dump(node.test):
                yield from _eager([*node.body, *node.orelse])
        elif isinstance(node, (ast.Try, ast.With)):
            yield from _eager(list(node.body))
        elif isinstance(node, ast.ClassDef):
            yield from _eager(node.body)
        else:
            yield node


def _is_module(name: str) -> bool:
    base = ROOT / Path(*name.split("."))
    return base.with_suffix(".py").is_file() or (base / "__init__.py").is_file()


def show(path: Path, line: int) -> str:
    """Return `file:line`, relative to the project."""
    return f"{path.relative_to(ROOT)}:{line}"
