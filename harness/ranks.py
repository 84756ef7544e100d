"""One rank of a real world: runs collectives and every layout in turn, writes a trace per run. Started by `world.py`.

    python -m torch.distributed.run --nproc-per-node N --standalone -m harness.ranks JOB.json

Knows torch.distributed, the adapter protocol and this rank's share of the runs; must not know limits, nor how a world
is watched. Like the worker it needs only torch, safetensors, numpy and the standard library.
"""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import json
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

BEAT_BYTES = 512


def main(argv: Sequence[str]) -> int:
    """Do this rank's runs of a job. Returns 1 after the first run that failed: the others cannot go on without it."""
    job = json.loads(Path(argv[1]).read_text())
    rank = int(os.environ["RANK"])
    folder = Path(job["folder"]) / f"rank{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stack = (folder / "stack.txt").open("w")
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
    place = Place(job, rank, _beat(folder / "beat"))
    code = place.run_all()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a process group whose peers are gone may never finish an orderly exit


def _beat(path: Path) -> Callable[[str], None]:
    """Return a function that leaves a time, a count and a few words where another process can read them."""
    path.write_bytes(b"\0" * BEAT_BYTES)
    with path.open("r+b") as file:
        board = mmap.mmap(file.fileno(), BEAT_BYTES)
    count = 0

    def beat(words: str) -> None:
        nonlocal count
        count += 1
        board[:] = f"{time.time():.3f} {count} {words}".encode()[:BEAT_BYTES].ljust(BEAT_BYTES, b"\0")

    return beat


