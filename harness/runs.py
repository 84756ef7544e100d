"""What a worker does for each kind of run. Knows the adapter protocol; must not know processes or limits.

Needs torch, safetensors, numpy and the standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.adapter import Adapter, Inputs, Recorder, Roundable, capabilities, silent
from harness.errors import PortError
from harness.precision.declare import Rounds
from harness.precision.scheme import parse_precision
from harness.recorder import Pins, TraceRecorder
from harness.types import Facts, Run, Setup, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """An opened adapter and what its runs may need: where the checkpoint is, what loading observed, whom to tell.

    `copied` makes the copies that a recorder keeps, where they shall not lie in memory. `folder` is for what a run
    leaves beside its trace.
    """

    adapter: Adapter
    setup: Setup
    checkpoint: Path
    load_facts: Facts
    beat: Callable[[str], None]
    copied: Callable[[Tensor], Tensor] | None = None
    folder: Path = Path()


def execute(bench: Bench, run: Run, *, pins: Pins | None, expected: Trace | None) -> Trace:
    """Do one run and return what it observed.

    `pins` are the values to replay. `expected` is the same run of the oracle (a floor follows its tokens).
    Raises PortError for a run the port cannot do, and whatever the port raises.
    """
    kinds: dict[str, Callable[[Bench, Run, TraceRecorder, Trace | None], Facts]] = {
        "load": _load,
        "content": _content,
        "weights": _weights,
        "conversion": _conversion,
        "forward": _forward,
        "steps": _steps,
        "simulate": _simulate,
        "generate": _generate,
        "latency": _latency,
        "chat": _chat,
        "concurrent": _concurrent,
        "serve": _serve,
        "search": _search,
        "operators": _operators,
        "shadow": _shadow,
    }
    if run.kind not in kinds:
        raise PortError(f"expected a run of kind {', '.join(sorted(kinds))}, found {run.kind!r} in {run.id}")
    statistics = bool(run.options.get("statistics"))
    recorder = TraceRecorder(
        pins=pins, keep=run.taps, beat=bench.beat, oracle=bench.setup.role == "oracle", statistics=statistics,
        copied=bench.copied,
    )  # fmt: skip
    if isinstance(rounds := getattr(bench.adapter, "rounding", None), Rounds):
        rounds.jitter = run.jitter
    torch.manual_seed(run.case.seed if run.case else 0)
    before = _reset_peak()
    begin = time.perf_counter()
    with torch.no_grad():
        facts = dict(kinds[run.kind](bench, run, recorder, expected))
    facts.setdefault("wall_s", time.perf_counter() - begin)
    facts.setdefault("peak_bytes", peak_bytes())
    facts.setdefault("resident_before_bytes", before)
    if "window_bytes" in bench.load_facts:
        facts.setdefault("window_bytes", bench.load_facts["window_bytes"])
    facts["pinned"] = sorted(recorder.pinned)
    facts["notes"] = dict(recorder.notes)
    if statistics:
        facts["statistics"] = recorder.statistics()
    facts["modules"] = dict(getattr(bench.adapter, "module_paths", {}))
    return Trace(setup=bench.setup, run=run, taps=recorder.taps, tensors=recorder.tensors(), facts=facts)


def _prepare(bench: Bench, run: Run, record: Recorder) -> Inputs:
    if run.case is None:
        raise PortError(f"expected a case in run {run.id}, found none")
    return bench.adapter.prepare(run.case, record)


def _keep_logits(recorder: TraceRecorder, logits: Tensor) -> None:
    """Record the logits under their own name if the port did not (they are never overwritten)."""
    if not recorder.tokens("logits"):
        recorder("logits", logits, dims="batch token vocab", kind="logits")


def _conversion(bench: Bench, run: Run, recorder: TraceRecorder, expected: Trace | None) -> Facts:
    from harness.conversion import conversion_facts

    return conversion_facts(_capable(bench, "converts", run), bench.checkpoint, bench.beat)


def _forward(bench: Bench, run: Run, recorder: TraceRecorder, expected: Trace | None) -> Facts:
    inputs = _prepare(bench, run, recorder)
    length = inputs.token_ids.shape[-1]
    recorder.span(0, length)
    eager: Any = _capable(bench, "compiled", run).uncompiled if run.options.get("eager") else nullcontext
    with eager():
        logits = bench.adapter.forward(inputs, recorder if run.observe else silent)
    _keep_logits(recorder, logits)
    return {"length_tokens": length}


def _steps(bench: Bench, run: Run, recorder: TraceRecorder, expected: Trace | None) -> Facts:
    from harness.phases import NEEDS, Walk, walked

    port: Any = _capable(bench, "phases", run)
    if run.options.get("walk"):
        _capable(bench, NEEDS[run.options["walk"]], run)
    inputs = _prepare(bench, run, recorder)
    length = inputs.token_ids.shape[-1]
    walk = Walk(port=port, run=run, inputs=inputs, recorder=recorder, wait=synchronize)
    facts = walked(walk, spans(run.steps, length))
    return {**facts, "length_tokens": length, "step_s": walk.seconds, **_cache_facts(bench)}


def spans(steps: tuple[tuple[int, int], ...], length: int) -> list[tuple[int, int]]:
    """Return the spans of a run for a request of `length` tokens; a stop below 1 counts from the end (0 is the end)."""
    return [(start, stop if 0 < stop <= length else length + min(0, stop)) for start, stop in steps if start < length]


def _simulate(bench: Bench, run: Run, recorder: TraceRecorder, expected: Trace | None) -> Facts:
    port: Any = _capable(bench, "multi_card", run)
    inputs = _prepare(bench, run, recorder)
    recorder.span(0, inputs.token_ids.shape[-1])
    _keep_logits(recorder, port.simulate(run.layout, inputs, recorder))
    return {"length_tokens": inputs.token_ids.shape[-1]}


def _generate(bench: Bench, run: Run, recorder: TraceRecorder, expected: Trace | None) -> Facts:
    """Generate greedily; oracle and floor also give the logits of the oracle's prompt and continuation."""
    inputs = _prepare(bench, run, recorder)
    prompt = [int(i) for i in inputs.token_ids.reshape(-1)]
    count = run.case.max_new_tokens if run.case else 1
    told: Facts = {}
    begin = time.perf_counter()
    if bench.setup.role == "floor" and expected is not None:
        ids = [int(i) for i in expected.facts["token_ids"]]
    else:
        ids, told = _generated(bench, run, inputs, count)
    synchronize()
    seconds = time.perf_counter() - begin
    facts = {
        **told,
        "token_ids": ids,
        "prompt_tokens": len(prompt),
        "generate_s": seconds,
        "tokens_per_s": len(ids) / max(seconds, 1e-9),
    }
    if bench.setup.role in ("oracle", "floor") and not inputs.extras:
        whole = torch.tensor([prompt + ids], dtype=torch.int64, device=inputs.token_ids.device)
        recorder.span(0, whole.shape[-1])
        logits = bench.adapter.forward(Inputs(token_ids=whole), silent)
        recorder("logits", logits, dims="batch token vocab", kind="logits")
    else:
        facts.update(_first_token_s(bench, inputs))
    return facts


