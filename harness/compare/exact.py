"""Inputs and masks: what must be equal. Knows taps; must not know limits."""

from __future__ import annotations

from torch import Tensor

from harness.compare.align import broadcastable, like
from harness.compare.subject import Scene, number, shapes_differ
from harness.metrics.discrete import valid_candidates
from harness.metrics.real import mismatches, rel_rms_error
from harness.types import Measurement, Tap


def compare_exact(scene: Scene, tap: Tap) -> list[Measurement]:
    """Compare by equality: ids, positions, grids, masks. Real-valued inputs (pixels) by their relative error."""
    expected, raw = scene.oracle.tensors[tap.name], scene.accel.tensors[tap.name]
    actual = like(raw, scene.accel.taps[tap.name], other=expected, other_tap=tap)
    if actual is None and not raw.is_floating_point():
        actual = broadcastable(raw, expected)
    if actual is None:
        return [shapes_differ(scene, tap)]
    if tap.kind == "mask":
        actual, expected = _allows(actual), _allows(expected)
    elif expected.is_floating_point():
        error = rel_rms_error(actual=actual, expected=expected)
        return [number(scene, tap, "input_rel_rms_error", error, actual.numel())]
    return [number(scene, tap, "exact_mismatches", mismatches(actual=actual, expected=expected), actual.numel())]


def _allows(mask: Tensor) -> Tensor:
    """Return a mask as booleans: additive masks allow where nothing very negative is added."""
    return valid_candidates(mask) if mask.is_floating_point() else mask != 0
