"""Two runs of one port against each other, in floors: compiled and uncompiled. Knows taps; must not know limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from harness.compare.align import as_rows, like
from harness.compare.subject import measured
from harness.compare.values import with_floor
from harness.taps import level_of
from harness.types import Measurement, Run, Tap, Trace


def compare_pair(
    *, stage: str, run: Run, oracle: Trace, floors: Sequence[Trace], compiled: Trace, eager: Trace, dtype: str
) -> Iterator[Measurement]:
    """Yield by how much two replays of a layer differ, for each layer that both show; `run` is the uncompiled one."""
    for order, (name, tap) in enumerate(oracle.taps.items()):
        if tap.kind != "hidden" or level_of(name) > 1 or name not in oracle.tensors:
            continue
        expected = as_rows(oracle.tensors[name], tap).values
        mine, other = (_rows(side, tap, oracle) for side in (compiled, eager))
        if mine is None or other is None:
            continue
        honest = [rows for floor in floors if (rows := _rows(floor, tap, oracle)) is not None]
        _, floor = with_floor(
            actual=mine, floors=honest, expected=expected, dtype=getattr(torch, dtype), groups=1
        )  # fmt: skip
        apart, first, second = (
            _mean_ratio(a, b, floor.token) for a, b in ((mine, other), (mine, expected), (other, expected))
        )
        message = f"against the oracle the compiled layer reads {first:.3g}, the same one uncompiled {second:.3g}"
        yield measured(
            stage, run, "compiled_ratio", apart, subject=name, order=order, n=expected.numel(), kind=tap.kind,
            detail={"message": message},
        )  # fmt: skip


def _rows(trace: Trace, tap: Tap, oracle: Trace) -> Tensor | None:
    value = trace.tensors.get(tap.name)
    expected = oracle.tensors[tap.name]
    fitted = None if value is None else like(value, trace.taps[tap.name], other=expected, other_tap=tap)
    return None if fitted is None else as_rows(fitted, tap).values


def _mean_ratio(actual: Tensor, expected: Tensor, floor: Tensor) -> float:
    """Return the mean over tokens of an error in floors. Shapes: actual, expected [T, E]; floor [T], squared."""
    error = (actual.double() - expected.double()).square().sum(dim=1)
    return float(torch.where(error == 0, torch.zeros_like(error), (error / floor).sqrt()).mean())
