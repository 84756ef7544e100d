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
assert "wrong only for widths from" in told("matmul", "matmul_tail")
device.set_breaks(())
assert set(runtime_facts(device.NAME)["checks"].values()) == {""}
device.set_breaks(("stale_pinned",))
assert "filled again" in runtime_facts(device.NAME)["checks"]["pinned"]
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="the small device is built by a C++ compiler")
def test_each_defect_of_the_small_device_is_named():
    """Right, the device is silent; each of its defects is found in its operator, and told by its pattern."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
