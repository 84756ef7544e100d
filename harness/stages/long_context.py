"""The long-context stage: lengths around the model's own edges, by position; latency, memory. No limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.cases import ModelInfo, text_case
from harness.compare.subject import measured
from harness.metrics.latency import jitter_ratio, median, p90
from harness.metrics.memory import peak_over_plan
from harness.stages import StageContext, StageView
from harness.stages.exercised import exercised
from harness.stages.replays import LAYERS_ONLY, free_and_replays, measure_runs, phase, spans_of
from harness.types import Failure, Measurement, Run, Trace

NAME = "long_context"
NEEDS: tuple[str, ...] = ("text",)
QUICK_RUNGS, QUICK_LONGEST = 5, 257
BEYOND, MOST_KEPT = 17, 4096
"""Tokens beyond what a selection keeps, and the most that it may keep for the quick profile to go there."""
SHORTEST = 5
DECODE_STEPS, WARMUP = 64, 4
BUCKETS = 16
SLACK_BYTES = 96 << 20
"""Memory that a first call may take for kernels, threads and allocator pools, whatever the model."""


def rungs(context: StageContext) -> list[int]:
    """Return the lengths to look at, ascending: around each edge, and just above powers of two.

    The longest permitted length is always one; the quick profile keeps the nearest edges and at most `QUICK_RUNGS`.
    """
    claimed = min(context.scope.max_length_tokens, context.info.max_length_tokens)
    kept = [edge + BEYOND for name, edge in context.info.edges.items() if "topk" in name and edge <= MOST_KEPT]
    longest = claimed if context.full else min(claimed, max([QUICK_LONGEST, *kept]))
    edges = sorted({e for e in context.info.edges.values() if e < longest}, reverse=True)
    around = [e + step for step in (1, 0, -1) for e in edges]
    powers = [(1 << k) + 1 for k in range(16, 4, -1)]
    wanted = [longest, *around, *powers]
    lengths = list(dict.fromkeys(n for n in wanted if SHORTEST <= n <= longest))
    return sorted(lengths if context.full else lengths[:QUICK_RUNGS])


def plan(context: StageContext) -> list[Run]:
    """Plan a layer replay per rung, chunks at length, one unobserved run for memory, and single steps for latency."""
    runs: list[Run] = []
    lengths = rungs(context)
    for length in lengths:
        case = text_case(context.info, length, seed=7, kind="long")
        for run in free_and_replays(context, NAME, case, suffix=f"-{length}"):
            if run.level <= 1:
                taps = () if run.level else LAYERS_ONLY
                runs.append(replace(run, taps=taps, options={"buckets": BUCKETS}))
    longest = max(lengths)
    case = text_case(context.info, longest, seed=7, kind="long")
    alone = {"alone": True}  # its memory is its own
    runs.append(Run(id="long_context/memory", stage=NAME, kind="forward", case=case, observe=False, options=alone))
    if "phases" in context.capabilities:
        chunk = max(1, longest // 4 - 1)
        spans = spans_of(longest, range(chunk, longest, chunk))
        runs.append(phase(context, NAME, "chunked", case, spans, suffix=f"-{longest}"))
        options = {"decode_steps": DECODE_STEPS, "warmup": WARMUP}
        runs.append(
            Run(id="long_context/latency", stage=NAME, kind="latency", case=case, observe=False, options=options)
        )
    return runs


def measure(view: StageView) -> list[Measurement]:
    """Compare every rung with the oracle, then peak memory with a plan, then decode latency."""
    found = [*measure_runs(view, NAME, view.runs), *exercised(view, NAME)]
    for run in view.runs:
        trace = view.trace("accel", run.id)
        if run.id == "long_context/memory":
            found.append(_memory(view, run, trace))
        elif run.kind == "latency":
            found += _latency(run, trace)
    return found


def _memory(view: StageView, run: Run, trace: Trace | Failure | None) -> Measurement:
    if not isinstance(trace, Trace):
        return _lost(run, "peak_over_plan", trace)
    facts, length = trace.facts, len(run.case.token_ids or ()) if run.case else 0
    own = facts.get("planned_bytes")
    held = facts.get("resident_before_bytes", 0) + facts.get("window_bytes", 0)  # of a port whose weights pass by
    planned = own or held + workspace_bytes(view.context.info, length)
    peak = facts.get("peak_bytes", 0)
    detail = {"peak_bytes": peak, "planned_bytes": planned, "plan": "the port's" if own else "resident + workspace"}
    value = peak_over_plan(peak_bytes=peak, planned_bytes=planned)
    return measured(NAME, run, "peak_over_plan", value, subject="forward", n=length, detail=detail)


def workspace_bytes(info: ModelInfo, length: int) -> int:
    """Return what one prefill of `length` tokens may take beside weights: nothing of it outlives a layer but the cache.

    Generous on purpose (float32, attention scores in full, every expert on every token): it catches growth by layer,
    by step or by request, not a factor of two.
    """
    config: Mapping[str, Any] = info.config.get("text_config") or info.config

    def number(*keys: str, default: int) -> int:
        return next((int(config[k]) for k in keys if isinstance(config.get(k), (int, float))), default)

    hidden = number("hidden_size", "n_embd", default=1024)
    heads = number("num_attention_heads", "n_head", default=16)
    inner = number("intermediate_size", "moe_intermediate_size", default=4 * hidden)
    experts = number("n_routed_experts", "num_local_experts", "num_experts", default=1)
    cache = info.layers * length * hidden * 2
    scores = 6 * max(heads, number("index_n_heads", default=0)) * length * length
    return SLACK_BYTES + 4 * (
        scores + length * (24 * hidden + 6 * inner * max(1, experts) + 4 * info.vocab_size) + cache
    )


def _latency(run: Run, trace: Trace | Failure | None) -> list[Measurement]:
    metrics = ("decode_latency_median_s", "decode_latency_p90_s", "decode_jitter_ratio")
    if not isinstance(trace, Trace) or not trace.facts.get("step_s"):
        return [_lost(run, m, trace if isinstance(trace, Failure) else None) for m in metrics]
    samples = [float(s) for s in trace.facts["step_s"]]
    found = []
    for metric, value in zip(metrics, (median(samples), p90(samples), jitter_ratio(samples)), strict=True):
        problem = "" if value is not None else "too_few"
        detail = {} if value is not None else {"message": f"{len(samples)} steps are too few for a p90"}
        found.append(
            measured(NAME, run, metric, value, subject="decode", n=len(samples), problem=problem, detail=detail)
        )
    return found


def _lost(run: Run, metric: str, trace: Trace | Failure | None) -> Measurement:
    why = f"{trace.kind}: {trace.message}" if isinstance(trace, Failure) else "not recorded"
    return measured(NAME, run, metric, None, subject="run", problem="error", detail={"message": f"{run.id}: {why}"})
