"""How often honest ports break each limit: seeds x architectures x harmless differences, against the checklists.

    python benchmarks/calibrate.py [--seeds 20] [--architectures A,B,C] [--stages text,image] [--write DIR]

Every harmless difference of the catalogue (other kernels, rounding points, orders of sums, batches, implementations of
attention and experts), a compiled port and the processor's other instruction sets are run on models of random weights.
For each criterion it prints in how many honest runs it was broken, with the 95 % upper bound of that rate, and how much
of the limit the worst one used. `--write DIR` puts that as `calibrated` beside each limit in `DIR/<stage>.toml`; limits
themselves are never changed by it. On your own machine and model, run it with `--model hf:FOLDER`: your own noise then
tells whether the shipped limits are yours.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from harness import gate
from harness.checklist import load_checklists
from harness.errors import PortError
from harness.faults import models
from harness.faults.bench import Ports
from harness.faults.catalogue import TABLE, Injection, NoPlace
from harness.faults.lab import TIMED, Lab, Subject, Traces, make_lab
from harness.faults.prove import quiet
from harness.golden import load_trace, save_trace
from harness.plugins import parse_spec
from harness.record import Session, Watchdog
from harness.stages import StageView, stage_module
from harness.types import Criterion, Failure, Measurement, Trace

ARCHITECTURES = ("llama", "qwen3_moe", "deepseek_v32")
OPTIONS = {"attention sdpa": "attn=sdpa", "experts grouped": "attn=eager&experts=grouped_mm"}
COMPILED = "attn=eager&compile=aot_eager"
NOT_HERE = (*TIMED, "peak_over_plan")
"""Metrics of time and memory: the process that runs here holds the reference too."""
INSTRUCTIONS = (("ATEN_CPU_CAPABILITY", "default"), ("ONEDNN_MAX_CPU_ISA", "AVX2"))


@dataclass(slots=True)
class Tally:
    """Honest runs of one criterion: how many, how many broke it, and the largest share of the limit that one used."""

    runs: int = 0
    broken: list[str] = field(default_factory=list)
    used: float = 0.0
    worst: str = ""


def main() -> None:
    """Run, print the table, write what is asked for."""
    words = _words()
    quiet()
    tallies: dict[str, Tally] = defaultdict(Tally)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="day0-calibrate-") as scratch:
        for number, (name, subject) in enumerate(_subjects(words, Path(scratch))):
            count = sum(_counted(tallies, lab, name, Path(scratch) / f"runs-{number}", number, words)
                        for lab in _labs(subject, number, words.share))  # fmt: skip
            print(f"{name}: {count} honest runs, {time.perf_counter() - begin:.0f} s", flush=True)
            if words.json:
                words.json.write_text(json.dumps({k: asdict(t) for k, t in tallies.items()}, indent=1))
    print(table(tallies))
    if words.write:
        about = f"{words.seeds} seeds of {words.architectures.replace(',', ', ')}"
        write(words.write, tallies, "own model" if words.model else about)


def _labs(subject: Subject, number: int, share: int) -> Iterator[Lab]:
    """Yield a subject as it is and, in one of `share`, as a port that declares each of the catalogue's formats."""
    said = {tuple(sorted(row.declares.items())) for row in TABLE.of("benign", "module").values()}
    for declares in sorted(said):
        if not declares or number % share == 0:
            lab = make_lab(replace(subject, precision=dict(declares)), load_checklists())
            try:
                yield lab
            finally:
                lab.close()


def _counted(
    tallies: dict[str, Tally], lab: Lab, name: str, scratch: Path, number: int, words: argparse.Namespace
) -> int:
    """Count the honest ports of one lab, and return how many there were."""
    stages = [s for s in words.stages.split(",") if s in lab.runs]
    criteria = [c for s in stages for c in lab.checklists.by_stage[s] if not c.metric.startswith(NOT_HERE)]
    count = 0
    for label, measurements in honest(lab, scratch, number, words.share, stages):
        take(tallies, criteria, f"{name} {label}", measurements)
        count += 1
    return count