class Place:
    """This process's place in the world, and what it has to do there."""

    def __init__(self, job: Mapping[str, Any], rank: int, beat: Callable[[str], None]) -> None:
        from harness.types import Run, Setup, from_json

        self.job, self.rank, self.beat = job, rank, beat
        self.setup = from_json(Setup, job["setup"])
        self.items = [(from_json(Run, item["run"]), item) for item in job["runs"]]
        self.current: list[Any] = []

    def run_all(self) -> int:
        """Do the collectives, then each layout; whatever the port raises becomes this rank's failure.

        The port is made once before anything else: a vendor's code may bring the backend that the collectives run on.
        """
        try:
            self._open(self.setup).close()
            self._join()
            for layout in _in_order(run.layout for run, _ in self.items if run.kind == "collectives"):
                self._collectives(layout)
            for layout in _in_order(run.layout for run, _ in self.items if run.kind == "ranks"):
                self._layout(layout)
        except Exception as error:  # the side under test may raise anything; it becomes ERROR evidence
            self._fail(error)
            return 1
        return 0

    def _open(self, setup: Any) -> Any:
        """Make the port, without weights."""
        from harness.plugins import open_adapter, parse_spec

        self.beat(f"{setup.layout}: opening {self.job['spec']}")
        return open_adapter(parse_spec(self.job["spec"]), Path(self.job["checkpoint"]), setup)

    def _join(self) -> None:
        """Join the process group, on this rank's device."""
        import torch
        import torch.distributed as dist

        self.beat("joining the process group")
        kind = self.setup.device.partition(":")[0]
        local, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
        if kind != "cpu":
            accelerator: Any = getattr(torch, "accelerator", None)
            if accelerator is not None and accelerator.is_available():
                accelerator.set_device_index(local)
            self.setup = dataclasses.replace(self.setup, device=f"{kind}:{local}")
        torch.set_num_threads(max(1, self.setup.threads // world))
        limit = datetime.timedelta(seconds=2 * float(self.job["timeout_s"]))  # the watchdog comes first
        dist.init_process_group(self.setup.options.get("backend") or backend_for(kind), timeout=limit)

    def _mine(self, kind: str, layout: Any) -> list[tuple[Any, Mapping[str, Any]]]:
        found = [(r, i) for r, i in self.items if r.kind == kind and r.layout == layout]
        return [(r, i) for r, i in found if int(r.options["rank"]) == self.rank]

    def _collectives(self, layout: Any) -> None:
        from harness import exercise
        from harness.golden import save_trace
        from harness.types import Trace

        self.current = self._mine("collectives", layout)
        self.beat("collectives")
        kind = self.setup.device.partition(":")[0]
        facts = exercise.collectives(self.setup.device if _own_backend(kind) else "cpu", self.beat)
        for run, item in self.current:
            save_trace(Path(item["out"]), Trace(setup=self.setup, run=run, taps={}, tensors={}, facts=facts))
        self.current = []

    def _layout(self, layout: Any) -> None:
        """Open the port anew in a layout and do this rank's runs of it; a rank outside the layout only joins in."""
        import torch.distributed as dist

        from harness.errors import PortError
        from harness.runs import Bench, opened

        self.current = self._mine("ranks", layout)
        setup = dataclasses.replace(self.setup, layout=layout)
        checkpoint = Path(self.job["checkpoint"])
        adapter = self._open(setup)
        if not hasattr(adapter, "distribute"):
            raise PortError(f"{adapter.name} claims the layout {layout}, but has no method distribute(layout)")
        self.beat(f"{layout}: taking its place")
        adapter.distribute(layout)
        if self.rank < layout.world_size:
            self.beat(f"{layout}: loading weights")
            facts = opened(adapter, checkpoint, setup)
            bench = Bench(adapter=adapter, setup=setup, checkpoint=checkpoint, load_facts=facts, beat=self.beat)
            for run, item in list(self.current):
                self._run(bench, run, item)
                self.current.remove((run, item))
        adapter.close()
        self.beat(f"{layout}: waiting for the other ranks")
        dist.barrier()

    def _run(self, bench: Any, run: Any, item: Mapping[str, Any]) -> None:
        """Do one forward as this rank sees it; a free run also generates, so that the ranks' tokens can be compared."""
        from harness.adapter import silent
        from harness.golden import save_trace
        from harness.runs import execute

        self.beat(f"{run.id} starting")
        forward = dataclasses.replace(run, kind="forward")
        trace = execute(bench, forward, pins=_pins(run, item), expected=None)
        facts = dict(trace.facts)
        count = int(run.options.get("new_tokens", 0))
        if count and not run.level:
            self.beat(f"{run.id} generating")
            inputs = bench.adapter.prepare(run.case, silent)
            facts["token_ids"] = [int(i) for i in bench.adapter.generate(inputs, count, silent)]
        save_trace(Path(item["out"]), dataclasses.replace(trace, run=run, facts=facts))

    def _fail(self, error: Exception) -> None:
        """Write what happened as the failure of the run at hand, and of those of this rank that it prevents."""
        from harness.golden import save_failure
        from harness.types import Failure

        words = (Path(self.job["folder"]) / f"rank{self.rank}" / "beat").read_bytes()
        told = words.rstrip(b"\0").decode(errors="replace").split(" ", 2)
        for run, item in self.current:
            failure = Failure(
                run=run.id,
                kind="memory" if type(error).__name__ == "OutOfMemoryError" else "raised",
                message=f"rank {self.rank} of layout {run.layout}: {type(error).__name__}: {error}",
                last_tap=told[-1],
                stack=traceback.format_exc(),
            )
            save_failure(Path(item["out"]), failure)
        print(traceback.format_exc(), file=sys.stderr)


def _pins(run: Any, item: Mapping[str, Any]) -> Any:
    """Return what a replayed run overwrites, or None."""
    import torch

    from harness.golden import load_trace
    from harness.recorder import Pins

    if not run.level or not item.get("pins"):
        return None
    source: Any = load_trace(Path(item["pins"]))
    return Pins(
        tensors=source.tensors.cached(),
        taps=source.taps,
        level=run.level,
        dtype=getattr(torch, item["pin_dtype"]),
        decisions=run.pin_decisions,
    )


def backend_for(device: str) -> str:
    """Return the process group backend of a device type (`cpu`, `cuda`, ...); gloo for one that has none of its own."""
    return _own_backend(device) or "gloo"


def _own_backend(device: str) -> str:
    """Return the backend that moves what lies on a device, "" where what is to be moved must come to the host."""
    import torch.distributed as dist

    chosen: Any = getattr(dist, "get_default_backend_for_device", None)
    if chosen is None:
        return {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "npu": "hccl", "hpu": "hccl"}.get(device, "")
    try:
        return str(chosen(device))
    except ValueError:
        return ""


def _in_order(values: Any) -> list[Any]:
    """Return each value once, in order of first appearance."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv))
