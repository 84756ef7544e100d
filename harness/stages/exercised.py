"""What the runs of a stage reached, beside what was measured there. Knows runs and facts; must not know limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.compare import exercise, unexercised
from harness.stages import StageView
from harness.types import Measurement, Run, Trace

PHASES = {"chunk": "chunked"}
"""Phases that a scope calls otherwise than the runs do."""


def exercised(view: StageView, stage: str) -> list[Measurement]:
    """Say of heads, selections, limits, lengths, phases and cache pages whether the stage's runs reached them."""
    free = [r for r in view.runs if r.kind == "forward" and not r.level and not r.dtype and r.observe]
    oracles = [t for r in free if isinstance(t := view.trace("oracle", r.id), Trace)]
    if not oracles:
        return []
    info, run = view.context.info, free[0]
    found = unexercised(stage, run, oracles, config=info.config, edges=info.edges, heads=info.heads)
    return [
        *found,
        exercise(stage, run, "phases", dict(_phases(view))),
        exercise(stage, run, "pages", dict(_pages(view))),
    ]


def _recorded(view: StageView) -> list[tuple[Run, Trace]]:
    """Return the port's runs that ended, with what they observed."""
    return [(r, t) for r in view.runs if isinstance(t := view.trace("accel", r.id), Trace)]


def _phases(view: StageView) -> Iterator[tuple[str, bool]]:
    """Yield each declared phase and whether a run of it was recorded."""
    walked = [(r, t) for r, t in _recorded(view) if r.kind in ("forward", "steps")]
    seen = {str(r.options.get("phase", "prefill")) for r, t in walked if t.facts.get("resumed_tokens") != 0}
    for name in view.context.scope.phases:
        yield name, PHASES.get(name, name) in seen


def _pages(view: StageView) -> Iterator[tuple[str, bool]]:
    """Yield what runs did with pages, where the port tells of its pages: several in use, an edge crossed by a step."""
    stepped = [(r, t) for r, t in _recorded(view) if r.kind == "steps" and t.facts.get("cache", {}).get("page_tokens")]
    if not stepped:
        return
    size = int(stepped[0][1].facts["cache"]["page_tokens"])
    yield f"more than one page of {size} tokens", any(int(t.facts["length_tokens"]) > size for _, t in stepped)
    yield "a page that begins with a single step", any(_crosses(r.steps, size) for r, _ in stepped)


def _crosses(steps: Sequence[tuple[int, int]], size: int) -> bool:
    return any(b - a == 1 and a > 0 and a % size == 0 for a, b in steps)
