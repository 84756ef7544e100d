"""The watchdog of a world of ranks: starts torchrun, waits, turns a hang or a crash into failures that name the rank.

Knows processes, folders and runs; must not know limits, nor what a rank computes. One world serves all layouts; where
one layout fails, the world is started again for those that are left.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.child import child_environment
from harness.golden import load_failure, save_failure
from harness.record import read_trace
from harness.types import Failure, Run, Setup, Trace, as_json

STARTUP_S = 180.0
"""Seconds that importing and rendezvous of all ranks may take before the first sign of life."""
_POLL_S = 0.1
_PEER_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|peer (closed|gone)|remote process|RemoteError|DistNetworkError"
    r"|connection (was )?(closed|lost|refused)|unhandled system error",
    re.IGNORECASE,
)
"""What process groups say when another rank is gone: a consequence, not a cause."""

_IN_COLLECTIVE = "distributed_c10d.py"
"""What the stack of a rank holds that waits for other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """One run of one rank (`run.options["rank"]`), where its trace goes, and the trace that it replays."""

    run: Run
    out: Path
    pins: Path | None = None
    pin_dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beat:
    rank: int
    at_s: float
    count: int
    words: str


def run_ranks(
    jobs: Sequence[RankJob],
    *,
    folder: Path,
    spec: str,
    checkpoint: Path,
    setup: Setup,
    timeout_s: float,
    startup_s: float = STARTUP_S,
    python: str = sys.executable,
) -> dict[str, Trace | Failure]:
    """Run `collectives` and `ranks` runs in one world as large as the largest layout; return what each run left.

    Traces and failures lie in each job's `out`. `timeout_s` is how long the whole world may show no sign of life.
    """
    results: dict[str, Trace | Failure] = {}
    pending = list(jobs)
    attempt = 0
    while pending:
        attempt += 1
        world = _World(folder / f"world{attempt}", pending, spec, checkpoint, setup, python)
        ended = world.run(timeout_s, startup_s)
        world.clear_peers()
        left = [j for j in pending if not _finished(j)]
        lost = [j for j in pending if load_failure(j.out) is not None or j in left]
        if lost:
            first = lost[0]
            # wrong or broken collectives leave nothing to stand on; a layout that failed says nothing of the next
            fatal = first.run.kind == "collectives" or world.never_lived
            gone = [j for j in left if fatal or (j.run.kind, j.run.layout) == (first.run.kind, first.run.layout)]
            for job in gone:
                save_failure(job.out, world.failure(job, ended))
            left = [j for j in left if j not in gone]
        pending = left
    for job in jobs:
        found = read_trace(job.out, job.run.id)
        results[job.run.id] = found or Failure(run=job.run.id, kind="crash", message="the rank left nothing behind")
    return results


def _finished(job: RankJob) -> bool:
    return (job.out / "manifest.json").is_file() or (job.out / "failure.json").is_file()


