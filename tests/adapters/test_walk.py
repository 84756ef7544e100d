"""Turns of forwards that go through the same places together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from harness.adapters.stream.walk import Walk

PLACES = ("a", "b", "c")


class Road:
    """Places of which one is open at a time, and what happened."""

    def __init__(self) -> None:
        self.open = ""
        self.log: list[str] = []
        self.walk = Walk(PLACES, lambda place: place == self.open, self.open_place)

    def open_place(self, place: str, keys: Sequence[str]) -> None:
        self.open = place
        self.log.append(f"{place}:{'+'.join(keys)}")

    def task(self, name: str, places: Sequence[str], key: str = "k") -> Callable[[], str]:
        def run() -> str:
            for place in places:
                self.walk.wait(place, key)
                self.log.append(f"{name}@{place}")
            return name

        return run


def test_all_pass_a_place_before_the_next_is_opened() -> None:
    """A place is opened once for all who come to it in a round, in the order in which they were given."""
    road = Road()
    tasks = [road.task("x", "abc"), road.task("y", "abc", "other")]
    assert road.walk.together(tasks) == ["x", "y"]
    assert road.log == ["a:k+other", "x@a", "y@a", "b:k+other", "x@b", "y@b", "c:k+other", "x@c", "y@c"]


def test_who_goes_round_more_often_goes_on_alone() -> None:
    """One that walks twice shares its first round; another that begins elsewhere is met on the way."""
    road = Road()
    assert road.walk.together([road.task("x", "abcabc"), road.task("y", "c")]) == ["x", "y"]
    assert road.log == ["a:k", "x@a", "b:k", "x@b", "c:k", "x@c", "y@c", "a:k", "x@a", "b:k", "x@b", "c:k", "x@c"]


def test_one_that_raises_or_needs_nothing_holds_up_nobody() -> None:
    """Errors are answers of their own; a task without places runs through."""
    road = Road()

    def broken() -> str:
        road.walk.wait("a", "k")
        raise ValueError("in a")

    found = road.walk.together([broken, lambda: "free", road.task("x", "ab")])
    assert isinstance(found[0], ValueError)
    assert found[1:] == ["free", "x"]
    assert road.walk.together([]) == []


@pytest.mark.parametrize("count", [1, 2, 5])
def test_one_runs_at_a_time(count: int) -> None:
    """Whatever their number, no two are ever between their places at once."""
    road, inside, most = Road(), 0, 0

    def run() -> None:
        nonlocal inside, most
        for place in PLACES * 3:
            road.walk.wait(place, "k")
            inside += 1
            most = max(most, inside)
            sum(range(1000))
            inside -= 1

    road.walk.together([run] * count)
    assert most == 1
