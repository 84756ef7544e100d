"""What a repeated call is held to: its budget follows what a device declares."""

from __future__ import annotations

import torch

from harness.shadow.calls import held
from harness.shadow.truth import FLOAT32, inside_eps, judge


def test_a_declared_device_is_allowed_its_sums():
    """Running sums in bfloat16 are beyond the budget of a silent device, and within that of one that says so."""
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    rounded = x.clone()
    for i in range(1, 300):
        rounded[:, i] += rounded[:, i - 1]
    call = (torch.ops.aten.cumsum.default, [held(x), 1], {}, [held(rounded)])
    assert judge(*call)[0].ratio > 1
    assert judge(*call, inside_eps({"accumulate": "bfloat16"}))[0].ratio < 1
    assert judge(*call[:3], [held(x.float().cumsum(1).to(x.dtype))])[0].ratio < 1


def test_the_coarsest_of_what_is_declared_counts():
    """Silence is float32; of several words the coarsest one is taken; tf32 has ten bits."""
    assert inside_eps({}) == inside_eps({"subnormals": "flushed"}) == FLOAT32
    assert inside_eps({"factors": "tf32"}) == 2.0**-10
    assert inside_eps({"factors": "tf32", "accumulate": "bfloat16"}) == 2.0**-7
