"""A shard that shrinks, vanishes or turns unreadable while a port is audited: an error, and what was learned."""

from __future__ import annotations

import datetime
import os

import pytest
import torch

from harness import gate
from harness.adapter import Weight
from harness.checklist import load_checklists
from harness.checkpoint import audit_weights, open_checkpoint
from harness.faults.disk.writers import write
from harness.precision.scheme import Precision
from harness.stages.weights import weights_of
from harness.types import Run, Status


def unlink(path):
    path.unlink()


def shrink(path):
    os.truncate(path, path.stat().st_size // 3)


def replaced_by_a_folder(path):
    path.unlink()
    path.mkdir()


def replaced_by_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("harm", [unlink, shrink, replaced_by_a_folder, replaced_by_a_pipe])
def test_a_shard_goes_bad_while_weights_are_compared(harm, tmp_path):
    """Tensors of that file are errors with its name; those compared before, and of other files, are facts."""
    files = write("fp8_tensor")
    checkpoint = open_checkpoint(files.write(tmp_path / "ck"))
    gone = sorted(files.shards)[-1]
    lost = {n for n, w in files.weights.items() if gone in map(files.file_of, w.parts.values())}

    def held():
        for number, weight in enumerate(sorted(files.weights.values(), key=lambda w: w.name in lost)):
            if number == 3:
                harm(checkpoint.path / gone)
            yield Weight(name=weight.name, tensor=torch.from_numpy(weight.truth).bfloat16(), checkpoint=weight.name)

    audit = audit_weights(checkpoint, held(), tied=False, dtype=torch.bfloat16)
    assert set(audit["errors"]) <= lost
    assert audit["errors"]
    assert all(gone in message for message in audit["errors"].values())
    known = {w["source"] for w in audit["weights"] if w["match"] == "named" and not w["mismatches"]}
    assert known >= set(files.weights) - lost
    run = Run(id="load/weights", stage="load", kind="weights")
    found = weights_of(run, audit, None, image=False, beside=Precision())
    criteria = [c for c in load_checklists().by_stage["load"] if c.id == "load.values"]
    (verdict,), _ = gate.judge(
        criteria=criteria, measurements=found, in_scope=lambda _: "", today=datetime.date.today()
    )  # fmt: skip
    assert verdict.status is Status.ERROR
    assert gone in verdict.reason
