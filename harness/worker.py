"""One side in its own process: reads requests as JSON lines, runs the port, writes traces. Knows nothing of limits.

    python -m harness.worker SESSION_DIR

Needs torch, safetensors, numpy and the standard library only, so it runs in a vendor's environment. What the port
prints goes to the log; replies go to a private copy of standard output. The place it is at lies in SESSION_DIR/beat,
stacks of a hang or a crash in SESSION_DIR/stack.txt, where the watchdog reads them.
"""

from __future__ import annotations

import faulthandler
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
    side = Side(_beat(folder / "beat"))
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

    def __init__(self, beat: Callable[[str], None]) -> None:
        self.beat = beat
        self.adapter: Any = None
        self.bench: Any = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a request asks and return the reply; whatever the port raises becomes part of the reply."""
        from harness.errors import TraceError, UsageError

        actions: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "describe": self.describe, "open": self.open, "run": self.run, "close": lambda _: self.close(),
        }  # fmt: skip
        try:
            return {"ok": True, "facts": actions[request["do"]](request)}
        except UsageError as error:
            return {"ok": False, "kind": "usage", "message": str(error), "stack": ""}
        except TraceError as error:  # a golden to replay from; not the port's doing
            return {"ok": False, "kind": "refused", "message": f"nothing to replay: {error}", "stack": ""}
        except MemoryError as error:
            return {"ok": False, "kind": "memory", "message": repr(error), "stack": traceback.format_exc()}
        except Exception as error:  # the side under test may raise anything; it becomes ERROR evidence
            kind = "memory" if type(error).__name__ == "OutOfMemoryError" else "raised"
            return {
                "ok": False,
                "kind": kind,
                "message": f"{type(error).__name__}: {error}",
                "stack": traceback.format_exc(),
            }

    def describe(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Open the adapter without loading weights, and say what it claims."""
        from harness.adapter import capabilities
        from harness.types import as_json

        self._create(request)
        return {
            "name": self.adapter.name,
            "scope": as_json(self.adapter.scope),
            "capabilities": capabilities(self.adapter),
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
        self.beat(f"opening {request['spec']}")
        checkpoint = Path(request["checkpoint"]) if request["checkpoint"] else None
        self.adapter = open_adapter(parse_spec(request["spec"]), checkpoint, setup)
        self.created: Mapping[str, Any] = request
        self.setup = setup

    def open(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Open the adapter and load the weights."""
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
        )
        return dict(as_json(facts))

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do one run and write its trace."""
        from harness.golden import save_trace
        from harness.runs import execute
        from harness.types import Run, from_json

        run = from_json(Run, request["run"])
        self.beat(f"{run.id} starting")
        expected = self._source(request.get("expected"))
        trace = execute(self.bench, run, pins=self._pins(request, run), expected=expected)
        save_trace(Path(request["out"]), replace(trace, provenance={**request.get("provenance", {}), **made()}))
        return {"wall_s": trace.facts["wall_s"], "taps": len(trace.tensors)}

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
        if self.adapter is not None:
            self.adapter.close()
        self.adapter = self.bench = None
        return {}


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
    import importlib.metadata as metadata
    import platform

    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("day0", "transformers", "safetensors", "numpy", "onnxruntime"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    accelerator: Any = getattr(torch, "accelerator", None)
    device = str(accelerator.current_accelerator()) if accelerator is not None and accelerator.is_available() else "cpu"
    return {"versions": found, "device": device, "machine": f"{platform.machine()} {platform.system()}"}


if __name__ == "__main__":
    sys.exit(main(sys.argv))
