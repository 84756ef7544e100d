"""The watchdog of a worker process. Knows processes, timeouts and folders; must not know limits."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.child import child_environment
from harness.errors import SpecError, TraceError, user_frame
from harness.golden import LazyTensors, load_failure, load_trace, read_manifest, save_failure
from harness.types import Failure, Run, Setup, Trace, as_json

BEAT_BYTES = 512
_HINTS: dict[int, str] = {
    signal.SIGKILL: " (the system often kills a process this way when memory runs out)",
    signal.SIGBUS: " (a mapped file was cut short while it was read: is something writing to a shard or a golden?)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Watchdog:
    """How long each thing may take before it counts as hung, in seconds."""

    describe_s: float = 300.0
    load_s: float = 900.0
    run_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A run as a worker is asked for it. `pins`: the trace to replay; `expected`: that of the oracle's answer."""

    run: Run
    setup: Setup
    out: Path
    pins: Path | None = None
    pin_dtype: str = ""
    expected: Path | None = None

    def words(self) -> dict[str, Any]:
        """Return what a worker is told."""
        return {
            "run": as_json(self.run),
            "setup": as_json(self.setup),
            "out": str(self.out),
            "pins": str(self.pins) if self.pins else None,
            "pin_dtype": self.pin_dtype,
            "expected": str(self.expected) if self.expected else None,
        }


class Session:
    """One worker process. A hang, crash or exception of the port becomes a Failure; the next request starts afresh."""

    def __init__(
        self,
        folder: Path,
        *,
        spec: str,
        checkpoint: Path | None,
        python: str = sys.executable,
        watchdog: Watchdog = Watchdog(),
    ) -> None:
        self.folder, self.spec, self.checkpoint, self.python, self.watchdog = folder, spec, checkpoint, python, watchdog
        self._process: subprocess.Popen[str] | None = None
        self._opened: Setup | None = None
        self._refused: tuple[Setup, Failure] | None = None
        self.provenance: dict[str, str] = {}

    def describe(self, setup: Setup) -> dict[str, Any] | Failure:
        """Return the adapter's name, scope, capabilities and versions. Raises SpecError where it cannot be imported."""
        return self._ask(self._words("describe", setup), "describe", self.watchdog.describe_s)

    def open(self, setup: Setup) -> dict[str, Any] | Failure:
        """Load the adapter in a precision, once; another precision replaces it. Returns what loading observed."""
        if self._opened == setup and self.alive:
            return {}
        if self._refused is not None and self._refused[0] == setup:
            return self._refused[1]  # a port that could not be loaded is not loaded again for every run
        answer = self._ask(self._words("open", setup), "open", self.watchdog.load_s)
        self._opened = None if isinstance(answer, Failure) else setup
        self._refused = (setup, answer) if isinstance(answer, Failure) else None
        return answer

    def run(
        self,
        run: Run,
        setup: Setup,
        out: Path,
        *,
        pins: Path | None = None,
        pin_dtype: str = "",
        expected: Path | None = None,
    ) -> Failure | None:
        """Do one run; its trace, or its failure, then lies in `out`."""
        asked = Asked(run=run, setup=setup, out=out, pins=pins, pin_dtype=pin_dtype, expected=expected)
        failure = _unopened(run, self.open(setup))
        if failure is None:
            words = {"do": "run", **asked.words(), "provenance": self.provenance}
            loads = 3 * self.watchdog.load_s if run.kind == "conversion" else 0.0  # it loads twice, and reads all
            answer = self._ask(words, run.id, max(loads, self.watchdog.run_s))
            failure = answer if isinstance(answer, Failure) else None
        if failure is not None:
            save_failure(out, failure)
        return failure

    def run_together(self, asked: Sequence[Asked]) -> list[Failure | None]:
        """Do runs of a streamed side in one pass. What some of them leave stays, whatever becomes of the others."""
        for each in asked:
            shutil.rmtree(each.out, ignore_errors=True)
        opened = self.open(asked[0].setup)
        failures = [_unopened(each.run, opened) for each in asked]
        if not isinstance(opened, Failure):
            words = {"do": "together", "jobs": [each.words() for each in asked], "provenance": self.provenance}
            name = f"{asked[0].run.id} and {len(asked) - 1} more"
            answer = self._ask(words, name, self.watchdog.run_s * len(asked))
            failures = [self._of_pass(each.run, answer, number) for number, each in enumerate(asked)]
        for each, failure in zip(asked, failures, strict=True):
            if failure is not None and not (each.out / "manifest.json").is_file():
                save_failure(each.out, failure)
        return failures

    def _of_pass(self, run: Run, answer: dict[str, Any] | Failure, number: int) -> Failure | None:
        if isinstance(answer, Failure):
            return replace(answer, run=run.id)
        reply = answer["replies"][number]
        return None if reply["ok"] else self._failure(run.id, reply)

    @property
    def alive(self) -> bool:
        """Say whether the worker process runs."""
        return self._process is not None and self._process.poll() is None

    def hang_up(self) -> None:
        """Tell the worker that no request follows, without waiting for its end."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.close()

    def close(self) -> None:
        """End the worker."""
        self.hang_up()
        process, self._process, self._opened = self._process, None, None
        if process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        _kill(process)

    def _words(self, do: str, setup: Setup) -> dict[str, Any]:
        return {
            "do": do,
            "spec": self.spec,
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "setup": as_json(setup),
        }

    def _start(self) -> subprocess.Popen[str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        log = (self.folder / "log.txt").open("a")
        self._process = subprocess.Popen(
            [self.python, "-m", "harness.worker", str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=child_environment(),
            start_new_session=True,
        )
        log.close()
        self._opened = None
        return self._process

    def _ask(self, words: Mapping[str, Any], run: str, limit_s: float) -> dict[str, Any] | Failure:
        process = self._process if self.alive and self._process is not None else self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(words) + "\n")
            process.stdin.flush()
        except OSError:
            return self._dead(process, run)
        line = _read_line(process, limit_s)
        if line is None:
            return self._hung(process, run, limit_s)
        if not line:
            return self._dead(process, run)
        reply = json.loads(line)
        if reply["ok"]:
            return dict(reply["facts"])
        if reply["kind"] == "usage":
            raise SpecError(reply["message"])
        return self._failure(run, reply)

    def _failure(self, run: str, reply: Mapping[str, Any]) -> Failure:
        message = _with_place(reply["message"], reply["stack"])
        return Failure(run=run, kind=reply["kind"], message=message, last_tap=self._last_words(), stack=reply["stack"])

    def _hung(self, process: subprocess.Popen[str], run: str, limit_s: float) -> Failure:
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        failure = Failure(
            run=run, kind="hang", last_tap=self._last_words(), stack=self._stack(),
            message=_with_place(f"expected an answer within {limit_s:g} s, found none", self._stack())
            + "; the worker was stopped. If the port is only slow, raise [watchdog] run_s or load_s in day0.toml",
        )  # fmt: skip
        self._process = None
        _kill(process)
        return failure

    def _dead(self, process: subprocess.Popen[str], run: str) -> Failure:
        try:
            code = process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = 0
        _kill(process)
        self._process = None
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        kind = "memory" if code == -signal.SIGKILL else "crash"
        hint = _HINTS.get(-code, "")
        tail = "\n".join(self._log().splitlines()[-20:])
        return Failure(
            run=run,
            kind=kind,
            message=_with_place(f"the worker ended with {name}{hint}", self._stack()),
            last_tap=self._last_words(),
            stack=self._stack() or tail,
        )

    def _last_words(self) -> str:
        try:
            text = (self.folder / "beat").read_bytes()[:BEAT_BYTES].rstrip(b"\0").decode(errors="replace")
        except OSError:
            return ""
        return text.partition(" ")[2]

    def _stack(self) -> str:
        try:
            return (self.folder / "stack.txt").read_text(errors="replace")[-8000:]
        except OSError:
            return ""

    def _log(self) -> str:
        try:
            return (self.folder / "log.txt").read_text(errors="replace")[-8000:]
        except OSError:
            return ""


def close_all(sessions: Iterable[Session]) -> None:
    """End several workers, which put their things away at the same time."""
    ending = list(sessions)
    for session in ending:
        session.hang_up()
    for session in ending:
        session.close()


def _unopened(run: Run, opened: dict[str, Any] | Failure) -> Failure | None:
    """Return why a run could not be done: its side could not be opened."""
    if not isinstance(opened, Failure):
        return None
    return replace(opened, run=run.id, message=f"the port could not be opened: {opened.message}")


def _with_place(message: str, stack: str) -> str:
    """Add to a message where in the port's own code it was, if a stack shows it."""
    place = user_frame(stack)
    return f"{message} (at {place})" if place and place not in message else message


