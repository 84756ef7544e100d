"""The commands that the documents show exist as they are written."""

from __future__ import annotations

import re
import shlex

import pytest
from source_tree import ROOT, texts

from harness.cli import app

COMMAND = re.compile(r"""(?:^|&& |\$ |run: )\s*day0 ((?:"[^"]*"|'[^']*'|[^#|&;>"'])+)""")
DOCUMENTS = [p for p in texts() if p.suffix == ".md"]


def options_of() -> dict[str, set[str]]:
    """Return the options of each command."""
    import typer.main

    group = typer.main.get_command(app)
    table = {}
    for name, command in group.commands.items():
        table[name] = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}
    return table


def command_lines(text: str) -> list[str]:
    """Return what follows `day0 ` in code blocks and code spans, one command each; continued lines are one."""
    spans = re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.S)
    lines = [line for span in spans for line in re.sub(r"\\\n", " ", span).strip("`").splitlines()]
    return [m.group(1) for line in lines for m in COMMAND.finditer(line)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_documented_commands_exist(path):
    """Every `day0 ...` in a document names a command and options that exist."""
    table, wrong = options_of(), []
    for line in command_lines(path.read_text()):
        words = shlex.split(line.replace("...", "").replace("[", "").replace("]", ""), posix=False)
        if not words or words[0].startswith(("-", "<")):
            continue
        if words[0] not in table:
            wrong.append(f"no command: day0 {line}")
            continue
        wrong += [
            f"no option {w}: day0 {line}"
            for w in words[1:]
            if w.startswith("--") and w.split("=")[0] not in table[words[0]]
        ]
    assert wrong == []


def test_the_readers_of_commands_see_them():
    """The reader finds commands in blocks and spans and drops comments."""
    text = "Run `day0 doctor`.\n```\npip install . && day0 verify --accel 'a?b=c&d=e'  # quick\n```\n"
    assert [c.strip() for c in command_lines(text)] == ["doctor", "verify --accel 'a?b=c&d=e'"]


def test_only_finished_commands_are_offered():
    """The command line offers what is built, and nothing that is a promise."""
    built = {"verify", "record", "compare", "inspect", "cut", "diagnose", "report", "prove", "init", "doctor"}
    assert set(options_of()) == built
