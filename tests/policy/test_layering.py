"""Imports go downward only."""

from __future__ import annotations

from source_tree import ROOT, dotted, imports, modules, show

ROWS = (
    {"cli"},
    {"offline"},
    {"pipeline"},
    {"campaign", "faults"},
    {"evidence", "passes", "portion", "standin"},
    {"plan"},
    {"config", "report", "scaffold", "doctor", "schedule"},
    {"configfile"},
    {"stages", "diagnose"},
    {"worker", "world"},
    {"record", "ranks", "reading"},
    {"runs"},
    {"conversion", "exercise", "phases", "search", "served", "ops", "shadow"},
    {"compare", "gate", "checklist", "plugins", "unreleased"},
    {"adapters"},
    {"golden"},
    {"checkpoint", "metrics", "cases", "mapping"},
    {"recorder"},
    {"adapter", "composed", "devices", "statistics", "precision"},
    {"taps"},
    {"types", "errors", "dropin", "child"},
)
"""Rooms of harness/, the top row first. A room imports from rows below its own, and from itself."""

STAGES_MUST_NOT = {"gate", "checklist", "golden"}
PORTS_MAY = {"types", "errors", "adapter", "taps"}


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def test_every_module_has_its_row():
    """Every module of harness/ stands in the table of rows."""
    known = set().union(*ROWS)
    rooms = {p.relative_to(ROOT / "harness").parts[0].removesuffix(".py") for p in modules("harness")} - {"__init__"}
    assert rooms - known == set(), "give a new room its row here and in harness/README.md"


def test_imports_go_downward_only():
    """No module of harness/ imports from its own row (its own folder apart) or from above, not even lazily."""
    rank = {name: number for number, row in enumerate(ROWS) for name in row}
    wrong = []
    for path in modules("harness"):
        own = room(dotted(path))
        for name, line in imports(path):
            other = room(name)
            if name.startswith("harness.") and other != own and own and rank[other] <= rank[own]:
                wrong.append(f"{show(path, line)} ({own}) imports {other}")
    assert wrong == []


def test_stages_cannot_see_a_limit():
    """Stages import neither gate nor checklist nor golden, so that they cannot pass themselves."""
    wrong = [
        f"{show(path, line)} imports {name}"
        for path in modules("harness")
        if room(dotted(path)) == "stages"
        for name, line in imports(path)
        if room(name) in STAGES_MUST_NOT
    ]
    assert wrong == []


def test_the_built_in_pair_is_like_any_port():
    """The pair imports only what a port may, never each other, and harness imports neither by name."""
    wrong = []
    for package, other in (("reference_impl", "accel_impl"), ("accel_impl", "reference_impl")):
        for path in modules(package):
            for name, line in imports(path):
                foreign = name.split(".")[0] == other
                if foreign or (name.split(".")[0] == "harness" and room(name) not in PORTS_MAY):
                    wrong.append(f"{show(path, line)} imports {name}")
    for path in modules("harness"):
        wrong += [
            f"{show(path, line)} imports {name}"
            for name, line in imports(path)
            if name.split(".")[0] in ("reference_impl", "accel_impl")
        ]
    assert wrong == []


def test_the_walk_sees_an_upward_import(tmp_path, monkeypatch):
    """The walk reads what it must: a lazy import inside a function, and a submodule imported from its package."""
    file = tmp_path / "sample.py"
    file.write_text("def f():\n    from harness import gate\n    import harness.report.words\n")
    assert {name for name, _ in imports(file)} == {"harness.gate", "harness.report.words"}
    assert list(imports(file, lazy=False)) == []
