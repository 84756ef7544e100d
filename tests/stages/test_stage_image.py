"""The image stage: the pictures that it plans."""

import itertools
from typing import Any

import pytest

from harness.cases import ModelInfo
from harness.stages import StageContext, image
from harness.types import Run, Scope


def context(profile: str = "quick", **info: Any) -> StageContext:
    given = {"path": "m", "config": {}, "vocab_size": 50, "layers": 2, "max_length_tokens": 512, "vision": True}
    return StageContext(
        info=ModelInfo(**{**given, **info}), scope=Scope(image=True), capabilities=frozenset(), profile=profile,
        reference_capabilities=frozenset(), dtype="bfloat16",
    )  # fmt: skip


def whole(runs: list[Run]) -> list[Run]:
    """Return the runs whose pictures are taken as they are."""
    return [run for run in runs if run.id != "image/resized"]


@pytest.mark.parametrize(("patch", "merge"), [(8, 2), (14, 2), (16, 1)])
@pytest.mark.parametrize("profile", ["quick", "full"])
def test_pictures_are_whole_patches_and_of_different_oblong_shapes(patch: int, merge: int, profile: str) -> None:
    """No picture is square, no two are alike or transposed, and all are multiples of patch times merge."""
    for run in whole(image.plan(context(profile, patch_size=patch, merge_size=merge))):
        sizes = [(picture.height, picture.width) for picture in run.case.images]
        assert len(sizes) >= 2
        assert all(h != w and h % (patch * merge) == 0 and w % (patch * merge) == 0 for h, w in sizes)
        assert len({tuple(sorted(s)) for s in sizes}) == len(sizes)


def test_text_stands_before_between_and_behind_the_pictures() -> None:
    """Placeholders touch neither each other nor an end of the prompt."""
    for run in image.plan(context("full")):
        places = [0, *run.case.image_at, len(run.case.token_ids)]
        assert all(b > a for a, b in itertools.pairwise(places))


def test_every_level_is_replayed() -> None:
    """The tower is isolated like the layers: one free run and three replays of it."""
    assert [r.level for r in whole(image.plan(context(patch_size=8, merge_size=2)))] == [0, 1, 2, 3]


def test_pictures_that_have_to_be_resized_are_looked_at_too() -> None:
    """One run has pictures that are no whole patches, and keeps their pixels."""
    (run,) = (r for r in image.plan(context(patch_size=8, merge_size=2)) if r.id == "image/resized")
    assert [(p.height, p.width) for p in run.case.images] == [(37, 44), (85, 44)]
    assert "inputs.*" in run.taps
