"""Every configuration that an autotuner may choose is judged, not only the chosen one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from harness.adapter import Operator
from harness.errors import PortError
from harness.ops.facts import own_operators
from harness.ops.suite import check


class Config:
    """What Triton calls a configuration."""

    def __init__(self, **kwargs):
        self.kwargs, self.num_warps = kwargs, 4


class Tuned:
    """A kernel that picks one of its configurations, and remembers it; the block of 64 leaves the tail out."""

    def __init__(self):
        self.configs, self.cache, self.ran = [Config(BLOCK=16), Config(BLOCK=64)], {}, []

    def __call__(self, x):
        config = self.cache.setdefault(x.shape, self.configs[0])
        block = config.kwargs["BLOCK"]
        self.ran.append(block)
        y = torch.nn.functional.silu(x)
        whole = x.shape[-1] - x.shape[-1] % block
        return y if block == 16 else torch.cat((y[..., :whole], x[..., whole:]), -1)


def test_a_configuration_that_is_not_chosen_is_found():
    """The chosen configuration is right, the other one is wrong in the tail of odd widths, and its name is told."""
    kernel = Tuned()
    chosen, small, large = check("silu", kernel, kernel=kernel, full=False)
    assert (chosen.bad, small.bad, large.bad) == (False, False, True)
    assert large.variant == "BLOCK=64, num_warps=4"
    assert set(kernel.ran) == {16, 64}


def test_the_kernel_is_left_as_it_was():
    """Afterwards a kernel has its configurations and what it remembered."""
    kernel = Tuned()
    kernel.cache["before"] = kernel.configs[1]
    configs = list(kernel.configs)
    check("silu", kernel, kernel=kernel, full=False)
    assert kernel.configs == configs
    assert kernel.cache["before"] is configs[1]


def test_variants_are_listed_as_functions_too():
    """A port may list variants by name; a kernel without configurations, and an unknown operator, are refused."""
    table = {"silu": Operator(call=Tuned(), level="triton", variants={"fast": torch.sigmoid}), "mla": "custom"}
    assert [(o.name, o.variant) for o in own_operators(table)] == [("silu", ""), ("silu", "fast")]
    with pytest.raises(PortError, match="configs"):
        own_operators({"silu": Operator(call=Tuned(), level="triton", kernel=object())})
    with pytest.raises(PortError, match="softmax"):
        own_operators({"sofmax": Operator(call=torch.softmax, level="triton")})


class Jit:
    """What is inside of an autotuner: it runs with the keywords of a configuration."""

    def run(self, x, BLOCK):
        y = torch.nn.functional.silu(x)
        y[..., BLOCK:] += x[..., BLOCK:] if BLOCK == 128 else 0
        return y


class Tuner:
    """An autotuner as Triton has it: it prunes by the input, measures what is left, remembers; called through `run`."""

    arg_names = ("x",)

    def __init__(self):
        self.fn, self.cache, self.nargs = Jit(), {}, None
        self.configs = [Config(BLOCK=16), Config(BLOCK=64), Config(BLOCK=128)]
        self.perf_model = lambda **_: 1.0
        self.measures = True

    def prune_configs(self, kwargs):
        kept = [c for c in self.configs if self.nargs["x"].shape[-1] > 200 or c.kwargs["BLOCK"] != 128]
        return kept[:1] if self.perf_model else kept  # only what is thought to be fast is measured

    def run(self, x):
        self.nargs = {"x": x}
        if len(self.configs) > 1 and not self.measures:
            raise RuntimeError("0 active drivers")
        config = self.configs[0] if len(self.configs) == 1 else self.cache.setdefault("key", self.prune_configs({})[0])
        return self.fn.run(x, **config.kwargs)


class Outer:
    """A decorator around a tuner, as Triton's heuristics are."""

    def __init__(self, fn):
        self.fn = fn

    def __call__(self, x):
        return self.fn.run(x)


class InterpretedJit(Jit):
    """What Triton makes of a kernel where it is interpreted."""


def test_a_configuration_is_tried_where_it_is_admitted_however_slow():
    """One that is pruned for narrow rows is judged by wide ones, and found inside of another decorator."""
    kernel = Outer(Tuner())
    chosen, *rest = check("silu", kernel, kernel=kernel, full=False)
    assert not chosen.bad
    assert [(r.variant.partition(",")[0], r.bad) for r in rest] == [
        ("BLOCK=16", False), ("BLOCK=64", False), ("BLOCK=128", True),
    ]  # fmt: skip
    assert "wrong only for widths from 201 on" in rest[-1].words()
    assert len(kernel.fn.configs) == 3
    assert kernel.fn.perf_model is not None
    assert "run" not in vars(kernel.fn)


def test_an_interpreted_kernel_has_nothing_to_choose():
    """Without a device an autotuner cannot measure: its configurations are judged, each by itself."""
    kernel = Tuner()
    kernel.fn, kernel.measures = InterpretedJit(), False
    found = check("silu", kernel.run, kernel=kernel, full=False)
    assert [r.variant.partition(",")[0] for r in found] == ["BLOCK=16", "BLOCK=64", "BLOCK=128"]
    assert [r.bad for r in found] == [False, False, True]


TRITON = """
import torch, triton, triton.language as tl
from harness.ops.suite import check

@triton.autotune(configs=[triton.Config({"BLOCK": b}, num_warps=4) for b in (16, 64)], key=["count"])
@triton.jit
def kernel(x, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seen = at < (count if BLOCK == 16 else count // BLOCK * BLOCK)
    v = tl.load(x + at, mask=seen, other=0.0).to(tl.float32)
    tl.store(y + at, (v * tl.sigmoid(v)).to(y.dtype.element_ty), mask=seen)

def silu(x):
    x, y = x.contiguous(), torch.zeros(x.shape, dtype=x.dtype)
    if x.numel():
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
    return y

small, large = check("silu", silu, kernel=kernel, dtype=torch.float32, full=False)
assert not small.bad, small.words()
assert large.bad and large.variant.startswith("BLOCK=64"), large.words()
"""


def test_configurations_of_triton_are_judged_in_its_interpreter(tmp_path):
    """Where Triton is there: both configurations run without a GPU, and the one that drops the tail is named."""
    pytest.importorskip("triton")
    words = {**os.environ, "TRITON_INTERPRET": "1"}
    script = tmp_path / "kernel.py"  # Triton reads a kernel's source
    script.write_text(TRITON)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=words, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
