"""What the tests of the port do over and over: name a setup, record a run, compare two."""

from __future__ import annotations

from typing import Any

import torch

from accel_impl.port import AccelAdapter
from harness.recorder import TraceRecorder
from harness.types import Case, Setup

DECODE_FROM = 13
"""Tokens of a stepped run that come as a prefill and a chunk; the rest are decoded one by one."""


def setup_of(dtype: str, **options: str) -> Setup:
    return Setup(side="accel", role="accel", adapter="builtin:accel", dtype=dtype, options=options)


def whole(port: Any, case: Case, recorder: TraceRecorder | None = None) -> TraceRecorder:
    """Record a whole prefill."""
    recorder = recorder or TraceRecorder()
    inputs = port.prepare(case, recorder)
    recorder.span(0, inputs.token_ids.shape[1])
    port.forward(inputs, recorder)
    return recorder


def stepped(port: AccelAdapter, case: Case, recorder: TraceRecorder | None = None) -> TraceRecorder:
    """Record the same request as a prefill, a chunk and single decode steps."""
    recorder = recorder or TraceRecorder()
    inputs = port.prepare(case, recorder)
    length = inputs.token_ids.shape[1]
    slot = port.open()
    for start, stop in [(0, 7), (7, DECODE_FROM), *((i, i + 1) for i in range(DECODE_FROM, length))]:
        recorder.span(start, stop)
        port.step(slot, inputs, start, stop, recorder)
    port.free(slot)
    return recorder


def furthest(actual: TraceRecorder, expected: TraceRecorder) -> tuple[float, str]:
    """Return the greatest relative difference over all taps, and where; unequal decisions count as infinite."""
    worst, a, b = (0.0, ""), actual.tensors(), expected.tensors()
    assert list(a) == list(b)
    for name, value in b.items():
        assert a[name].shape == value.shape, name
        if not value.is_floating_point():
            distance = 0.0 if torch.equal(a[name], value) else float("inf")
        else:
            finite = torch.isfinite(value)
            assert torch.equal(finite, torch.isfinite(a[name])), name
            distance = float((a[name] - value)[finite].norm() / value[finite].norm())
        worst = max(worst, (distance, name))
    return worst
