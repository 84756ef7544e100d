"""Several architectures at once, each proved by a process of its own. Knows the command line and rows; no models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.errors import Day0Error
from harness.faults.bench import Row
from harness.types import from_json

MOST = 4
"""Processes at once unless asked otherwise: each holds the traces of a whole architecture, about 1 GB."""


def jobs_at_once(asked: int, architectures: int) -> int:
    """Return how many processes to use: as asked for, or as there are processors, at most one per architecture."""
    return max(1, min(asked or min(os.cpu_count() or 1, MOST), architectures))


def rows_of(
    names: Sequence[str], words: Sequence[str], *, at_once: int, scratch: Path, say: Callable[[str], None]
) -> list[Row]:
    """Prove each architecture in a process of its own and return all rows, in the order of the names.

    `words` are the further words of the command. Raises Day0Error for a process that ends otherwise than it should.
    """

    def one(name: str) -> list[Row]:
        file = scratch / f"{name}.json"
        command = [sys.executable, "-m", "harness.cli", "prove", "--architecture", name, "--jobs", "1"]
        with subprocess.Popen(
            [*command, *words, "--json", str(file)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            told = []
            for text in process.stderr:
                told.append(text.rstrip())
                say(text.rstrip())
        if process.returncode not in (0, 1) or not file.is_file():
            raise Day0Error(
                f"{name}: expected a score, found an end with {process.returncode}: {' | '.join(told[-5:])}"
            )
        return [from_json(Row, row) for row in json.loads(file.read_text())["rows"]]

    with ThreadPoolExecutor(at_once) as pool:
        return [row for rows in pool.map(one, names) for row in rows]