def _generated(bench: Bench, run: Run, inputs: Inputs, count: int) -> tuple[list[int], Facts]:
    """Return greedy ids, and what the port tells of its drafts where the run asks for some."""
    if "drafts" not in run.options:
        return [int(i) for i in bench.adapter.generate(inputs, count, silent)], {}
    ids, told = _capable(bench, "drafts", run).speculate(inputs, count, int(run.options["drafts"]))
    return [int(i) for i in ids], dict(told)


def _first_token_s(bench: Bench, inputs: Inputs) -> Facts:
    begin = time.perf_counter()
    bench.adapter.generate(inputs, 1, silent)
    synchronize()
    return {"ttft_s": time.perf_counter() - begin}


def _latency(bench: Bench, run: Run, recorder: TraceRecorder, expected: Trace | None) -> Facts:
    """Time a prefill and single decode steps, unobserved; the first `warmup` steps are not counted."""
    port: Any = _capable(bench, "phases", run)
    inputs = _prepare(bench, run, silent)
    length = inputs.token_ids.shape[-1]
    count, warmup = int(run.options.get("decode_steps", 64)), int(run.options.get("warmup", 4))
    first = max(1, length - count - warmup)
    slot = port.open()
    begin = time.perf_counter()
    port.step(slot, inputs, 0, first, silent)
    synchronize()
    prefill_s = time.perf_counter() - begin
    seconds = []
    for start in range(first, length):
        bench.beat(f"decode {start}")
        begin = time.perf_counter()
        port.step(slot, inputs, start, start + 1, silent)
        synchronize()
        seconds.append(time.perf_counter() - begin)
    port.free(slot)
    return {
        "prefill_tokens": first,
        "prefill_s": prefill_s,
        "ttft_s": prefill_s,
        "step_s": seconds[warmup:],
        **_cache_facts(bench),
    }


def _load(bench: Bench, run: Run, recorder: TraceRecorder, expected: Trace | None) -> Facts:
    from harness.checkpoint import checkpoint_facts

    return {**bench.load_facts, "checkpoint": checkpoint_facts(bench.checkpoint)}


