"""What capturing costs: day0 beside a plain forward, the transformers debugger, torch's DebugMode and msProbe.

    python benchmarks/capture.py [--dtype bfloat16] [--rounds 7] [--msprobe PYTHON] [--json FILE]

Single-thread CPU seconds as ratios to the plain forward of the same round. msProbe runs in an environment of its own
(`--msprobe` names its interpreter, which has torch, transformers and mindstudio-probe), beside a plain forward there.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import moe24
import torch

AIMS = {"day0 statistics": 1.15, "day0 all tensors": 1.5}
DISK_AIM = 1.05
MSPROBE = {
    "msProbe module statistics": ("statistics", "L0"),
    "msProbe all module tensors": ("tensor", "L0"),
    "msProbe API statistics": ("statistics", "L1"),
}


def main() -> None:
    """Run every side that is installed and print the table."""
    words = _arguments()
    torch.set_num_threads(1)
    if words.inside_msprobe:
        print(json.dumps(_msprobe_here(words)))
        return
    with tempfile.TemporaryDirectory(prefix="capture-") as scratch:
        table, facts = measure(words.dtype, words.rounds, words.layers, Path(scratch))
        for name, (task, level) in MSPROBE.items():
            table[name] = _msprobe_there(words, task, level)
    print(render(table, facts, words.dtype))
    if words.json:
        words.json.write_text(json.dumps({"dtype": words.dtype, "sides": table, "facts": facts}, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=24, help="fewer for a quick look")
    parser.add_argument("--msprobe", default="", metavar="PYTHON", help="interpreter with mindstudio-probe")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--inside-msprobe", default="", help=argparse.SUPPRESS)
    parser.add_argument("--attention", default="sdpa", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(dtype: str, rounds: int, layers: int, scratch: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ratios by side (or the reason why it was skipped), and what lies on disk afterwards."""
    model, given = moe24.build(dtype, layers=layers), moe24.inputs()
    sides: dict[str, moe24.Side] = {"plain forward": moe24.always(partial(moe24.plain, model, given))}
    day0 = Day0(model, dtype, scratch)
    sides["day0 hooks asleep"] = day0.asleep
    sides["day0 statistics"] = day0.statistics
    sides["day0 all tensors"] = day0.tensors
    skipped: dict[str, Any] = {}
    for name, side in (("transformers debugger", _debugger), ("torch DebugMode hashes", _debug_mode)):
        found = side(model, given, scratch)
        if isinstance(found, str):
            skipped[name] = {"skipped": found}
        else:
            sides[name] = moe24.always(found)
    seconds = moe24.interleaved(sides, rounds)
    return {**moe24.ratios(seconds, "plain forward"), **skipped}, day0.on_disk()


class Day0:
    """day0's own captures of one model, as `day0 record` makes them, hooks attached for the time of a capture only."""

    def __init__(self, model: Any, dtype: str, scratch: Path) -> None:
        from harness.types import Case, Setup

        self.model, self.folder = model, scratch / "day0"
        self.checkpoint = scratch / "checkpoint"
        model.config.save_pretrained(self.checkpoint)
        self.setup = Setup(side="accel", role="accel", adapter="module", dtype=dtype, threads=1)
        ids = moe24.inputs()["input_ids"][0].tolist()
        self.case = Case(id="bench", token_ids=tuple(ids))

    @contextmanager
    def asleep(self) -> Iterator[Callable[[], object]]:
        """Run through the adapter without recording: what hooks cost that nobody listens to."""
        with self._opened() as bench:
            yield lambda: self._capture(bench, observe=False)

    @contextmanager
    def statistics(self) -> Iterator[Callable[[], object]]:
        """Capture statistics of every tap and write them."""
        with self._opened() as bench:
            yield lambda: self._save("statistics", self._capture(bench, statistics=True))

    @contextmanager
    def tensors(self) -> Iterator[Callable[[], object]]:
        """Capture every tap whole and write the trace."""
        with self._opened() as bench:
            yield lambda: self._save("tensors", self._capture(bench))

    def _capture(self, bench: Any, *, observe: bool = True, statistics: bool = False) -> Any:
        from harness.runs import execute
        from harness.types import Run

        options = {"statistics": True} if statistics else {}
        run = Run(id="bench", stage="text", kind="forward", case=self.case, observe=observe, options=options)
        return execute(bench, run, pins=None, expected=None)

    def _save(self, name: str, trace: Any) -> None:
        from harness.golden import save_trace

        save_trace(self.folder / name, trace)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """Attach the hooks, as loading does once, and take them off: other sides must not run under them."""
        from harness.adapters.module import ModuleAdapter
        from harness.runs import Bench

        adapter = ModuleAdapter(self.model, self.checkpoint, self.setup)
        adapter.load(self.checkpoint, self.setup)
        bench = Bench(
            adapter=adapter, setup=self.setup, checkpoint=self.checkpoint, load_facts={}, beat=lambda _: None
        )  # fmt: skip
        yield bench
        adapter.close()

    def on_disk(self) -> dict[str, Any]:
        """Return the bytes written against the bytes of distinct tensors, counted here from the tensors themselves."""
        with self._opened() as bench:
            kept = self._capture(bench).tensors
        distinct = {_content(t): t.numel() * t.element_size() for t in kept.values()}
        written = _bytes(self.folder / "tensors")
        return {
            "taps": len(kept),
            "distinct_tensors": len(distinct),
            "distinct_bytes": sum(distinct.values()),
            "written_bytes": written,
            "disk_ratio": written / max(1, sum(distinct.values())),
            "statistics_bytes": _bytes(self.folder / "statistics"),
        }


