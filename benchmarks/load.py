"""What reading a checkpoint costs: day0's passes beside a plain read, safetensors with sha256sum, and transformers.

    python benchmarks/load.py [--size 1.0] [--rounds 5] [--formats bf16,fp8,mxfp4] [--folder DIR] [--json FILE]

A random Llama of `--size` GiB in two files is written in each format (bfloat16; FP8 in blocks of 128x128; MXFP4 as
compressed-tensors packs it). Every side runs once in each round, the order turned from round to round, in wall seconds
(both cores may be used) with processor seconds beside. `warm`: the files are in the page cache; `cold`: they are
dropped from it before each side (posix_fadvise). Decoders are timed in memory, on one thread. Peaks of anonymous memory
are taken in a process of their own for each side, at two sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import load_files
import torch
from torch import Tensor

AIMS = {"day0 digest and codes": 0.8, "MXFP4, into bfloat16": 10.0, "MXFP4, into float32": 10.0}
BUFFER_BYTES = 1 << 23
Side = Callable[[], object]


def main() -> None:
    """Write the checkpoints, run every side and print the tables."""
    words = _arguments()
    torch.set_num_threads(1)
    if words.inside:
        print(json.dumps(_peak(SIDES[words.inside], words.folder)))
        return
    facts: dict[str, Any] = {}
    _say(_decoder_lines(facts.setdefault("decoders", decoders(words.rounds))))
    with tempfile.TemporaryDirectory(prefix="load-", dir=words.folder) as scratch:
        for name in words.formats.split(","):
            facts[name] = measure(Path(scratch), name, words)
            _say(_format_lines(name, facts[name]))
    if words.json:
        words.json.write_text(json.dumps(facts, indent=1))


def measure(scratch: Path, name: str, words: argparse.Namespace) -> dict[str, Any]:
    """Return what every side takes on a checkpoint of one format."""
    folder = scratch / name
    nbytes = load_files.write(folder, name, int(words.size * 2**30))
    found: dict[str, Any] = {"bytes": nbytes, "load": os.getloadavg()[0]}
    found["warm"] = passes(folder, words.rounds, cold=False)
    found["cold"] = passes(folder, max(2, words.rounds // 2), cold=True)
    if name in words.peaks.split(","):
        found["peaks"] = peaks(folder, scratch / "small", name, int(words.size * 2**28))
    load_files.remove(folder)
    return found


def _say(lines: list[str]) -> None:
    print("\n".join(["", *lines]), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=1.0, help="GiB of each checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--formats", default="bf16,fp8,mxfp4")
    parser.add_argument("--peaks", default="bf16,mxfp4", help="formats whose peaks of memory are taken")
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written for a while")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


# --- sides that read files ---


def read(folder: Path) -> int:
    """Read every byte of every shard, one after the other, into one buffer."""
    memory, total = memoryview(bytearray(BUFFER_BYTES)), 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as stream:
            while got := stream.readinto(memory):  # type: ignore[attr-defined]
                total += got
    return total


def whole(folder: Path, *, values: bool = True) -> object:
    """Read the checkpoint as day0 does."""
    from harness.checkpoint import open_checkpoint
    from harness.checkpoint.scan import scan

    return [shard.digests for shard in scan(open_checkpoint(folder), values=values)]


def library(folder: Path) -> object:
    """Load every tensor with safetensors, file by file, and let sha256sum digest the files."""
    from safetensors.torch import load_file

    paths = sorted(folder.glob("*.safetensors"))
    touched = [int(t.view(torch.uint8).view(-1)[::4096].sum()) for p in paths for t in load_file(p).values()]
    return touched, subprocess.run(["sha256sum", *map(str, paths)], check=True, capture_output=True).stdout


def transformers(folder: Path) -> object:
    """Load the model with transformers, every page of its weights touched."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return [int(p.data.view(torch.uint8).view(-1)[::4096].sum()) for p in model.parameters()]


SIDES: Mapping[str, Callable[[Path], object]] = {
    "read the bytes": read,
    "day0 digest and codes": partial(whole, values=False),
    "day0 whole pass": whole,
    "safetensors load_file + sha256sum": library,
    "transformers from_pretrained": transformers,
}


def passes(folder: Path, rounds: int, *, cold: bool) -> dict[str, Any]:
    """Return seconds and ratios of every side on one checkpoint; of one that cannot load it, why."""
    sides, skipped = dict[str, Side](), dict[str, Any]()
    for name, side in SIDES.items():
        try:
            side(folder)
            sides[name] = partial(side, folder)
        except Exception as error:  # another tool's refusal is a line of the table
            skipped[name] = {"skipped": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:90]}"}
    before = partial(_drop, folder) if cold else None
    return {**_ratios(_interleaved(sides, rounds, before), "read the bytes"), **skipped}


def _drop(folder: Path) -> None:
    """Take the files out of the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _interleaved(
    sides: Mapping[str, Side], rounds: int, before: Side | None = None
) -> dict[str, list[tuple[float, float]]]:
    """Time every side once in each round, in wall and processor seconds, the order turned from round to round."""
    names, seconds = list(sides), {name: list[tuple[float, float]]() for name in sides}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            if before is not None:
                before()
            begin, worked = time.perf_counter(), _processor_s()
            sides[name]()
            seconds[name].append((time.perf_counter() - begin, _processor_s() - worked))
    return seconds


def _processor_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def _ratios(seconds: Mapping[str, list[tuple[float, float]]], base: str) -> dict[str, Any]:
    """Return medians of seconds, and of how fast each side is beside the base in the same round."""
    found = {}
    for name, each in seconds.items():
        ratios = [b[0] / a[0] for a, b in zip(each, seconds[base], strict=True)]
        found[name] = {
            "wall_s": statistics.median(wall for wall, _ in each),
            "cpu_s": statistics.median(cpu for _, cpu in each),
            "least_s": min(wall for wall, _ in each),
            "speed": statistics.median(ratios),
            "least": min(ratios),
            "greatest": max(ratios),
        }
    return found


# --- decoders ---


def decoders(rounds: int, rows: int = 4096, columns: int = 4096) -> dict[str, Any]:
    """Return the speed of the decoders on one matrix, beside looking codes up in eager torch and beside memory."""
    from harness.checkpoint.decoders import decode_fp8_block, decode_mxfp4

    draw = torch.Generator().manual_seed(0)
    packed, scale = load_files.mxfp4(rows, columns, draw)
    codes, grid = load_files.fp8(rows, columns, draw)
    wide, narrow = torch.empty(rows, columns), torch.zeros(rows, columns, dtype=torch.bfloat16)
    sides: dict[str, Side] = {
        "eager lookup, bfloat16": partial(eager_mxfp4, packed, scale, torch.bfloat16),
        "eager lookup, float32": partial(eager_mxfp4, packed, scale, torch.float32),
        "MXFP4, into bfloat16": partial(decode_mxfp4, packed, scale, dtype=torch.bfloat16, out=narrow.clone()),
        "MXFP4, into float32": partial(decode_mxfp4, packed, scale, out=wide),
        "MXFP4, new bfloat16": partial(decode_mxfp4, packed, scale, dtype=torch.bfloat16),
        "MXFP4, new float32": partial(decode_mxfp4, packed, scale),
        "copy of bfloat16 into float32": partial(wide.copy_, narrow),
        "torch's own conversion of FP8, scaled": partial(eager_fp8, codes, grid),
        "FP8 blocks, into float32": partial(decode_fp8_block, codes, grid, (128, 128), out=wide),
        "FP8 blocks, new float32": partial(decode_fp8_block, codes, grid, (128, 128)),
    }
    try:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    except ImportError:
        pass
    else:
        blocks, exponents = packed.view(1, rows, columns // 32, 16), scale.view(1, rows, columns // 32)
        sides["transformers' own MXFP4"] = partial(convert_moe_packed_tensors, blocks, exponents)
    for side in sides.values():
        side()
    seconds = _interleaved(sides, 4 * rounds)
    return {"elements": rows * columns, **_decoder_rows(seconds)}


def _decoder_rows(seconds: Mapping[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Return each decoder's seconds, and its speed beside its base: processor seconds, since one thread works."""
    found = {}
    for name, each in seconds.items():
        dtype = "float32" if "float32" in name else "bfloat16"
        fp8 = "FP8" in name or name.startswith("copy")
        base = "copy of bfloat16 into float32" if fp8 else f"eager lookup, {dtype}"
        ratios = [b[1] / a[1] for a, b in zip(each, seconds[base], strict=True)]
        found[name] = {
            "cpu_s": statistics.median(cpu for _, cpu in each), "base": base, "speed": statistics.median(ratios),
            "least": min(ratios), "greatest": max(ratios),
        }  # fmt: skip
    return found


def eager_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode as people write it: both nibbles looked up by 64-bit indices, put side by side, scaled by exponents."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor(values + [-v for v in values], dtype=dtype)
    found = torch.stack((table[(packed & 0xF).long()], table[(packed >> 4).long()]), dim=-1)
    blocks = found.view(len(packed), -1, 32)
    return torch.ldexp(blocks, scale.int().unsqueeze(-1) - 127).view(len(packed), -1)


def eager_fp8(codes: Tensor, grid: Tensor) -> Tensor:
    """Decode FP8 as people write it: converted by torch, times the grid of scales spread over the blocks."""
    spread = grid.repeat_interleave(128, 0)[: len(codes)].repeat_interleave(128, 1)[:, : codes.shape[1]]
    return codes.to(torch.float32) * spread


# --- memory ---


def peaks(folder: Path, small: Path, name: str, small_bytes: int) -> dict[str, Any]:
    """Return each side's peak of anonymous memory above what imports took, on a checkpoint and on a quarter of it."""
    load_files.write(small, name, small_bytes)
    found: dict[str, Any] = {}
    for side in SIDES:
        each = [_peak_there(side, where) for where in (small, folder)]
        found[side] = {"small": each[0], "large": each[1]}
    load_files.remove(small)
    return found


def _peak_there(side: str, folder: Path) -> float | None:
    command = [sys.executable, __file__, "--inside", side, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return float(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else None


def _peak(side: Callable[[Path], object], folder: Path) -> float:
    """Run a side here and return the greatest anonymous memory that was seen, in MiB, above that before."""
    import harness.checkpoint.scan  # noqa: F401 - what imports take is not the side's

    over, seen = threading.Event(), [before := _anonymous_mib()]

    def look() -> None:
        while not over.wait(0.002):
            seen.append(_anonymous_mib())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        side(folder)
    finally:  # a side that refuses must not leave its watcher running
        over.set()
        watcher.join()
    return max(seen) - before


def _anonymous_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return float("nan")


# --- tables ---


def _decoder_lines(rows: Mapping[str, Any]) -> list[str]:
    lines = [
        "| decoder, one thread | Melem/CPU s | times its base | least-greatest | base | aim |",
        "|---|--:|--:|---|---|---|",
    ]
    for name, row in rows.items():
        if name != "elements":
            lines.append(
                f"| {name} | {rows['elements'] / row['cpu_s'] / 1e6:.0f} | {row['speed']:.2f} | {_spread(row)} | "
                f"{row['base']} | {_aim(name)} |"
            )
    return lines


def _format_lines(name: str, found: Mapping[str, Any]) -> list[str]:
    lines = [
        f"| {name}, {found['bytes'] / 1e9:.2f} GB, load {found['load']:.0f} on {len(os.sched_getaffinity(0))} cores | "
        "wall s | CPU s | GB/s | of the plain read | least-greatest | of its CPU s | aim |",
        "|---|--:|--:|--:|--:|---|--:|---|",
    ]
    for state in ("warm", "cold"):
        for side, row in found[state].items():
            if "skipped" in row:
                lines.append(f"| {state}: {side} | | | | | skipped: {row['skipped']} | | |")
                continue
            cpu = row["cpu_s"] / max(1e-9, found[state]["read the bytes"]["cpu_s"])
            lines.append(
                f"| {state}: {side} | {row['wall_s']:.2f} | {row['cpu_s']:.2f} | "
                f"{found['bytes'] / row['wall_s'] / 1e9:.2f} | {row['speed']:.2f} | {_spread(row)} | {cpu:.1f} | "
                f"{_aim(side)} |"
            )
    for side, row in found.get("peaks", {}).items():
        lines.append(f"peak of {side}: {_mib(row['small'])} on a quarter of it, {_mib(row['large'])} on all of it")
    return lines


def _spread(row: Mapping[str, Any]) -> str:
    return f"{row['least']:.2f}-{row['greatest']:.2f}"


def _mib(value: float | None) -> str:
    return "not known" if value is None else f"{value:.0f} MiB"


def _aim(name: str) -> str:
    return f"{AIMS[name]:g}" if name in AIMS else ""


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main()