def _content(bench: Bench, run: Run, recorder: TraceRecorder, expected: Trace | None) -> Facts:
    from harness.checkpoint import open_checkpoint
    from harness.checkpoint.scan import content_facts

    return content_facts(open_checkpoint(bench.checkpoint), told=bench.beat)


def _weights(bench: Bench, run: Run, recorder: TraceRecorder, expected: Trace | None) -> Facts:
    from harness.checkpoint import audit_facts

    port: Any = _capable(bench, "weights", run)

    def told() -> Any:
        for weight in port.weights():
            bench.beat(weight.name)
            yield weight

    tables = getattr(bench.adapter, "tables", tuple)
    declared = parse_precision({**bench.adapter.scope.precision, **bench.setup.precision})
    return {
        "audit": audit_facts(bench.checkpoint, told, bench.setup.dtype, declared),
        "tables": {name: [float(x) for x in table.flatten()] for name, table in tables()},
    }


def _chat(bench: Bench, run: Run, recorder: TraceRecorder, expected: Trace | None) -> Facts:
    from harness import exercise

    return dict(exercise.chat(_capable(bench, "chat", run), run.options))


def _concurrent(bench: Bench, run: Run, recorder: TraceRecorder, expected: Trace | None) -> Facts:
    from harness import exercise

    return dict(exercise.concurrent(_capable(bench, "phases", run), run, bench.beat))


def _serve(bench: Bench, run: Run, recorder: TraceRecorder, expected: Trace | None) -> Facts:
    from harness import served

    return dict(served.serve(_capable(bench, "serves", run), run, bench.beat))


def _operators(bench: Bench, run: Run, recorder: TraceRecorder, expected: Trace | None) -> Facts:
    from harness.ops.facts import operator_facts

    if run.case is None:
        raise PortError(f"expected a case in run {run.id}, found none")
    return operator_facts(bench.adapter, bench.setup, run.case, run.options, bench.beat)


def _shadow(bench: Bench, run: Run, recorder: TraceRecorder, expected: Trace | None) -> Facts:
    from harness.shadow.facts import shadow_facts

    if run.case is None:
        raise PortError(f"expected a case in run {run.id}, found none")
    return shadow_facts(bench.adapter, bench.setup, run.case, run.options, bench.folder, bench.beat)


def _search(bench: Bench, run: Run, recorder: TraceRecorder, expected: Trace | None) -> Facts:
    from harness.cases import read_model_info
    from harness.search import search

    return dict(search(bench.adapter, read_model_info(bench.checkpoint), run, bench.beat))


def _capable(bench: Bench, capability: str, run: Run) -> Any:
    found = capabilities(bench.adapter)
    if capability not in found:
        raise PortError(
            f"run {run.id} needs the capability {capability!r}; {bench.adapter.name} has {', '.join(found) or 'none'}"
        )
    return bench.adapter


def _cache_facts(bench: Bench) -> Facts:
    return {"cache": dict(bench.adapter.cache_facts())} if "cache" in capabilities(bench.adapter) else {}  # type: ignore[attr-defined]


def synchronize() -> None:
    """Wait for the accelerator, where there is one."""
    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        accelerator.synchronize()


def peak_bytes() -> int:
    """Return the peak memory since the last reset: of the accelerator where there is one, otherwise resident memory."""
    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available() and hasattr(accelerator, "max_memory_allocated"):
        return int(accelerator.max_memory_allocated())
    return _status_bytes("VmHWM")


def _reset_peak() -> int:
    """Reset the peak counters and return the memory in use now, in bytes."""
    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available() and hasattr(accelerator, "reset_peak_memory_stats"):
        accelerator.reset_peak_memory_stats()
        return int(accelerator.memory_allocated())
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0  # not Linux, or not permitted: the peak then covers the whole life of the process
    return _status_bytes("VmRSS")


def _status_bytes(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), 0)


def opened(adapter: Adapter, checkpoint: Path, setup: Setup) -> Facts:
    """Load an adapter and return what loading observed, with `load_s`, `peak_bytes` above what was resident before.

    A floor is then made to compute in the precision that the port declares.
    """
    before = _reset_peak()
    begin = time.perf_counter()
    facts: Mapping[str, Any] = adapter.load(checkpoint, setup) or {}
    if setup.role == "floor" and setup.precision:
        if not isinstance(adapter, Roundable):
            raise PortError(f"{adapter.name} cannot compute in a declared precision: it has no round_with()")
        adapter.round_with(Rounds(parse_precision(setup.precision)))
    synchronize()
    seen = {"load_s": time.perf_counter() - begin, "peak_bytes": max(0, peak_bytes() - before)}
    return {**facts, **{f"reported_{k}": facts[k] for k in seen if k in facts}, **seen}


__all__ = ["Bench", "execute", "opened", "peak_bytes", "spans", "synchronize"]
