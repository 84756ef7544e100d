"""Synthetic traces: an oracle, honest floors around it, and an accel that a test bends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from harness.compare import compare_run
from harness.taps import kind_of
from harness.types import Case, Failure, Measurement, Run, Scope, Setup, Tap, Trace

TOKENS, WIDTH, EXPERTS = 48, 32, 8
SETUP = Setup(side="reference", role="oracle", adapter="synthetic")
DIMS = {
    "routing": "token choice",
    "selection": "batch token choice",
    "scores": "token expert",
    "logits": "batch token vocab",
}


def normal(*shape: int, seed: int) -> Tensor:
    """Return seeded float32 noise."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run_of(level: int = 1, **more: Any) -> Run:
    """Return a replay (or a free run at level 0) of a small case."""
    name = f"text/replay{level}" if level else "text/free"
    case = Case(id="c", token_ids=tuple(range(TOKENS)))
    return Run(**{"id": name, "stage": "text", "kind": "forward", "case": case, "level": level, **more})


def trace(tensors: Mapping[str, Tensor], run: Run, dims: Mapping[str, str] | None = None, **facts: Any) -> Trace:
    """Return a trace of tensors, axes named by kind unless `dims` says otherwise."""
    taps = {}
    for name in tensors:
        words = (dims or {}).get(name) or DIMS.get(kind_of(name), "batch token feature")
        taps[name] = Tap(name=name, kind=kind_of(name), dims=tuple(words.split()))
    return Trace(setup=SETUP, run=run, taps=taps, tensors=dict(tensors), facts=facts)


def hidden(seed: int, width: int = WIDTH) -> Tensor:
    """Return a hidden state [1, T, E]."""
    return normal(1, TOKENS, width, seed=seed)


def noisy(tensors: Mapping[str, Tensor], seed: int, size: float = 0.004) -> dict[str, Tensor]:
    """Return tensors with honest noise: relative, independent, of about one bf16 rounding; decisions follow scores."""
    found = {}
    for i, (name, value) in enumerate(tensors.items()):
        found[name] = (
            value * (1 + size * normal(*value.shape, seed=1000 * seed + i)) if value.is_floating_point() else value
        )
    for name in list(found):
        if kind_of(name) in ("routing", "selection") and name + ".scores" in found:
            found[name] = found[name + ".scores"].topk(found[name].shape[-1]).indices.reshape(found[name].shape)
    return found


def compare(
    accel: Trace | Failure | Mapping[str, Tensor] | None,
    oracle: Mapping[str, Tensor],
    run: Run | None = None,
    *,
    dims: Mapping[str, str] | None = None,
    scope: Scope | None = None,
    floors: int = 3,
) -> list[Measurement]:
    """Compare an accel's tensors with an oracle's and with honest floors around it."""
    run = run or run_of()
    return compare_run(
        stage="text",
        run=run,
        oracle=trace(oracle, run, dims),
        floors=[trace(noisy(oracle, seed), run, dims) for seed in range(1, 1 + floors)],
        accel=accel if accel is None or isinstance(accel, (Trace, Failure)) else trace(accel, run, dims),
        scope=scope or Scope(),
        dtype="bfloat16",
    )


def value(found: list[Measurement], metric: str, subject: str = "", slice: str = "") -> Measurement:
    """Return the one measurement of a metric, a subject and a slice."""
    hits = [
        m for m in found
        if m.metric == metric and subject in ("", m.subject) and slice in ("", m.where.get("slice", ""))
    ]  # fmt: skip
    assert len(hits) == 1, [(m.metric, m.subject, dict(m.where)) for m in hits or found]
    return hits[0]
