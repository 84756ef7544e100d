"""The pytest plugin: a fixture that raises what reads like a report, and costs nothing where it is not used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import broken
import pytest
import torch

from harness.ops.plugin import OperatorCheck
from harness.ops.plugin import day0_op as day0_op  # as the entry point registers it

ROOT = Path(__file__).parents[2]


def test_an_operator_that_is_right_is_silent(day0_op):
    """The fixture accepts torch's own operator, and one that is handed over."""
    day0_op.check("silu", dtype=torch.bfloat16, full=False)
    day0_op.check("softmax", torch.softmax, full=False)
    assert "softmax" in day0_op.names()


def test_an_operator_that_is_wrong_reads_like_a_report():
    """What is raised names operator, dtype, device, pattern, shape, and the first wrong element."""
    with pytest.raises(AssertionError) as raised:
        OperatorCheck().check("softmax", broken.softmax_wrong_in_a_band, dtype=torch.bfloat16, full=False)
    text = str(raised.value)
    assert text.startswith("softmax in bfloat16 on cpu: 4 of")
    assert "wrong only for widths 1025..2048" in text
    assert "bfloat16[3, 1025], -1: element [0, 0] of [3, 1025]: expected" in text


def test_the_plugin_is_registered_and_imports_no_torch():
    """The entry point names the plugin, and importing it does not import torch."""
    assert 'day0 = "harness.ops.plugin"' in (ROOT / "pyproject.toml").read_text()
    code = "import harness.ops.plugin, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0
