"""The image stage: two pictures of different shape, from pixels through tower to logits. Must not know limits."""

from __future__ import annotations

from harness.cases import ModelInfo, image_case
from harness.stages import StageContext, StageView
from harness.stages.replays import free_and_replays, measure_runs
from harness.types import Case, Measurement, Run

NAME = "image"
NEEDS: tuple[str, ...] = ("image",)
SIZES = ((2, 3), (5, 3))
"""Heights and widths in merged patches: neither is square, and they differ, so that no transposition is invisible."""


def plan(context: StageContext) -> list[Run]:
    """Plan a free run and replays of one request with two pictures (and with them exchanged in the full profile).

    Pictures that have to be resized come in a run of their own, of which the inputs are looked at.
    """
    info, unit = context.info, context.info.patch_size * context.info.merge_size
    runs = free_and_replays(context, NAME, two_pictures(info))
    odd = [(h * unit + unit // 3, w * unit - unit // 4) for h, w in SIZES]
    case = image_case(info, odd, seed=6)
    runs.append(Run(id="image/resized", stage=NAME, kind="forward", case=case, taps=("inputs.*", "merged", "logits")))
    if context.full:
        sizes = [(7, 2), *reversed(SIZES)]
        case = image_case(info, [(h * unit, w * unit) for h, w in sizes], length=37, seed=5)
        runs += free_and_replays(context, NAME, case, suffix="-three")
    return runs


def two_pictures(info: ModelInfo) -> Case:
    """Return the request with two pictures that this stage, and every stage that needs pictures, asks."""
    unit = info.patch_size * info.merge_size
    return image_case(info, [(height * unit, width * unit) for height, width in SIZES], seed=2)


def measure(view: StageView) -> list[Measurement]:
    """Compare every run with the oracle: inputs, pixels, tower and layers in isolation, logits."""
    return measure_runs(view, NAME, view.runs)