def _read_line(process: subprocess.Popen[str], limit_s: float) -> str | None:
    """Return the next reply, an empty string if the process ended, or None after `limit_s` seconds."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(timeout=limit_s):
            return None
    return process.stdout.readline()


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError, ValueError):
            if pipe is not None:
                pipe.close()


def read_trace(folder: Path, run: str) -> Trace | Failure | None:
    """Return what lies in `folder`: a trace, a failure (also for a corrupt trace), or None."""
    if not folder.is_dir():
        return None
    try:
        return load_failure(folder) or load_trace(folder)
    except TraceError as error:
        return Failure(run=run, kind="refused", message=str(error))


def reopened(trace: Trace) -> Trace:
    """Return a trace as if it had just been read: of what was asked of it nothing is kept."""
    tensors = trace.tensors
    return replace(trace, tensors=tensors.reopened()) if isinstance(tensors, LazyTensors) else trace


def refuse(folder: Path, failure: Failure) -> None:
    """Keep a failure in place of a trace."""
    save_failure(folder, failure)


def is_current(folder: Path, run: Run, setup: Setup) -> bool:
    """Say whether `folder` already holds exactly this run in this setup. Raises TraceError for an unreadable golden."""
    if not (folder / "manifest.json").is_file():
        return False
    manifest = read_manifest(folder)
    return bool(manifest["run"] == as_json(run) and manifest["setup"] == as_json(setup))