def _content(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype}{tuple(tensor.shape)}{hashlib.sha256(data).hexdigest()}"


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _debugger(model: Any, given: Mapping[str, Any], scratch: Path) -> Callable[[], object] | str:
    try:
        from transformers.model_debugging_utils import model_addition_debugger_context
    except ImportError as error:
        return f"not in this transformers: {error}"

    def side() -> None:
        with model_addition_debugger_context(model, debug_path=str(scratch / "debugger"), do_prune_layers=False):
            moe24.plain(model, given)

    return side


def _debug_mode(model: Any, given: Mapping[str, Any], scratch: Path) -> Callable[[], object] | str:
    if importlib.util.find_spec("torch.utils._debug_mode") is None:
        return "not in this torch"
    from torch.utils._debug_mode import DebugMode

    def side() -> None:
        with DebugMode() as mode, DebugMode.log_tensor_hashes():
            moe24.plain(model, given)
        scratch.joinpath("debug_mode.txt").write_text(mode.debug_string())

    return side


def _msprobe_there(words: argparse.Namespace, task: str, level: str) -> dict[str, Any]:
    """Run this file under msProbe's interpreter; return its ratio, or why there is none."""
    if not words.msprobe:
        return {"skipped": "name an interpreter that has it with --msprobe"}
    command = [
        words.msprobe, __file__, "--dtype", words.dtype, "--rounds", str(words.rounds), "--layers", str(words.layers),
        "--inside-msprobe", f"{task}:{level}",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="msprobe-") as folder:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=folder, env={**environment, "OMP_WAIT_POLICY": "passive"}
        )
    if done.returncode:
        return {"skipped": f"ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _msprobe_here(words: argparse.Namespace) -> dict[str, Any]:
    """Time msProbe beside a plain forward, in this process."""
    from msprobe.pytorch import PrecisionDebugger

    task, level = words.inside_msprobe.split(":")
    model = moe24.build(words.dtype, layers=words.layers, attention=words.attention)
    given, folder = moe24.inputs(), Path.cwd()
    common = {"scope": [], "list": [], "data_mode": ["all"]}
    config = {"task": task, "dump_path": str(folder / "dump"), "rank": [], "step": [], "level": level, task: common}
    if task == "statistics":
        config[task] = {**common, "summary_mode": "statistics"}
    (folder / "config.json").write_text(json.dumps(config))
    plain = [moe24.cpu_seconds(partial(moe24.plain, model, given)) for _ in range(words.rounds + 1)][1:]
    debugger = PrecisionDebugger(config_path=str(folder / "config.json"))

    def side() -> None:
        debugger.start(model=model)
        moe24.plain(model, given)
        debugger.stop()
        debugger.step()

    moe24.cpu_seconds(side)
    shutil.rmtree(folder / "dump", ignore_errors=True)
    probed = [moe24.cpu_seconds(side) for _ in range(words.rounds)]
    found = moe24.ratios({"plain": plain, "msprobe": probed}, "plain")["msprobe"]
    files = [path for path in (folder / "dump").rglob("*") if path.is_file()]
    return {**found, "files": len(files) // words.rounds, "bytes": sum(p.stat().st_size for p in files) // words.rounds}


def render(table: Mapping[str, Any], facts: Mapping[str, Any], dtype: str) -> str:
    """Return the table as markdown."""
    lines = moe24.rows_of(table, dtype, AIMS)
    lines += [
        "",
        f"Disk: {facts['written_bytes']:,} bytes for {facts['distinct_tensors']} distinct of {facts['taps']} tensors, "
        f"{facts['disk_ratio']:.4f} of their own bytes (aim {DISK_AIM:g}); statistics: {facts['statistics_bytes']:,}.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main()
