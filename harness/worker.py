"""One side in its own process: reads requests as JSON lines, runs the port, writes traces. Knows nothing of limits.

    python -m harness.worker SESSION_DIR

Needs torch, safetensors, numpy and the standard library only, so it runs in a vendor's environment. What the port
prints goes to the log; replies go to a private copy of standard output. The place it is at lies in SESSION_DIR/beat,
stacks of a hang or a crash in SESSION_DIR/stack.txt, where the watchdog reads them.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

BEAT_BYTES = 512


def main(argv: list[str]) -> int:
    """Serve one session until its requests end."""
    folder = Path(argv[1])
    stack = (folder / "stack.txt").open("w")
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side = Side(_beat(folder / "beat"), folder)
    for line in sys.stdin:
        request = json.loads(line)
        reply = side.answer(request)
        print(json.dumps(reply), file=replies, flush=True)
    side.close()
    return 0


def _beat(path: Path) -> Callable[[str], None]:
    """Return a function that leaves a few words where another process can read them, even after a crash."""
    path.write_bytes(b"\0" * BEAT_BYTES)
    with path.open("r+b") as file:
        board = mmap.mmap(file.fileno(), BEAT_BYTES)

    def beat(words: str) -> None:
        board[:] = f"{time.time():.3f} {words}".encode()[:BEAT_BYTES].ljust(BEAT_BYTES, b"\0")

    return beat


class Side:
    """The adapter of this process, if one is open."""

    def __init__(self, beat: Callable[[str], None], folder: Path = Path()) -> None:
        self.beat, self.folder = beat, folder
        self.adapter: Any = None
        self.bench: Any = None
        self.benches: list[Any] = []
        self.tokens = 1

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a request asks and return the reply; whatever the port raises becomes part of the reply."""
        actions: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "describe": self.describe, "open": self.open, "run": self.run, "together": self.together,
            "close": lambda _: self.close(),
        }  # fmt: skip
        try:
            return {"ok": True, "facts": actions[request["do"]](request)}
        except Exception as error:  # the side under test may raise anything; it becomes ERROR evidence
            reply = _refusal(error)
            return {**reply, "message": reply["message"] + self._planned()} if reply["kind"] == "memory" else reply

    def _planned(self) -> str:
        """Return the plan of memory in words, to stand beside the word that it ran out."""
        from harness.checkpoint import needed_words, open_checkpoint
        from harness.errors import CheckpointError

        checkpoint = getattr(self, "created", {}).get("checkpoint")
        if not checkpoint:
            return ""
        try:
            words = needed_words(open_checkpoint(Path(checkpoint)), self.setup.dtype, self.tokens)
        except CheckpointError:
            return ""
        own = getattr(self.bench, "load_facts", {})
        told = {
            "planned_bytes": "the port's own plan of its load",
            "window_bytes": "a window that weights pass through",
        }
        more = "".join(f"; {what}: {own[key]} bytes" for key, what in told.items() if own.get(key))
        return f"; {words}{more} (day0 inspect {checkpoint} --card-gib N plans other cards and layouts)"

    def describe(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Open the adapter without loading weights, and say what it claims."""
        from harness.adapter import capabilities
        from harness.types import as_json

        self._create(request)
        return {
            "name": self.adapter.name,
            "scope": as_json(self.adapter.scope),
            "capabilities": [*capabilities(self.adapter), *device_words(self.setup.device)],
            "cases": as_json(getattr(self.adapter, "cases", ())),
            **versions(),
        }

    def _create(self, request: Mapping[str, Any]) -> None:
        from harness.plugins import open_adapter, parse_spec
        from harness.types import Setup, from_json

        setup = from_json(Setup, request["setup"])
        if self.adapter is not None and self.created == request:
            return
        self.close()
        import torch

        torch.set_num_threads(setup.threads)
        if setup.device == "cpu":  # there a kernel in Triton runs interpreted, or not at all
            os.environ.setdefault("TRITON_INTERPRET", "1")
        self.beat(f"opening {request['spec']}")
        checkpoint = Path(request["checkpoint"]) if request["checkpoint"] else None
        self.adapter = open_adapter(parse_spec(request["spec"]), checkpoint, setup)
        self.created: Mapping[str, Any] = request
        self.setup = setup

    def open(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Open the adapter and load the weights."""
        from harness.adapter import capabilities
        from harness.runs import Bench, opened
        from harness.types import as_json

        self._create({**request, "do": "describe"})
        self.beat("loading weights")
        facts = opened(self.adapter, Path(request["checkpoint"]), self.setup)
        self.bench = Bench(
            adapter=self.adapter,
            setup=self.setup,
            checkpoint=Path(request["checkpoint"]),
            load_facts=facts,
            beat=self.beat,
            folder=self.folder / "shadow",
            copied=self._spool() if "streamed" in capabilities(self.adapter) else None,
        )
        self.benches = [self.bench]
        return dict(as_json(facts))

    def run(self, request: Mapping[str, Any], bench: Any = None) -> dict[str, Any]:
        """Do one run and write its trace; of another adapter than the opened one where a bench is given."""
        from harness.golden import save_trace
        from harness.runs import execute
        from harness.types import Run, from_json

        run = from_json(Run, request["run"])
        self.beat(f"{run.id} starting")
        self.tokens = len(run.case.token_ids or ()) + run.case.max_new_tokens if run.case else 1
        expected = self._source(request.get("expected"))
        trace = execute(bench or self.bench, run, pins=self._pins(request, run), expected=expected)
        save_trace(Path(request["out"]), replace(trace, provenance={**request.get("provenance", {}), **made()}))
        return {"wall_s": trace.facts["wall_s"], "taps": len(trace.tensors)}

    def together(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do runs in one pass over the weights, each with an adapter of its own; return a reply for each."""
        from functools import partial

        import torch

        def task(job: Mapping[str, Any], bench: Any) -> dict[str, Any]:
            torch.set_num_threads(bench.setup.threads)  # a thread begins with those of the system
            return self.run(job, bench)

        jobs, free = [{**job, "provenance": request.get("provenance", {})} for job in request["jobs"]], [*self.benches]
        tasks = [partial(task, job, self._bench(job["setup"], free)) for job in jobs]
        found = self.adapter.together(tasks)
        return {"replies": [_refusal(f) if isinstance(f, Exception) else {"ok": True, "facts": f} for f in found]}

    def _bench(self, words: Mapping[str, Any], free: list[Any]) -> Any:
        """Return a bench in a setup that no other run of this pass has; a new one where there is none."""
        from harness.runs import opened
        from harness.types import Setup, from_json

        setup = from_json(Setup, words)
        found = next((bench for bench in free if bench.setup == setup), None)
        if found is not None:
            free.remove(found)
            return found
        adapter = self.adapter.beside(setup)
        facts = opened(adapter, self.bench.checkpoint, setup)
        self.benches.append(replace(self.bench, adapter=adapter, setup=setup, load_facts=facts, copied=self._spool()))
        return self.benches[-1]

    def _spool(self) -> Callable[[Any], Any]:
        from harness.golden import Spool

        return Spool(self.folder).keep

    def _source(self, folder: str | None) -> Any:
        """Open a trace to replay from; the last one stays open, since runs come in groups."""
        from harness.golden import load_trace

        return load_trace(Path(folder)) if folder else None

    def _pins(self, request: Mapping[str, Any], run: Any) -> Any:
        import torch

        from harness.recorder import Pins

        if not run.level:
            return None
        source = self._source(request["pins"])
        return Pins(
            tensors=source.tensors.cached(),
            taps=source.taps,
            level=run.level,
            dtype=getattr(torch, request["pin_dtype"]),
            decisions=run.pin_decisions,
            jitter=run.jitter,
        )

    def close(self) -> dict[str, Any]:
        """Close the adapter."""
        for bench in self.benches[1:]:
            bench.adapter.close()
        if self.adapter is not None:
            self._tell_stream()
            self.adapter.close()
        self.adapter = self.bench = None
        self.benches = []
        return {}

    def _tell_stream(self) -> None:
        """Leave in the log how much a streamed side read in all."""
        if hasattr(self.adapter, "stream_facts"):
            facts = self.adapter.stream_facts()
            times = facts["read_bytes"] / max(1, facts["checkpoint_bytes"])
            print(f"streamed {facts['read_bytes']} bytes, {times:.2f} times the checkpoint", flush=True)


def _refusal(error: Exception) -> dict[str, Any]:
    """Return the reply for what a request raised."""
    from harness.errors import TraceError, UsageError

    stack = "".join(traceback.format_exception(error))
    if isinstance(error, UsageError):
        return {"ok": False, "kind": "usage", "message": str(error), "stack": ""}
    if isinstance(error, TraceError):  # a golden to replay from; not the port's doing
        return {"ok": False, "kind": "refused", "message": f"nothing to replay: {error}", "stack": ""}
    if isinstance(error, MemoryError):
        return {"ok": False, "kind": "memory", "message": repr(error), "stack": stack}
    kind = "memory" if type(error).__name__ == "OutOfMemoryError" else "raised"
    return {"ok": False, "kind": kind, "message": f"{type(error).__name__}: {error}", "stack": stack}


def device_words(device: str) -> list[str]:
    """Return `accelerator` for a device whose runtime torch.accelerator knows."""
    import torch

    accelerator: Any = getattr(torch, "accelerator", None)
    current = accelerator.current_accelerator() if accelerator is not None and accelerator.is_available() else None
    return ["accelerator"] if current is not None and current.type == torch.device(device).type else []


def made() -> dict[str, str]:
    """Return who made a trace: versions, device, machine, time."""
    from datetime import datetime, timezone

    from harness import recorder

    told = versions()
    named = {f"version.{name}": str(version) for name, version in told["versions"].items()}
    time_now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {
        **named, "device": told["device"], "machine": told["machine"], "recorder": str(recorder.VERSION),
        "time": time_now,
    }  # fmt: skip


def versions() -> dict[str, Any]:
    """Return the versions that a verdict may depend on."""
    import platform

    import torch

    accelerator: Any = getattr(torch, "accelerator", None)
    device = str(accelerator.current_accelerator()) if accelerator is not None and accelerator.is_available() else "cpu"
    return {"versions": dict(installed()), "device": device, "machine": f"{platform.machine()} {platform.system()}"}


@functools.cache  # a run is told every time, and metadata are files
def installed() -> Mapping[str, str]:
    """Return the versions of what is installed here."""
    import importlib.metadata as metadata
    import platform

    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("day0", "transformers", "safetensors", "numpy", "onnxruntime"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv))
