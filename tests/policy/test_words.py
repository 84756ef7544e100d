"""Names, words and habits that the whole tree keeps."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from source_tree import ROOT, modules, show, texts, tree

BROAD = {
    "harness/cli.py": "the last resort: an exit code instead of a bare traceback",
    "harness/worker.py": "the side under test may raise anything",
    "harness/ops/judge.py": "the operator under test may raise anything",
    "harness/ops/facts.py": "the side under test may raise anything",
    "harness/ranks.py": "the side under test may raise anything",
    "harness/plugins.py": "the side under test may raise anything when it is imported",
    "harness/devices.py": "a plug-in of a device may raise anything",
    "harness/faults/lab.py": "the side under test may raise anything",
    "harness/faults/disk/second.py": "another loader may raise anything",
    "harness/campaign.py": "around a stage's measure function",
    "harness/adapters/images.py": "the side under test refuses a layout in its own way",
    "harness/adapters/text.py": "the tokenizers library raises bare Exception",
    "harness/adapters/server.py": "ends the server that it started, then raises again",
    "reference_impl/tokenizer.py": "the tokenizers library raises bare Exception",
    "accel_impl/parallel.py": "carried from a rank's thread to its caller",
    "accel_impl/engine.py": "carried from the thread of steps to the request's own",
}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}


def public(body: list[ast.stmt]) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [n for n in body if isinstance(n, kinds) and not n.name.startswith("_")]


def undocumented(path: Path) -> list[str]:
    """Return the public names of a file that say nothing of themselves."""
    found = [] if ast.get_docstring(tree(path)) else [show(path, 1)]
    for node in public(tree(path).body):
        inner = public(node.body) if isinstance(node, ast.ClassDef) else []
        for each in (node, *inner):
            if not ast.get_docstring(each):
                found.append(f"{show(path, each.lineno)} {each.name}")
    return found


def test_public_names_say_what_they_do():
    """Every module and every public class, function and method has a docstring."""
    assert [line for path in modules() for line in undocumented(path)] == []


def test_tests_say_what_is_true():
    """Every test's docstring is the sentence that is true when it passes."""
    silent = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node):
                silent.append(f"{show(path, node.lineno)} {node.name}")
    assert silent == []


def broad_handlers(path: Path) -> list[str]:
    """Return where a file catches everything."""
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            names = [n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)] if node.type is not None else [""]
            if {"", "Exception", "BaseException"} & set(names):
                found.append(show(path, node.lineno))
    return found


def test_only_named_places_catch_everything():
    """Everything is caught only where the reason is written in the table, and every row of the table is in use."""
    found = {str(p.relative_to(ROOT)): broad_handlers(p) for p in modules()}
    assert [line for name, lines in found.items() if name not in BROAD for line in lines] == []
    assert [name for name in BROAD if not found.get(name)] == []


def test_nothing_is_left_for_later():
    """No file holds a note to come back to."""
    marks = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")
    assert [
        show(p, i) for p in texts() for i, line in enumerate(p.read_text().splitlines(), 1) if marks.search(line)
    ] == []


def test_no_path_of_one_machine():
    """No file names a path that exists on one person's machine only."""
    homes = re.compile(r"(?<![\w.~}/])/(?:home|Users|root|tmp|mnt|work)/\w")
    assert [
        show(p, i) for p in texts() for i, line in enumerate(p.read_text().splitlines(), 1) if homes.search(line)
    ] == []


def test_no_environment_variable_reaches_a_verdict():
    """Nothing between traces and verdicts reads the environment."""
    rooms = ("gate.py", "checklist.py", "compare", "metrics", "stages", "diagnose", "types.py", "taps.py")
    judged = [p for p in modules("harness") if p.relative_to(ROOT / "harness").parts[0] in rooms]
    wrong = [
        show(path, node.lineno)
        for path in judged
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.Attribute, ast.Name))
        and getattr(node, "attr", getattr(node, "id", "")) in ("environ", "getenv")
    ]
    assert len(judged) > 10
    assert wrong == []


def test_hostile_files_cannot_run_code():
    """harness/ never evaluates text and never unpickles."""
    wrong = []
    for path in modules("harness"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
                wrong.append(f"{show(path, node.lineno)} {node.func.id}")
            if isinstance(node, ast.Attribute) and ast.unparse(node) in (
                "torch.load",
                "pickle.load",
                "pickle.loads",
                "yaml.load",
            ):
                wrong.append(f"{show(path, node.lineno)} {ast.unparse(node)}")
            if isinstance(node, ast.Import) and any(
                a.name in ("pickle", "marshal", "shelve", "dill") for a in node.names
            ):
                wrong.append(f"{show(path, node.lineno)} imports {node.names[0].name}")
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("try:\n    f()\nexcept (ValueError, Exception):\n    pass\n", 1),
        ("try:\n    f()\nexcept OSError:\n    pass\n", 0),
    ],
)
def test_the_scan_sees_a_broad_handler(tmp_path, monkeypatch, text, expected):
    """The scan finds a broad handler inside a tuple, and leaves a narrow one alone."""
    monkeypatch.setattr("source_tree.ROOT", tmp_path)
    file = tmp_path / "sample.py"
    file.write_text(text)
    assert len(broad_handlers(file)) == expected


def test_every_file_of_tests_has_a_name_of_its_own() -> None:
    """Two modules of one name cannot be collected by one process."""
    names = [path.name for path in sorted((ROOT / "tests").rglob("*.py")) if path.name != "conftest.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []
