"""Where in a model of many layers four changes are found: a harmless one nowhere, a fault in its own layer alone.

    python benchmarks/localise.py [--layers 24] [--seed 0]

The model is the random Qwen3-MoE of `moe24.py` in bfloat16, its weights roughened so that rotary faults show.
Changed in turn are attention by another implementation (harmless, in every layer), the rotary base, a mask that is
off by one, and an output projection scaled by 1 %, each in one layer. Printed are the layers in which a blocking
criterion failed on isolated units, the error ratio of the changed layer, and the least cosine and correlation of
any layer in a free run.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
from collections import defaultdict
from pathlib import Path

import moe24

from harness import gate
from harness.checklist import load_checklists
from harness.faults.bench import Ports
from harness.faults.catalogue import TABLE
from harness.faults.lab import Lab, Subject, Traces, make_lab
from harness.faults.models import roughen
from harness.faults.prove import quiet
from harness.metrics.real import cosine, pcc
from harness.stages import StageView, stage_module
from harness.types import Measurement, Trace

CHANGES = ("attention_by_another_kernel", "rope_base", "mask_future", "linear_scaled")


def main() -> None:
    """Build the model, try each change, print a row for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    words = parser.parse_args()
    quiet()
    rows = []
    with tempfile.TemporaryDirectory(prefix="day0-localise-") as scratch:
        model = moe24.build("float32", layers=words.layers, seed=words.seed)
        roughen(model, seed=words.seed)
        model.bfloat16().save_pretrained(scratch)
        del model
        spec = f"hf:{scratch}?attn=eager"
        subject = Subject(name="moe24", checkpoint=Path(scratch), reference=spec, accel=spec)
        lab = make_lab(subject, load_checklists())
        for name in CHANGES:
            rows.append(tried(lab, name))
            print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if words.json:
        words.json.write_text(json.dumps(rows, indent=1))


def tried(lab: Lab, name: str) -> dict[str, object]:
    """Inject one change; return where it was found, and what a plain comparison of layers would have seen."""
    injection = TABLE.rows[name]
    ports = Ports(lab, {}, injection)
    ports(lab.setup)
    traces: Traces = {}
    lab.record(ports, "text", traces)
    runs = lab.runs["text"]
    view = StageView(context=lab.context, runs=runs, trace=lab.trace(traces))
    measurements = stage_module("text").measure(view)
    failing: dict[str, int] = defaultdict(int)
    for criterion in lab.checklists.by_stage["text"]:
        if criterion.blocking:
            for m in gate.failing(criterion, measurements):
                failing[_layer(m.subject)] += bool(m.where.get("level"))
    ports.close()
    own = sorted({_layer(p) for p in ports.places} & {f"layers.{i}" for i in range(lab.context.info.layers)})
    return {
        "change": name, "kind": injection.kind, "injected_in": own,
        "failing_in": {layer: n for layer, n in failing.items() if n},
        "ratio_there": max((_ratio(measurements, layer) for layer in own), default=math.nan),
        "ratio_elsewhere": max(
            _ratio(measurements, f"layers.{i}") for i in range(lab.context.info.layers) if f"layers.{i}" not in own
        ),
        **_plain(lab, traces),
    }  # fmt: skip


def _layer(tap: str) -> str:
    found = re.match(r"layers\.\d+", tap)
    return found.group(0) if found else tap


def _ratio(measurements: list[Measurement], layer: str) -> float:
    """Return the largest whole error ratio of a layer or anything in it, in the declared precision."""
    return max(
        (
            m.value for m in measurements
            if m.metric == "error_ratio" and m.value is not None and m.where.get("slice") == "whole"
            and _layer(m.subject) == layer and m.where.get("precision") == "declared"
        ),
        default=math.nan,
    )  # fmt: skip


def _plain(lab: Lab, traces: Traces) -> dict[str, float]:
    """Return the least cosine and correlation of any layer's output in the free run."""
    folders = lab.schedule.folders
    accel, oracle = traces[folders["accel", "text/free"]], lab.goldens[folders["oracle", "text/free"]]
    assert isinstance(accel, Trace)
    assert isinstance(oracle, Trace)
    pairs = [
        (accel.tensors[n], oracle.tensors[n]) for n in oracle.tensors if re.fullmatch(r"layers\.\d+", n)
    ]  # fmt: skip
    return {
        "least_cosine": min(cosine(actual=a, expected=e) for a, e in pairs),
        "least_pcc": min(pcc(actual=a, expected=e) for a, e in pairs),
    }


def table(rows: list[dict[str, object]]) -> str:
    """Return the rows as markdown."""
    lines = [
        "| change | injected in | failing in | ratio there | elsewhere at most | least cosine | least PCC |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    for r in rows:
        failing = ", ".join(r["failing_in"]) or "nowhere"  # type: ignore[arg-type]
        own = ", ".join(r["injected_in"]) if r["kind"] == "fault" else "every layer"  # type: ignore[arg-type]
        numbers = " | ".join(f"{r[k]:.3f}" for k in ("ratio_there", "ratio_elsewhere", "least_cosine", "least_pcc"))
        lines.append(f"| {r['change']} | {own} | {failing} | {numbers} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