class _World:
    """One start of torchrun."""

    def __init__(
        self, folder: Path, jobs: Sequence[RankJob], spec: str, checkpoint: Path, setup: Setup, python: str
    ) -> None:
        self.folder, self.jobs, self.setup, self.python = folder, jobs, setup, python
        self.size = max(2, *(job.run.layout.world_size for job in jobs), *(_rank(job) + 1 for job in jobs))
        self.spec, self.checkpoint = spec, checkpoint
        self.beats: list[_Beat] = []
        self.stacks: dict[int, str] = {}

    @property
    def never_lived(self) -> bool:
        """Say whether some rank never gave a sign of life: then no layout is to blame."""
        return len(self.beats) < self.size

    def run(self, timeout_s: float, startup_s: float) -> str:
        """Start the world and wait for its end. Returns the reason of an early end, or an empty string."""
        for job in self.jobs:
            _clear(job.out)
        process = self._start(timeout_s)
        begin = changed = time.monotonic()
        seen: list[_Beat] = []
        reason = ""
        while process.poll() is None:
            time.sleep(_POLL_S)
            beats, now = self._read_beats(), time.monotonic()
            if beats != seen:
                seen, changed = beats, now
            limit = timeout_s if len(beats) == self.size else max(startup_s, timeout_s)
            if now - max(begin, changed) > limit:
                reason = f"no rank gave a sign of life for {limit:g} s"
                self._dump_stacks(process.pid)
                break
        _kill(process)
        self.beats = self._read_beats()
        self.stacks = {r: self._text(r, "stack.txt") for r in range(self.size)}
        return reason

    def failure(self, job: RankJob, reason: str) -> Failure:
        """Return why a run was not finished: a hang with who is behind, or a crash with who crashed."""
        rank = _rank(job)
        mine = next((b for b in self.beats if b.rank == rank), None)
        told = {"run": job.run.id, "last_tap": mine.words if mine else ""}
        name = f"rank {rank} of layout {job.run.layout}"
        if reason:
            message = f"{name}: {reason}; {self._who_is_behind()}. The world was stopped"
            if self.beats and not self.never_lived and self._by_progress()[0].rank != rank:
                told["last_tap"] = ""  # it waits for the one behind, whose place is the one to look at
                message = f"{name} waits at {self._at(rank)}; {message.partition(': ')[2]}"
            return Failure(kind="hang", message=message, stack=self.stacks.get(rank, ""), **told)
        code = self._culprits().get(rank)
        raised = {_rank(j) for j in self.jobs if load_failure(j.out) is not None}
        blame = self._blame({rank}, raised - {rank})
        if blame and (code is None or code == 1):
            told["last_tap"] = ""  # where a victim was says nothing; where the culprit was is in the words
            return Failure(kind="refused", message=f"{name} was stopped because {blame}", **told)
        words = f"ended with {_code_name(code)}" if code is not None else "ended without a result"
        stack = self.stacks.get(rank, "") or _last_lines(self._text(rank, "log.txt")) or _last_lines(self._log())
        return Failure(
            kind="memory" if code == -signal.SIGKILL else "crash", message=f"{name} {words}", stack=stack, **told
        )

    def clear_peers(self) -> None:
        """Take the blame from ranks that raised only because a peer was gone, and put it where it belongs."""
        raised: dict[int, list[tuple[RankJob, Failure]]] = {}
        for job in self.jobs:
            failure = load_failure(job.out)
            if failure is not None:
                raised.setdefault(_rank(job), []).append((job, failure))
        victims = {r for r, found in raised.items() if all(_PEER_GONE.search(f.message) for _, f in found)}
        blame = self._blame(victims, set(raised))
        if not blame:
            return
        for rank in victims:
            for job, failure in raised[rank]:
                name = f"rank {rank} of layout {job.run.layout}"
                message = f"{name} was stopped because {blame}; its own words: {failure.message}"
                save_failure(job.out, replace(failure, kind="refused", message=message, last_tap=""))

    def _blame(self, victims: set[int], raised: set[int]) -> str:
        """Say which ranks ended by themselves, victims left out."""
        ends = {r: _code_name(c) for r, c in self._culprits().items() if r not in victims}
        words = [f"rank {r} ended with {name} at {self._at(r)}" for r, name in ends.items() if r not in raised]
        words += [f"rank {r} raised at {self._at(r)}" for r in sorted(raised - victims)]
        return ", ".join(words)

    def _start(self, timeout_s: float) -> subprocess.Popen[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        job: dict[str, Any] = {
            "spec": self.spec,
            "checkpoint": str(self.checkpoint),
            "setup": as_json(self.setup),
            "folder": str(self.folder),
            "timeout_s": timeout_s,
            "runs": [
                {
                    "run": as_json(j.run),
                    "out": str(j.out),
                    "pins": str(j.pins) if j.pins else None,
                    "pin_dtype": j.pin_dtype,
                }
                for j in self.jobs
            ],
        }
        path = self.folder / "job.json"
        path.write_text(json.dumps(job))
        words = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        words += ["--nproc-per-node", str(self.size), "-m", "harness.ranks", str(path)]
        threads = str(max(1, self.setup.threads // self.size))
        environment = {**child_environment(), "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        with (self.folder / "log.txt").open("wb") as log:
            return subprocess.Popen(
                [self.python, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def _read_beats(self) -> list[_Beat]:
        found = []
        for rank in range(self.size):
            words = self._text(rank, "beat").rstrip("\0").split(" ", 2)
            if len(words) == 3:
                found.append(_Beat(rank=rank, at_s=float(words[0]), count=int(words[1]), words=words[2]))
        return found

    def _text(self, rank: int, name: str) -> str:
        try:
            return (self.folder / f"rank{rank}" / name).read_text(errors="replace")[-8000:]
        except OSError:
            return ""

    def _log(self) -> str:
        try:
            return (self.folder / "log.txt").read_text(errors="replace")
        except OSError:
            return ""

    def _dump_stacks(self, parent: int) -> None:
        """Ask every rank where it is; the answer lies in its stack.txt."""
        for pid in _children(parent):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)

    def _at(self, rank: int) -> str:
        return next((f"{b.words!r}" for b in self.beats if b.rank == rank), "its start")

    def _who_is_behind(self) -> str:
        if self.never_lived:
            silent = sorted(set(range(self.size)) - {b.rank for b in self.beats})
            return f"rank {', '.join(map(str, silent))} never started"
        order = self._by_progress()
        return "furthest behind is " + ", then ".join(f"rank {b.rank}, last seen at {b.words!r}" for b in order)

    def _by_progress(self) -> list[_Beat]:
        """Order the ranks, the one that holds up the others first: not itself waiting in a collective, least done."""
        waits = {rank for rank, stack in self.stacks.items() if _IN_COLLECTIVE in stack}
        return sorted(self.beats, key=lambda b: (b.rank in waits, b.count, b.at_s))

    def _culprits(self) -> dict[int, int]:
        """Return the ranks that ended by themselves, with their exit codes, from torchrun's closing summary."""
        found = re.findall(r"rank\s*:\s*(\d+) \(local_rank.*?exitcode\s*:\s*(-?\d+)", self._log(), flags=re.DOTALL)
        return {int(r): int(c) for r, c in found if int(c) != -signal.SIGTERM}


def _rank(job: RankJob) -> int:
    return int(job.run.options["rank"])


def _last_lines(text: str, count: int = 20) -> str:
    return "\n".join(text.splitlines()[-count:])


def _clear(out: Path) -> None:
    for name in ("manifest.json", "failure.json"):
        with contextlib.suppress(FileNotFoundError):
            (out / name).unlink()


def _children(parent: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []


def _code_name(code: int) -> str:
    try:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        return f"exit code {code}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    for pid in _children(process.pid):  # torchrun's ranks lead sessions of their own
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
