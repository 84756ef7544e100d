"""What comparing costs: all of day0's metrics on three runs, beside just reading the bytes and what people do instead.

    python benchmarks/compare.py [--dtype bfloat16] [--rounds 5] [--msprobe PYTHON] [--json FILE]

Oracle, floor and port of the 24-layer model are recorded once, replayed at level 3 from the oracle's values, the port
with another attention; every side then works on those folders. Single-thread CPU seconds as ratios to the reading.
msProbe (`--msprobe` names its interpreter) compares its own two dumps of the same model, timed as one process, start
included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import moe24
import torch

from harness.adapters.module import ModuleAdapter
from harness.compare import compare_run
from harness.golden import load_trace, save_trace
from harness.recorder import Pins
from harness.runs import Bench, execute
from harness.types import Case, Run, Scope, Setup, Trace

AIM = 2.0
ORACLE_OF = {"bfloat16": "float32", "float16": "float32", "float32": "float64"}
ROLES = ("oracle", "floor", "accel")


def main() -> None:
    """Record, time every side and print the table."""
    words = _arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="compare-") as scratch:
        run = record(Path(scratch), words.dtype, words.layers)
        table, facts = measure(Path(scratch), run, words.dtype, words.rounds)
        table["msProbe compare, two dumps"] = _msprobe(
            words, Path(scratch).resolve() / "msprobe", table["read the bytes"]["cpu_s"]
        )
    print(render(table, facts, words.dtype))
    if words.json:
        words.json.write_text(json.dumps({"dtype": words.dtype, "sides": table, "facts": facts}, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(ORACLE_OF))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24, help="fewer for a quick look")
    parser.add_argument("--msprobe", default="", metavar="PYTHON", help="interpreter with mindstudio-probe")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    return parser.parse_args()


def record(scratch: Path, dtype: str, layers: int) -> Run:
    """Write the traces of the three roles into `scratch`; return the run that they answer."""
    case = Case(id="bench", token_ids=tuple(moe24.inputs()["input_ids"][0].tolist()))
    free = Run(id="free", stage="text", kind="forward", case=case)
    pinned = replace(free, id="pinned", level=3, pin="free")
    wide = ORACLE_OF[dtype]
    experts = "eager" if wide == "float64" else "grouped_mm"  # grouped matrix products have no float64
    oracle = moe24.build(dtype, layers=layers, experts=experts).to(
        getattr(torch, wide)
    )  # the same rounded weights, computed wider
    source = _execute(scratch, oracle, _setup("oracle", wide), free, None, dtype)
    save_trace(scratch / "oracle", _execute(scratch, oracle, _setup("oracle", wide), pinned, source, dtype))
    del oracle
    for role, attention in (("floor", "sdpa"), ("accel", "eager")):
        model = moe24.build(dtype, layers=layers, attention=attention)
        save_trace(scratch / role, _execute(scratch, model, _setup(role, dtype), pinned, source, dtype))
    return pinned


def _setup(role: str, dtype: str) -> Setup:
    side = "accel" if role == "accel" else "reference"
    return Setup(side=side, role=role, adapter="module", dtype=dtype, threads=1)


def _execute(scratch: Path, model: Any, setup: Setup, run: Run, source: Trace | None, dtype: str) -> Trace:
    model.config.save_pretrained(scratch / "checkpoint")
    adapter = ModuleAdapter(model, scratch / "checkpoint", setup)
    adapter.load(scratch / "checkpoint", setup)
    pins = None
    if source is not None:
        pins = Pins(tensors=source.tensors, taps=source.taps, level=run.level, dtype=getattr(torch, dtype))
    bench = Bench(
        adapter=adapter, setup=setup, checkpoint=scratch / "checkpoint", load_facts={}, beat=lambda _: None
    )  # fmt: skip
    trace = execute(bench, run, pins=pins, expected=None)
    adapter.close()
    return trace


def measure(scratch: Path, run: Run, dtype: str, rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ratios by side, and how much was compared."""
    sides: dict[str, Callable[[], object]] = {
        "read the bytes": partial(read, scratch),
        "load_trace alone (digests checked)": partial(load, scratch),
        "day0, all metrics, three runs": partial(compare, scratch, run, dtype),
        "cosine + PCC + assert_close, two runs": partial(common, scratch),
    }
    measurements = compare(scratch, run, dtype)
    seconds = moe24.interleaved({name: moe24.always(side) for name, side in sides.items()}, rounds)
    size = sum(path.stat().st_size for role in ROLES for path in (scratch / role).rglob("*.safetensors"))
    facts = {"bytes": size, "taps": len(load_trace(scratch / "oracle").taps), "measurements": len(measurements)}
    return moe24.ratios(seconds, "read the bytes"), facts