def _words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--architectures", default=",".join(ARCHITECTURES))
    parser.add_argument("--stages", default="text", help="of those that a model has: text,image,long_context")
    parser.add_argument("--model", default="", help="hf:FOLDER of a model of your own, instead of random ones")
    parser.add_argument("--share", type=int, default=1, help="each model takes one in so many differences, by turns")
    parser.add_argument("--write", type=Path, metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def _subjects(words: argparse.Namespace, scratch: Path) -> Iterator[tuple[str, Subject]]:
    if words.model:
        folder = Path(words.model.removeprefix("hf:"))
        spec = f"hf:{folder}?attn=eager"
        yield folder.name, Subject(name=folder.name, checkpoint=folder, reference=spec, accel=spec)
        return
    for seed in range(words.seeds):
        for architecture in words.architectures.split(","):
            name = f"{architecture} seed {seed}"
            folder = models.build(architecture, scratch / f"{architecture}-{seed}", seed=seed)
            spec = f"hf:{folder}?attn=eager"
            subject = Subject(name=architecture, checkpoint=folder, reference=spec, accel=spec)
            yield name, subject


def honest(
    lab: Lab, scratch: Path, number: int, share: int, stages: Sequence[str]
) -> Iterator[tuple[str, list[Measurement]]]:
    """Yield the measurements of a subject's honest ports, by label: one in `share` of them, by turns.

    Ports that declare a format are few, and each of them is taken.
    """
    declared = dict(lab.subject.precision)
    for turn, (label, record) in enumerate(_ways(lab, scratch, stages), start=1):
        if (turn + number) % share and not declared:
            continue
        try:
            yield label, measured(lab, record(), stages)
        except NoPlace:
            continue


def _ways(lab: Lab, scratch: Path, stages: Sequence[str]) -> Iterator[tuple[str, Callable[[], Traces]]]:
    """Yield every honest port of a subject as a label and a function that records it."""
    for injection in TABLE.of("benign", "module").values():
        if dict(injection.declares) == dict(lab.subject.precision):
            yield injection.name, partial(_injected, lab, injection, stages)
    if lab.subject.precision:
        return
    base = lab.subject.reference.partition("?")[0]
    for label, query in OPTIONS.items():
        if "experts" not in query or lab.context.info.experts:
            yield label, partial(_in_a_process, lab, scratch / label.replace(" ", "-"), f"{base}?{query}", stages)
    if not lab.context.info.experts:
        yield "compiled", partial(_in_a_process, lab, scratch / "compiled", f"{base}?{COMPILED}", stages)
    for variable, value in INSTRUCTIONS:
        yield f"{variable}={value}", partial(_with_variable, lab, scratch / variable, variable, value, stages)


def _injected(lab: Lab, injection: Injection, stages: Sequence[str]) -> Traces:
    ports = Ports(lab, {}, injection)
    try:
        ports(lab.setup)
        return _recorded(lab, ports, stages)
    except PortError as error:  # a model that refuses an injection while its inputs are found out has no place for it
        raise NoPlace(str(error)) from error
    finally:
        ports.close()


def _with_variable(lab: Lab, scratch: Path, variable: str, value: str, stages: Sequence[str]) -> Traces:
    with _environment(variable, value):
        return _in_a_process(lab, scratch, lab.subject.accel, stages)


def _recorded(lab: Lab, ports: Ports, stages: Sequence[str]) -> Traces:
    traces: Traces = {}
    for stage in stages:
        lab.record(ports, stage, traces)
    return traces


def _in_a_process(lab: Lab, scratch: Path, spec: str, stages: Sequence[str]) -> Traces:
    """Record a port in a worker of its own, replaying the goldens of this process."""
    ids = {run.id for stage in stages for run in lab.runs[stage]}
    for stage in stages:
        lab.record_goldens(stage)
    session = Session(
        scratch / "session", spec=spec, checkpoint=lab.subject.checkpoint, watchdog=Watchdog(), python=sys.executable
    )
    traces: Traces = {}
    options = {k: v for k, v in parse_spec(spec).options.items() if k not in ("dtype", "device")}
    try:
        for job in lab.schedule.of("accel"):
            hidden = "compile" in options and (job.run.dtype or job.run.level > 1)
            if job.run.id not in ids or hidden:
                continue
            for place in filter(None, (job.pins, job.expected)):
                golden = lab.goldens[place]
                if isinstance(golden, Trace) and not (scratch / place / "manifest.json").is_file():
                    save_trace(scratch / place, golden)
            failure = session.run(
                job.run,
                replace(job.setup, adapter=spec, options=options),
                scratch / "port" / job.run.id,
                pins=scratch / job.pins if job.pins else None,
                pin_dtype=job.run.dtype or lab.context.dtype,
                expected=scratch / job.expected if job.expected else None,
            )
            traces[job.folder] = failure or load_trace(scratch / "port" / job.run.id)
    finally:
        session.close()
    return traces


@contextmanager
def _environment(variable: str, value: str) -> Iterator[None]:
    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        yield
    finally:
        del os.environ[variable]
        if before is not None:
            os.environ[variable] = before


def measured(lab: Lab, traces: Traces, stages: Sequence[str]) -> list[Measurement]:
    """Measure every run of the stages that has a trace. Raises RuntimeError where an honest port raised."""
    lost = [t for t in traces.values() if isinstance(t, Failure)]
    if any("NoPlace" in f.message or "does not support" in f.message for f in lost):
        raise NoPlace(lost[0].message)
    if lost:
        raise RuntimeError(f"an honest port broke: {lost[0].message}")
    found: list[Measurement] = []
    for stage in stages:
        folders = lab.schedule.folders
        runs = [r for r in lab.runs[stage] if folders.get(("accel", r.id)) in traces or r.kind == "search"]
        view = StageView(context=lab.context, runs=runs, trace=lab.trace(traces))
        found += stage_module(stage).measure(view)
    return found


def take(
    tallies: dict[str, Tally], criteria: Sequence[Criterion], label: str, measurements: Sequence[Measurement]
) -> None:
    """Count one honest run under every criterion that covers anything of it."""
    by_metric: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
    for m in measurements:
        by_metric[m.stage, m.metric].append(m)
    for criterion in criteria:
        about = [
            m for m in by_metric[criterion.stage, criterion.metric] if gate.covers(criterion, m) and m.value is not None
        ]
        if not about:
            continue
        tally = tallies[criterion.id]
        tally.runs += 1
        used, worst = max(((usage(criterion, m), m) for m in about), key=lambda pair: pair[0])
        if used > tally.used:
            place = worst.where.get(str(worst.where.get("slice", "")), "")
            tally.used, tally.worst = used, f"{label}, {worst.run} {worst.subject} {place}".strip()
        if any(gate.status_of(criterion, m) is not gate.Status.PASSED for m in about):
            tally.broken.append(label)


def usage(criterion: Criterion, m: Measurement) -> float:
    """Return how much of its limit a value takes: 1 is at the limit. Equalities take all of it or nothing."""
    limit, value = gate.limit_at(criterion, m.n), m.value
    assert value is not None
    if math.isnan(value):
        return math.inf
    if criterion.op == "<=" and limit > 0:
        return value / limit
    if criterion.op == ">=" and value > 0:
        return limit / value
    return 0.0 if gate.status_of(criterion, m) is gate.Status.PASSED else math.inf


def rate_bound(broken: int, runs: int) -> float:
    """Return the 95 % upper bound of a rate (Clopper-Pearson), found by bisection of the binomial tail."""
    low, high = broken / runs, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        tail = sum(math.comb(runs, k) * middle**k * (1 - middle) ** (runs - k) for k in range(broken + 1))
        low, high = (middle, high) if tail > 0.05 else (low, middle)
    return high


def table(tallies: dict[str, Tally]) -> str:
    """Return the table as markdown."""
    lines = [
        "| criterion | honest runs | broken | rate below (95 %) | most of the limit | where |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for name, t in tallies.items():
        bound = rate_bound(len(t.broken), t.runs)
        lines.append(f"| {name} | {t.runs} | {len(t.broken)} | {bound:.2%} | {t.used:.2f} | {t.worst} |")
    return "\n".join(lines)


def write(folder: Path, tallies: dict[str, Tally], about: str) -> None:
    """Put what was found beside each limit, as the line `calibrated`."""
    for file in sorted(folder.glob("*.toml")):
        parts = re.split(r"(?m)^(?=\[\[criteria\]\]$)", file.read_text())
        file.write_text("".join(_with_line(part, tallies, about) for part in parts))


def _with_line(part: str, tallies: dict[str, Tally], about: str) -> str:
    named = re.search(r'(?m)^id = "([^"]+)"$', part)
    tally = tallies.get(named.group(1)) if named else None
    if tally is None or not part.startswith("[[criteria]]"):
        return part
    bound = rate_bound(len(tally.broken), tally.runs)
    words = (
        f"{len(tally.broken)} of {tally.runs} honest runs broke it (rate below {bound:.1%} at 95 %), "
        f"the worst used {tally.used:.2f} of it; {about}"
    )
    part = re.sub(r'(?m)^calibrated = ".*"\n', "", part)
    return re.sub(r"(?m)^(source = .*)$", rf'\1\ncalibrated = "{words}"', part, count=1)


if __name__ == "__main__":
    main()
