"""The suite on a device that is not the CPU, told to be wrong in one way after the other."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

CODE = """
import torch
from accel_impl import device
device.enable()
from harness.ops.runtime import runtime_facts
from harness.ops.suite import check
def told(name, *breaks):
    device.set_breaks(breaks)
    return check(name, device=device.NAME, dtype=torch.bfloat16, full=False)[0].words()
for name in ("contiguous", "softmax", "topk", "copy", "matmul"):
    assert ": right in" in told(name), told(name)
assert "only for non-contiguous input" in told("contiguous", "strided_read")
assert "wrong only for widths 33..64" in told("softmax", "softmax_band")
assert "only the last index of a row" in told("topk", "topk_last")
assert "beside the output were overwritten" in told("copy", "blit_neighbours"), told("copy", "blit_neighbours")
assert "widths that are no multiple of 64, from 65 on" in told("matmul", "matmul_tail"), told("matmul", "matmul_tail")
device.set_breaks(())
"""

RUNTIME = """
from accel_impl import device
device.enable({"gib": "0.25"})
from harness.ops.runtime import runtime_facts
import torch
from harness.conversion import _stays_counted
def problems(*breaks):
    device.set_breaks(breaks)
    return {name: words for name, words in runtime_facts(device.NAME)["checks"].items() if words}
names = {"allocated", "peak", "streams", "events", "pinned", "back", "out_of_memory"}
assert set(runtime_facts(device.NAME)["checks"]) == names and problems() == {}, problems()
device.set_cap(0, 3 << 20)
assert problems() == {}  # a card that is nearly full is not filled by looking at it
device.set_cap(0, 1 << 30)
assert "filled again" in problems("stale_pinned")["pinned"]
x = torch.zeros(9, device=device.NAME)
assert _stays_counted() == 0
assert "stays" in problems("leaky_free")["allocated"] and _stays_counted() > 0  # the defect is still there
assert list(problems("sticky_peak")) == ["peak"] and "after a reset" in problems("sticky_peak")["peak"]
assert set(problems("oom_counts")) == {"out_of_memory"}
"""

FALLBACKS = """
import torch
from accel_impl import device
device.enable()
from harness.ops.needs import watched
from harness.ops.table import coverage
x, ids = torch.randn(4, 5).to("pocket:1"), torch.tensor([1, 2]).to("pocket:1")
def step():
    y = torch.nn.functional.silu(x + 1.0) * 2
    torch.nn.functional.embedding(ids, y), torch.sort(x), torch.floor_divide(ids, 2), x[ids], x @ x.T, torch.cat([x, x])
    x.to(torch.bfloat16), (x.cpu() + 1).cos(), torch.softmax(x, -1), torch.where(x > 0, x, y)
    x.index_put_((ids,), y[:2])
with torch.no_grad():
    with watched(device="pocket:1") as prefill:
        step()
    with watched(keep=False, device="pocket:1") as decode:
        step(), step()
    device.reset_counts()
    step(), step()
table, counted = coverage(prefill, decode, "pocket:1", {}), device.counts()["fallback"]
rows = {row["operator"]: row for row in table["rows"]}
assert sum(table["fallbacks"].values()) == sum(counted.values()), (table["fallbacks"], counted)
assert rows["aten::embedding"]["inside"] == ["aten::index_select"] and rows["aten::embedding"]["on_host"] == 2
assert rows["aten::embedding"]["level"] == rows["aten::add.Tensor"]["level"] == "host"
assert rows["aten::mm"]["level"] == rows["aten::cat"]["level"] == "library" and rows["aten::mm"]["on_host"] == 0
assert rows["aten::cos"]["on_host"] == 0  # of host tensors, on the host
"""


pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the small device is built by a C++ compiler")


def run(code: str) -> None:
    """Run code in a process of its own: a device is registered once for all."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_each_defect_of_the_small_device_is_named():
    """Right, the device is silent; each of its defects is found in its operator, and told by its pattern."""
    run(CODE)


def test_the_runtime_of_the_small_device_is_held_to_its_promises():
    """Right, also on a card that is nearly full, nothing is told; each defect of the runtime is found by its check."""
    run(RUNTIME)


def test_fallbacks_are_counted_as_the_device_counts_them():
    """Calls that end on the host inside of other operators are found, as many as the device itself has counted."""
    run(FALLBACKS)