def read(scratch: Path) -> int:
    """Map every file of the three runs and touch every byte."""
    from safetensors import safe_open

    total = 0
    for role in ROLES:
        for path in sorted((scratch / role).glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    flat = file.get_tensor(name).reshape(-1).view(torch.uint8)
                    whole = flat[: flat.numel() // 8 * 8].view(torch.int64)
                    total ^= int(whole.sum()) + int(flat[whole.numel() * 8 :].sum())
    return total


def load(scratch: Path) -> None:
    """Read every tensor as day0 does: its digest is computed and compared."""
    for role in ROLES:
        trace = load_trace(scratch / role)
        for name in trace.tensors:
            trace.tensors[name]


def compare(scratch: Path, run: Run, dtype: str) -> list[Any]:
    """Compare the folders as a stage does, every metric of every tap."""
    oracle, floor, accel = (load_trace(scratch / role) for role in ROLES)
    return compare_run(
        stage="text", run=run, oracle=oracle, floors=[floor], accel=accel, scope=Scope(), dtype=dtype, heads=8
    )


def common(scratch: Path) -> list[tuple[float, float, bool]]:
    """Compare port and oracle as people do: cosine, Pearson's correlation and assert_close of each tensor."""
    oracle, accel = load_trace(scratch / "oracle"), load_trace(scratch / "accel")
    return [_common(accel.tensors[n], oracle.tensors[n]) for n in oracle.tensors if n in accel.tensors]


def _common(actual: torch.Tensor, expected: torch.Tensor) -> tuple[float, float, bool]:
    a, e = actual.float().flatten(), expected.float().flatten()
    cosine = float(torch.nn.functional.cosine_similarity(a, e, dim=0))
    pcc = float(torch.corrcoef(torch.stack([a, e]))[0, 1])
    try:
        torch.testing.assert_close(actual, expected.to(actual.dtype))
    except AssertionError:
        return cosine, pcc, False
    return cosine, pcc, True


def _msprobe(words: argparse.Namespace, folder: Path, base: float) -> dict[str, Any]:
    """Let msProbe dump both attentions and compare the dumps; return its CPU seconds, or why there are none."""
    if not words.msprobe:
        return {"skipped": "name an interpreter that has it with --msprobe"}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    script = str(Path(__file__).with_name("capture.py"))
    common = [words.msprobe, script, "--dtype", words.dtype, "--layers", str(words.layers), "--rounds", "1"]
    for attention in ("sdpa", "eager"):
        (folder / attention).mkdir(parents=True)
        command = [*common, "--inside-msprobe", "tensor:L0", "--attention", attention]
        subprocess.run(command, cwd=folder / attention, env=environment, check=True, capture_output=True)
    dumps = {a: next((folder / a / "dump").glob("step*")) for a in ("sdpa", "eager")}
    tool = str(Path(words.msprobe).with_name("msprobe"))
    paths = ["--target_path", str(dumps["eager"]), "--golden_path", str(dumps["sdpa"]), "--output_path", str(folder)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([tool, "compare", *paths], env=environment, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        return {"skipped": f"ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"}
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": took, "ratio": took / base, "least": took / base, "greatest": took / base}


def render(table: dict[str, Any], facts: dict[str, Any], dtype: str) -> str:
    """Return the table as markdown."""
    aims = {name: AIM for name in table if name.startswith("day0")}
    lines = moe24.rows_of(table, dtype, aims)
    rate = facts["bytes"] / table["day0, all metrics, three runs"]["cpu_s"] / 1e6
    lines += [
        "",
        f"{facts['bytes']:,} bytes, {facts['taps']} taps of the oracle, {facts['measurements']} measurements; "
        f"day0 compares {rate:.0f} MB/s.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main()
