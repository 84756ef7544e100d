"""Search for token ids that reach every expert of every layer (run kind `search`). Knows adapters, not limits.

Routes of earlier tokens do not depend on later ones, so a prompt is extended piece by piece: of several pieces the one
stands that brings most experts nearer to enough tokens. Half of the pieces are drawn at random, half from what was seen
just before a rare expert was chosen. Needs torch and the standard library only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from harness.adapter import Adapter, silent
from harness.cases import ModelInfo, seeded_ids
from harness.recorder import TraceRecorder
from harness.types import Case, Facts, Run

PIECE_TOKENS, PIECES, ROUNDS, PATIENCE = 24, 4, 12, 3
"""Tokens of a piece; pieces tried in a round; most rounds; rounds in a row without any gain that end the search."""
CONTEXT_TOKENS = 4
"""Tokens up to a rare expert's own that are kept as promising."""
Routes = Mapping[str, Tensor]


@dataclass(slots=True)
class _Reach:
    """How often each expert of each layer was chosen, {tap: [experts]}, and contexts that led to rare ones."""

    counts: dict[str, Tensor] = field(default_factory=dict)
    promising: list[tuple[int, ...]] = field(default_factory=list)


def search(adapter: Adapter, info: ModelInfo, run: Run, beat: Callable[[str], None]) -> Facts:
    """Extend a case's token ids until each expert has `tokens_per_expert` tokens, or `max_tokens` are reached.

    Returns: `token_ids`, `missing` {tap: experts with fewer tokens}, `forwards` (how many it took).
    """
    assert run.case is not None
    need, most = int(run.options["tokens_per_expert"]), int(run.options["max_tokens"])
    draw = random.Random(f"day0-search-{run.case.seed}")
    ids = list(run.case.token_ids or ())
    forwards, stale, rounds = 1, 0, 0
    reach = _Reach(counts=_counts(_routes(adapter, info.experts, run.case, ids, beat), info.experts))
    while _missing(reach.counts, need) and len(ids) < most and stale < PATIENCE and rounds < ROUNDS:
        rounds += 1
        best: tuple[int, list[int], dict[str, Tensor]] | None = None
        for number in range(PIECES):
            piece = _piece(info, reach, draw, number, most - len(ids))
            routes = _routes(adapter, info.experts, run.case, ids + piece, beat)
            forwards += 1
            counts = _counts(routes, info.experts)
            _remember(reach, routes, ids + piece, need)
            gain = _reached(counts, need) - _reached(reach.counts, need)
            if best is None or gain > best[0]:
                best = (gain, piece, counts)
        assert best is not None
        stale = 0 if best[0] > 0 else stale + 1
        if best[0] > 0:
            ids, reach.counts = ids + best[1], best[2]
    return {"token_ids": ids, "missing": _missing(reach.counts, need), "forwards": forwards}


def _routes(adapter: Adapter, experts: int, case: Case, ids: list[int], beat: Callable[[str], None]) -> Routes:
    """Return the experts chosen by token, {tap: [T, K]}; choices among anything else (groups) are left out."""
    recorder = TraceRecorder(keep=("*.topk", "*.topk.*"), beat=beat)
    recorder.span(0, len(ids))
    adapter.forward(adapter.prepare(replace(case, token_ids=tuple(ids)), silent), recorder)
    held = recorder.tensors()
    return {
        name: held[name].reshape(len(ids), -1)
        for name, tap in recorder.taps.items()
        if tap.kind == "routing" and f"{name}.scores" in held and held[f"{name}.scores"].shape[-1] == experts
    }


def _counts(routes: Routes, experts: int) -> dict[str, Tensor]:
    """Return how many tokens chose each expert, [experts] by tap."""
    return {
        name: torch.zeros(len(chosen), experts, dtype=torch.bool).scatter_(1, chosen.clamp(min=0), True).sum(dim=0)
        for name, chosen in routes.items()
    }


def _missing(counts: Mapping[str, Tensor], need: int) -> dict[str, list[int]]:
    found = {name: (count < need).nonzero()[:, 0].tolist() for name, count in counts.items()}
    return {name: experts for name, experts in found.items() if experts}


def _reached(counts: Mapping[str, Tensor], need: int) -> int:
    return sum(int(count.clamp(max=need).sum()) for count in counts.values())


def _remember(reach: _Reach, routes: Routes, ids: list[int], need: int) -> None:
    """Keep what stood before a token that chose an expert which still lacks tokens."""
    for name, count in reach.counts.items():
        rare = count < need
        chosen = routes.get(name)
        if chosen is None or not bool(rare.any()):
            continue
        hits = rare[chosen.clamp(min=0)].any(dim=1).nonzero()[:, 0].tolist()
        reach.promising += [tuple(ids[max(0, t + 1 - CONTEXT_TOKENS) : t + 1]) for t in hits]
    reach.promising = reach.promising[-64:]


def _piece(info: ModelInfo, reach: _Reach, draw: random.Random, number: int, room: int) -> list[int]:
    """Draw a piece: every second one from promising contexts, where there are any."""
    size = min(PIECE_TOKENS, room)
    piece: list[int] = []
    while number % 2 and reach.promising and len(piece) < size:
        piece += draw.choice(reach.promising)
    return (piece or list(seeded_ids(info, size, seed=draw.randrange(1 << 30))))[:size]
