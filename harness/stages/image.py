"""The image stage: two pictures of different shape, from pixels through tower to logits. Must not know limits."""

from __future__ import annotations

from harness.cases import image_case
from harness.stages import StageContext, StageView
from harness.stages.replays import free_and_replays, measure_runs
from harness.types import Measurement, Run

NAME = "image"
NEEDS: tuple[str, ...] = ("image",)
SIZES = ((2, 3), (5, 3))
"""Heights and widths in merged patches: neither is square, and they differ, so that no transposition is invisible."""


def plan(context: StageContext) -> list[Run]:
    """Plan a free run and replays of one request with two pictures (and with them exchanged in the full profile)."""
    unit = context.info.patch_size * context.info.merge_size
    sizes = [(height * unit, width * unit) for height, width in SIZES]
    runs = free_and_replays(context, NAME, image_case(context.info, sizes, seed=2))
    if context.full:
        case = image_case(context.info, [(7 * unit, 2 * unit), *reversed(sizes)], length=37, seed=5)
        runs += free_and_replays(context, NAME, case, suffix="-three")
    return runs


def measure(view: StageView) -> list[Measurement]:
    """Compare every run with the oracle: inputs, pixels, tower and layers in isolation, logits."""
    return measure_runs(view, NAME, view.runs)
