from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import torch
from operator_inputs import ARGUMENTS, rand
from accel_impl import fallback, ops
from accel_impl.backend import BackendAdapter, triton_kernels
from accel_impl.formats import Plain
from accel_impl.offers import operator_table
from harness.ops.facts import own_operators
from harness.ops.suite import operator_suite
from harness.ops.arithmetic import parse_arithmetic

kernels = triton_kernels()
for name in ("attn.sparse_decode", "index.select", "mxfp4.decode"):
    function = ops.NAMES[name]
    (args, more), (same, _) = ARGUMENTS[name](), ARGUMENTS[name]()
    expected = getattr(fallback, function)(*same, **more)
    for block in (16, 32, 128):
        actual = getattr(kernels, function)(*args, **more, block=block)
        torch.testing.assert_close(actual, expected, atol=3e-6, rtol=3e-5)
every = torch.arange(256).to(torch.uint8).repeat(4).view(4, 256)
scale = torch.arange(64).view(4, 16).mul(4).to(torch.uint8)
found, wanted = (f(every, scale, torch.empty(4, 512)) for f in (kernels.decode_mxfp4, fallback.decode_mxfp4))
assert torch.equal(found, wanted)
for keys, count in ((1, 3), (7, 7), (300, 5), (513, 64)):
    scores = (4 * rand(1, 3, keys)).round()
    scores = scores.masked_fill(rand(1, 3, keys, seed=9) > 1, float("-inf"))
    assert torch.equal(kernels.choose_keys(scores, count), fallback.choose_keys(scores, count)), (keys, count)
use = BackendAdapter(prefer="triton")
levels = [name for name, level in use.table.items() if level == "triton"]
assert levels == ["index.select", "attn.sparse_decode", "mxfp4.decode"]
offered = [o for o in own_operators(operator_table(use)) if o.name in ("attention_chosen", "from_mxfp4")]
for result in operator_suite(
    offered, device="cpu", dtypes=(torch.bfloat16, torch.float32), arithmetic=parse_arithmetic({}), full=False,
    beat=lambda words: None,
):
    assert ": right in" in result.words(), result.words()
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the kernels need triton")
def test_kernels_say_what_the_reference_says() -> None:
    """In Triton's interpreter every kernel, in several block sizes, equals the reference, and passes the suite."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False, cwd=Path(__file__).parent,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
