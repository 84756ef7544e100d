"""Recorded traces in place of a port (`traces:DIR?map=FILE`). Knows traces at rest and mappings; must not know stages.

Recordings cannot go on with other tensors, so the reference is run on the values that they hold (a reverse replay), on
the requests that were recorded. What was not recorded is unobservable, with the reason; stages that need a running port
are outside the scope.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from harness import taps as tapnames
from harness.adapter import Inputs, Recorder, TokenIds
from harness.cases import read_model_info
from harness.errors import CheckpointError, PortError, SpecError, TraceError
from harness.golden import checkpoint_digest, load_recordings
from harness.mapping import apply_mapping, read_mapping
from harness.types import Case, Facts, Scope, Setup, Trace

RECORDED = "recordings show what was recorded, and nothing runs"
_OFF = (
    "load", "startup", "image", "multi_card", "long_context", "phases", "weights", "chat", "serves", "replay",
    "generation", "observer", "operators",
)  # fmt: skip


def open_traces(folder: Path, checkpoint: Path | None, setup: Setup) -> TracesAdapter:
    """Open the recordings of a port. Raises SpecError where they cannot be used, saying why."""
    surplus = sorted(set(setup.options) - {"map"})
    if surplus:
        raise SpecError(f"traces:{folder}: unknown option {surplus[0]!r} (valid: map, dtype)")
    try:
        traces = load_recordings(folder)
    except TraceError as error:
        raise SpecError(f"traces:{folder}: {error}") from error
    if "map" in setup.options:
        rows = read_mapping(Path(setup.options["map"]).expanduser())
        traces = [apply_mapping(trace, rows) for trace in traces]
    return TracesAdapter(folder, _usable(folder, traces), checkpoint, setup)


def _usable(folder: Path, traces: Sequence[Trace]) -> list[Trace]:
    """Return the plain forwards of text requests, one for each request, complete taps only."""
    found: dict[tuple[int, ...], Trace] = {}
    without: list[str] = []
    for trace in traces:
        run = trace.run
        plain = run.kind in ("forward", "steps") and run.observe and not run.level
        if not plain or not trace.tensors or (run.case is not None and run.case.images):
            continue
        ids = run.case.token_ids if run.case is not None else None
        if not ids and "inputs.token_ids" in trace.tensors:
            ids = tuple(int(i) for i in trace.tensors["inputs.token_ids"].reshape(-1))
        if ids:
            found.setdefault(tuple(ids), trace)
        else:
            without.append(run.id)
    if found:
        return [_with_case(trace, ids) for ids, trace in found.items()]
    if without:
        raise SpecError(
            f"traces:{folder}: the recordings do not say which token ids they are of ({without[0]}); give `ids` to the "
            "recorder's tokens(), for every position from 0"
        )
    raise SpecError(f"traces:{folder}: expected the recording of a text request, found none with tensors in it")


def _with_case(trace: Trace, ids: tuple[int, ...]) -> Trace:
    """Return a trace whose case is its token ids, without the taps that do not hold every one of them."""
    gaps = trace.facts.get("gaps", {})
    case = Case(id=f"recorded-{len(ids)}", token_ids=ids, source="recorded")
    names = [name for name in trace.tensors if name not in gaps]
    return dataclasses.replace(
        trace,
        run=dataclasses.replace(trace.run, case=case),
        taps={name: trace.taps[name] for name in names},
        tensors={name: trace.tensors[name] for name in names},
    )


class TracesAdapter:
    """An Adapter whose forward gives what was recorded of the same token ids."""

    def __init__(self, folder: Path, traces: Sequence[Trace], checkpoint: Path | None, setup: Setup) -> None:
        self.name, self.folder, self.traces = f"traces:{folder}", folder, list(traces)
        self.cases = tuple(
            dataclasses.replace(trace.run.case, id=f"recorded-{number}")
            for number, trace in enumerate(traces, start=1)
            if trace.run.case is not None
        )
        _check_dtype(self.name, self.traces, setup)
        layers, vision = _model(checkpoint)
        self.scope = Scope(
            layouts=(),
            phases=(),
            max_length_tokens=max(len(case.token_ids or ()) for case in self.cases),
            replay=False,
            unobservable={
                glob: why for trace in self.traces for glob, why in _unseen(trace, layers, vision=vision).items()
            },
            off={**dict.fromkeys(_OFF, RECORDED), **_black_box(self.traces)},
        )

    def load(self, checkpoint: Path, setup: Setup) -> Facts:
        """Check that the recordings are of this checkpoint, where they say of which. Raises PortError."""
        said = {t.provenance["checkpoint"] for t in self.traces if "checkpoint" in t.provenance}
        try:
            here = checkpoint_digest(checkpoint) if said else ""
        except CheckpointError:
            here = ""  # a folder with the checkpoint's words alone came with the goldens, which are held to it
        if here and said != {here}:
            raise PortError(
                f"{self.name} was recorded from another checkpoint: expected digest {here[:12]}, found "
                f"{', '.join(sorted(d[:12] for d in said))}; record again from {checkpoint}"
            )
        return {"recorded": [dict(t.provenance) for t in self.traces]}

    def prepare(self, case: Case, record: Recorder) -> Inputs:
        """Return the token ids of a case, and record what was recorded of its inputs."""
        trace = self._trace(case.token_ids or ())
        inputs = Inputs(token_ids=torch.tensor([list(case.token_ids or ())], dtype=torch.int64))
        record("inputs.token_ids", trace.tensors.get("inputs.token_ids", inputs.token_ids), dims="batch token")
        return inputs

    def forward(self, inputs: Inputs, record: Recorder) -> Tensor:
        """Hand every recorded tensor to the recorder, in the order in which it was recorded; return the logits."""
        trace = self._trace(tuple(int(i) for i in inputs.token_ids.reshape(-1)))
        for name, tensor in trace.tensors.items():
            tap = trace.taps[name]
            if name not in ("inputs.token_ids", "logits"):
                kind = tap.kind if tap.kind != "hidden" else ""
                record(name, tensor, dims=" ".join(tap.dims), kind=kind)
        if "logits" not in trace.tensors:
            raise PortError(f"{self.name}: no logits: {_why_unseen('logits', trace)}; nothing can be judged as a whole")
        dims = trace.taps["logits"].dims
        return record("logits", trace.tensors["logits"], dims=" ".join(dims) or "batch token vocab", kind="logits")

    def generate(self, inputs: Inputs, max_new_tokens: int, record: Recorder) -> TokenIds:
        """Raise PortError: recordings answer no new request."""
        raise PortError(f"{self.name} cannot generate: {RECORDED}")

    def close(self) -> None:
        """Forget the recordings."""
        self.traces = []

    def _trace(self, ids: Sequence[int]) -> Trace:
        for trace in self.traces:
            if trace.run.case is not None and trace.run.case.token_ids == tuple(ids):
                return trace
        raise PortError(f"{self.name} holds no recording of these {len(ids)} token ids: {RECORDED}")


def _black_box(traces: Sequence[Trace]) -> dict[str, str]:
    """Return, for recordings without a single layer, the words in which they are accepted."""
    layered = any(re.fullmatch(r"layers\.\d+", name) for trace in traces for name in trace.tensors)
    return {} if layered else {"layers": "no layer was recorded: a black box, judged by what it ends in alone"}


def _check_dtype(name: str, traces: Sequence[Trace], setup: Setup) -> None:
    """Raise SpecError where the recordings are of another precision than the port is said to have."""
    kinds = [
        str(t.tensors[n].dtype).removeprefix("torch.")
        for t in traces
        for n in t.tensors
        if re.fullmatch(r"layers\.\d+", n) and t.tensors[n].is_floating_point()
    ]
    usual = max(set(kinds), key=kinds.count) if kinds else setup.dtype
    if usual != setup.dtype:
        raise SpecError(
            f"{name}: the recorded layers are {usual}, the port is said to be {setup.dtype}; add ?dtype={usual}"
        )


def _model(checkpoint: Path | None) -> tuple[int, bool]:
    """Return the number of layers and whether there is a tower, by the configuration; nothing where there is none."""
    try:
        info = read_model_info(checkpoint) if checkpoint is not None else None
    except CheckpointError:
        return 0, False
    return (info.layers, info.vision) if info is not None else (0, False)


def _unseen(trace: Trace, layers: int, *, vision: bool) -> dict[str, str]:
    """Return globs of the mandatory taps that a trace does not hold, each with the reason."""
    names = list(trace.tensors)
    decisions = [n for n in names if tapnames.kind_of(n) in tapnames.DECISION_KINDS]
    whole = ("embed", "merged") if vision else ("embed",)
    found = {name: _why_unseen(name, trace) for name in whole if name not in names}
    for number in range(layers):
        layer = f"layers.{number}"
        if layer not in names:
            found[layer] = _why_unseen(layer, trace)
        if not any(n.startswith(layer + ".") for n in decisions):
            for glob in (f"{layer}.*topk*", f"{layer}.*.in.*"):
                found[glob] = "no decisions of this layer were recorded"
    return found


def _why_unseen(name: str, trace: Trace) -> str:
    gaps, notes = trace.facts.get("gaps", {}), trace.facts.get("notes", {})
    if name in gaps:
        return f"{name} was recorded at {gaps[name]} only"
    noted = next((text for tap, text in notes.items() if fnmatch.fnmatchcase(name, tap)), "")
    return noted or "it was not recorded"
