"""Kernels exchanged for wrong ones are named by the operator suite; kernels that compute otherwise are not."""

from __future__ import annotations

import pytest
import torch

from harness.faults import TABLE
from harness.faults.kernels import EXCHANGES, VIA
from harness.faults.kernels.prove import prove_kernels
from harness.faults.pending import PENDING
from harness.ops.families import FAMILIES, SPECS

KINDS = [pytest.param(kind, id=kind) for kind in ("fault", "benign")]


@pytest.fixture(autouse=True)
def _quiet():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_each_exchanged_kernel_is_judged_as_it_should_be(kind):
    """A wrong kernel is detected by its criterion, at its operator, with its pattern; a harmless one is accepted."""
    rows = prove_kernels(TABLE.of(kind, VIA).values(), lambda row: None)
    assert len(rows) >= (60 if kind == "fault" else 15)
    wanted = "detected" if kind == "fault" else "accepted"
    assert [(r.name, r.outcome, r.note) for r in rows if r.outcome != wanted] == []
    assert [(r.name, r.tap, r.cause) for r in rows if r.place_right is False or r.cause_right is False] == []


def test_the_catalogue_covers_the_suite():
    """Every family of the suite has an exchanged kernel; each names operators that are there and the mistakes of real
    devices by their id, none of which is pending any more."""
    tried = {name for exchange in EXCHANGES.values() for name in exchange.of}
    assert tried <= {*SPECS, "grouped_mm"}
    assert {SPECS[name].family for name in tried if name in SPECS} == set(FAMILIES)
    ids = {row.id for row in TABLE.rows.values() if row.via == VIA}
    assert {"AC01", "AC06", "AC08", "AC10", "AC12", "AC17"} <= ids
    assert ids.isdisjoint({p.id for p in PENDING})
