"""The pytest plugin: a fixture `day0_op` that judges one operator. Knows pytest; imports torch only where it is used.

def test_softmax(day0_op):
    day0_op.check("softmax", my_softmax, device="mydev", dtype=torch.bfloat16)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest


class OperatorCheck:
    """What the fixture `day0_op` gives to a test."""

    def check(
        self,
        name: str,
        call: Callable[..., Any] | None = None,
        *,
        device: str = "cpu",
        dtype: Any = None,
        arithmetic: Mapping[str, str] | None = None,
        full: bool = True,
        kernel: Any = None,
    ) -> None:
        """Judge an operator of the suite: `call`, or what torch has on the device; all configurations of a `kernel`.

        `arithmetic` declares how the device computes, such as `{"accumulate": "bfloat16"}`.
        Raises AssertionError that reads like a report.
        """
        import torch

        from harness.ops.arithmetic import parse_arithmetic
        from harness.ops.suite import check

        found = check(
            name, call, device=device, dtype=dtype or torch.float32, arithmetic=parse_arithmetic(arithmetic or {}),
            full=full, kernel=kernel,
        )  # fmt: skip
        wrong = [result.words() for result in found if result.bad]
        if wrong:
            raise AssertionError("\n".join(wrong))

    def names(self) -> tuple[str, ...]:
        """Return the operators of the suite."""
        from harness.ops.families import SPECS

        return tuple(SPECS)


@pytest.fixture(scope="session")
def day0_op() -> OperatorCheck:
    """Judge one operator against float64, as the startup stage does."""
    return OperatorCheck()
