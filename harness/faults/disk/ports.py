"""A port that holds a right checkpoint wrongly, audited and gated as the load stage does. Must not know limits.

Only one layer is kept, so that an audit takes a moment; everything else of the port is right.
"""

from __future__ import annotations

import datetime
import fnmatch
import re
import time
from dataclasses import replace
from pathlib import Path

import torch

from harness import gate
from harness.adapter import Weight
from harness.checklist import load_checklists
from harness.checkpoint import audit_weights, open_checkpoint
from harness.faults.catalogue import NoPlace
from harness.faults.disk import writers
from harness.faults.disk.damage import LAYER, layer_of
from harness.faults.disk.files import Files
from harness.faults.disk.judge import DiskRow
from harness.faults.disk.loader import load
from harness.faults.disk.mistakes import Loaded, Mistake
from harness.precision.scheme import Precision
from harness.stages.weights import weights_of
from harness.types import Measurement, Run

KEPT = (None, LAYER)
RUN = Run(id="load/weights", stage="load", kind="weights")


class PortShelf:
    """One format: a right checkpoint of one layer on disk, and what a right port holds of it."""

    def __init__(self, name: str, scratch: Path, seed: int = 0) -> None:
        self.name = name
        self.files = _fewer(writers.write(name, seed))
        self.checkpoint = open_checkpoint(self.files.write(scratch / name / "port"))
        self.right: Loaded = {n: load(self.files, w) for n, w in self.files.weights.items()}
        self._criteria = load_checklists().by_stage["load"]

    def row(self, mistake: Mistake | None) -> DiskRow:
        """Hold the weights with a mistake, or without, and say what the load stage says first."""
        begin = time.perf_counter()
        name, says = (mistake.name, mistake.says) if mistake is not None else ("right_port", "A port that is right.")
        kind, due = ("fault", "weights") if mistake is not None else ("benign", "")
        row = DiskRow(format=self.name, name=name, says=says, kind=kind, expected=due)
        held, places = dict(self.right), list[str]()
        if mistake is not None:
            try:
                wrong, places = mistake.load(self.files)
            except NoPlace as why:
                return replace(row, outcome="no place", note=str(why))
            if all(n in held and (held[n] == value).all() for n, value in wrong.items()):
                return replace(row, outcome="no place", note="it changes nothing here")
            held |= wrong
        dtype = torch.float32 if mistake is not None and mistake.dtype == "float32" else torch.bfloat16
        first = self._first(held, dtype)
        row = replace(row, wall_s=time.perf_counter() - begin)
        if first is None:
            return (
                replace(row, outcome="missed", seen="nowhere")
                if mistake is not None
                else replace(row, outcome="accepted")
            )
        message = str(first.detail.get("message", ""))
        row = replace(row, seen="weights", severity="error", place=first.subject, message=message)
        if mistake is None:
            return replace(row, outcome="alarmed")
        return replace(
            row, outcome="detected", place_right=any(fnmatch.fnmatchcase(first.subject, p) for p in places),
            cause_right=any(re.search(word, message, re.IGNORECASE) for word in mistake.cause),
        )  # fmt: skip

    def _first(self, held: Loaded, dtype: torch.dtype) -> Measurement | None:
        """Return the first thing, in the order of the weights, that breaks a criterion of the load stage."""
        weights = [
            Weight(name=n, tensor=torch.from_numpy(v).to(dtype), checkpoint=n if n in self.right else "")
            for n, v in _merged(held).items()
        ]
        audit = audit_weights(self.checkpoint, weights, tied=False, dtype=dtype)
        found = weights_of(RUN, audit, None, image=False, beside=Precision())
        criteria = [c for c in self._criteria if "weights" in c.needs and c.blocking]
        verdicts, _ = gate.judge(
            criteria=criteria, measurements=found, in_scope=lambda _: "", today=datetime.date.today()
        )  # fmt: skip
        broken = [m for _, m in gate.breaking(verdicts, found)]
        return min(broken, key=lambda m: m.order, default=None)


def _fewer(files: Files) -> Files:
    """Return the checkpoint with one layer."""
    gone = [w for w in files.weights.values() if layer_of(w.name) not in KEPT]
    for weight in gone:
        files.drop(*weight.parts.values())
        del files.weights[weight.name]
    files.shards = {file: tensors for file, tensors in files.shards.items() if tensors}
    return files


def _merged(held: Loaded) -> Loaded:
    """Leave out the matrices that a merged parameter holds."""
    whole = [n.removesuffix("gate_up_proj") for n in held if n.endswith(".gate_up_proj") and f"{n}_bias" not in held]
    ends = (".gate_proj.weight", ".up_proj.weight", ".w1.weight", ".w3.weight")
    return {n: v for n, v in held.items() if not (n.endswith(ends) and n.startswith(tuple(whole)))} if whole else held
