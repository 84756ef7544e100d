"""Every configuration that an autotuner may choose is judged, not only the chosen one."""

from __future__ import annotations

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
