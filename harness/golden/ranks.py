"""Recordings as an engine leaves them, one folder for each rank, made into whole traces. Must not know who asked.

Tensors that are said to be split are put together along their axis (or summed), those that are not must be equal on
every rank that has them, and what only one stage of a pipeline has is taken from there.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness import recorder
from harness.errors import TraceError
from harness.golden.store import load_trace
from harness.types import Tap, Trace


def load_recordings(folder: Path) -> list[Trace]:
    """Return the traces below a folder, ranks merged. Raises TraceError where there is none or one cannot be used."""
    manifests = sorted(folder.rglob("manifest.json")) if folder.is_dir() else []
    if not manifests:
        raise TraceError(f"expected recorded traces below {folder}, found no manifest.json; `day0 record` makes some")
    alone: list[Trace] = []
    groups: dict[Path, list[Trace]] = defaultdict(list)
    for path in manifests:
        trace = load_trace(path.parent)
        version = trace.provenance.get("recorder", "")
        if version.isdigit() and int(version) != recorder.VERSION:
            raise TraceError(
                f"the trace in {path.parent} is stale: made by version {version} of the recorder, this is version "
                f"{recorder.VERSION}; record it again"
            )
        if "rank" in trace.facts and path.parent.name.startswith("rank-"):
            groups[path.parent.parent].append(_with_statistics(trace, path.with_name("statistics.jsonl")))
        else:
            alone.append(trace)
    return alone + [merge_ranks(traces, place=str(place)) for place, traces in groups.items()]


def _with_statistics(trace: Trace, path: Path) -> Trace:
    """Return a trace with the statistics that lie beside it, in columns. Raises TraceError for another kind of file."""
    if not path.is_file():
        return trace
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    except (ValueError, TypeError, KeyError) as error:
        raise TraceError(f"expected statistics in {path}, found: {error!r}; record this request again") from error
    return dataclasses.replace(trace, facts={**trace.facts, "statistics": columns}) if columns else trace


def merge_ranks(traces: Sequence[Trace], *, place: str) -> Trace:
    """Return one trace of all ranks of one request. Raises TraceError naming the tap and the ranks."""
    by_rank = {int(t.facts["rank"]): t for t in traces}
    first = by_rank[min(by_rank)]
    degrees = dict(first.facts.get("layout", {}))
    tp, world = max(1, int(degrees.get("tp", 1)), int(degrees.get("ep", 1))), _world(degrees)
    missing = sorted(set(range(world)) - set(by_rank))
    if missing or len(by_rank) != len(traces):
        what = f"no recording of rank {', '.join(map(str, missing))}" if missing else "a rank twice"
        raise TraceError(f"expected one recording of each of {world} ranks in {place}, found {what}; copy all of them")
    for rank, trace in by_rank.items():
        if trace.run != first.run or trace.facts.get("layout") != first.facts.get("layout"):
            raise TraceError(f"rank {rank} in {place} recorded another request or layout than rank {min(by_rank)}")
    taps: dict[str, Tap] = {}
    tensors: dict[str, Tensor] = {}
    for rank in sorted(by_rank, key=lambda r: (r // tp, r % tp)):
        for name, tap in by_rank[rank].taps.items():
            if name not in taps:
                holders = {r: t.tensors[name] for r, t in by_rank.items() if name in t.tensors}
                taps[name], tensors[name] = tap, _whole(name, holders, by_rank, tp, place)
    return dataclasses.replace(first, taps=taps, tensors=tensors, facts=_facts(by_rank))


def _world(degrees: Mapping[str, int]) -> int:
    size = max(int(degrees.get("tp", 1)), int(degrees.get("ep", 1)))
    return max(1, size) * max(1, int(degrees.get("pp", 1))) * max(1, int(degrees.get("sp", 1)))


def _whole(name: str, holders: Mapping[int, Tensor], by_rank: Mapping[int, Trace], tp: int, place: str) -> Tensor:
    """Return the tensor of all ranks that hold a tap."""
    how = next((h for r in holders if (h := by_rank[r].facts.get("shards", {}).get(name)) is not None), None)
    ranks = sorted(holders)
    if how is None:
        return _replicated(name, holders, place)
    stages = sorted({r // tp for r in ranks})
    wholes = {}
    for stage in stages:
        parts = [r for r in ranks if r // tp == stage]
        if len(parts) != tp:
            raise TraceError(
                f"expected {name!r} of each of {tp} tensor-parallel ranks in {place}, found it on {parts} only: it is "
                "said to be split, so its parts are missing"
            )
        wholes[stage] = _merged(name, [holders[r] for r in parts], how, place)
    return _replicated(name, wholes, place)


def _merged(name: str, parts: Sequence[Tensor], how: int | str, place: str) -> Tensor:
    try:
        if how == "sum":
            return torch.stack([p.double() for p in parts]).sum(0).to(parts[0].dtype)
        return torch.cat(list(parts), dim=int(how))
    except (RuntimeError, IndexError, ValueError) as error:
        shapes = ", ".join(str(tuple(p.shape)) for p in parts)
        raise TraceError(f"the parts of {name!r} in {place} do not fit along {how!r}: {shapes} ({error})") from error


def _replicated(name: str, holders: Mapping[int, Tensor], place: str) -> Tensor:
    first, *others = sorted(holders)
    for other in others:
        a, b = holders[first], holders[other]
        same = a.shape == b.shape and torch.equal(a.nan_to_num() if a.is_floating_point() else a,
                                                  b.nan_to_num() if b.is_floating_point() else b)  # fmt: skip
        if not same:
            raise TraceError(
                f"{name!r} in {place} differs between ranks {first} {tuple(a.shape)} and {other} {tuple(b.shape)}, but "
                "is not said to be split: declare its axis in the recorder's `shards`, or the ranks have gone apart"
            )
    return holders[first]


def _facts(by_rank: Mapping[int, Trace]) -> dict[str, Any]:
    """Return the facts of all ranks: gaps and notes of any of them hold for the whole."""
    facts: dict[str, Any] = dict(by_rank[min(by_rank)].facts)
    for key in ("gaps", "notes"):
        facts[key] = {
            name: text for rank in sorted(by_rank) for name, text in by_rank[rank].facts.get(key, {}).items()
        }  # fmt: skip
    return {**facts, "ranks": len(by_rank)}
