"""One pass over a checkpoint's files in a process of its own, beside both sides. Knows processes; must not know limits.

No port can take it down, and it takes none down: it begins before the sides load, shares what the system keeps of the
files with them, and is waited for when the load stage is judged. What it learned of a file is kept in the user's cache
as soon as the file was read, so that a run that was broken off goes on, and an unchanged file is not read again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.child import child_environment
from harness.types import Failure, digest_of

Told = Callable[[str], None]
KEPT = 64
"""Checkpoints of which it is remembered what was read."""


class Reading:
    """A pass under way. `told` hears how far it is, `noted` what is worth a line."""

    def __init__(
        self,
        checkpoint: Path,
        folder: Path,
        *,
        manifest: Path | None = None,
        state: Path | None = None,
        again: bool = False,
        told: Told = lambda _: None,
        noted: Told = lambda _: None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._facts, self._log = folder / "facts.json", folder / "log.txt"
        self._facts.unlink(missing_ok=True)
        self._told, self._noted, self._last, self._error = told, noted, "nothing yet", ""
        self._alive, self._over = threading.Event(), threading.Event()
        words = {
            "checkpoint": str(checkpoint), "manifest": str(manifest) if manifest else None,
            "state": str(state) if state else None, "again": again, "out": str(self._facts),
        }  # fmt: skip
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness.checkpoint.scan"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
                env={**child_environment(), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
            )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.close()
        self._thread = threading.Thread(target=self._listen, name="reading", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            words: Mapping[str, Any] = json.loads(line)
            self._alive.set()
            self._error = str(words.get("error", ""))
            if "note" in words:
                self._noted(str(words["note"]))
            if "at" in words:
                self._last = str(words["at"])
                self._told(self._last)
        self._over.set()
        self._alive.set()

    def wait(self, run: str, silence_s: float) -> dict[str, Any] | Failure:
        """Return the facts, once they are there, or what became of the pass: `silence_s` without a word is a hang."""
        while not self._over.is_set():
            self._alive.clear()
            if not self._over.is_set() and not self._alive.wait(silence_s):
                self.close()
                return Failure(
                    run=run, kind="hang",
                    message=f"expected the files to be read on, found no sign of it for {silence_s:g} s (the last: "
                    f"{self._last}); look at the disk. What was read of whole files is kept for the next run",
                )  # fmt: skip
        code = self._process.wait()
        if code == 0 and self._facts.is_file():
            facts: dict[str, Any] = json.loads(self._facts.read_text())
            return facts
        if self._error:
            return Failure(run=run, kind="raised", message=self._error)
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
        kind = "memory" if code == -9 else "crash"
        message = f"expected the pass over the files to end, found exit code {code} (the last: {self._last})"
        return Failure(run=run, kind=kind, message=message, stack=tail)

    def close(self) -> None:
        """End it, if it is still under way; what it learned of whole files is kept."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._thread.join(timeout=10)


def state_file(checkpoint: Path, cache: Path) -> Path:
    """Return where it is kept what was learned of a checkpoint's files; the longest not seen are forgotten."""
    known = sorted(cache.glob("*.jsonl"), key=lambda path: path.stat().st_mtime) if cache.is_dir() else []
    for path in known[:-KEPT]:
        path.unlink(missing_ok=True)
    return cache / f"{checkpoint.name[:60]}-{digest_of(str(checkpoint.resolve()))[:16]}.jsonl"
