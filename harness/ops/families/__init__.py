"""Every operator of the suite, by family. Knows operators, formulas and their budgets; must not know devices."""

from __future__ import annotations

from harness.ops.case import Spec
from harness.ops.families import (
    activations,
    attention,
    choices,
    convolution,
    copies,
    elementwise,
    formats,
    matrix,
    norms,
    places,
    recurrent,
    rotary,
    sums,
)

ROOMS = (
    matrix, elementwise, norms, activations, rotary, sums, choices, places, copies, convolution, attention, recurrent,
    formats,
)  # fmt: skip
SPECS: dict[str, Spec] = {spec.name: spec for room in ROOMS for spec in room.SPECS}
FAMILIES = tuple(dict.fromkeys(spec.family for spec in SPECS.values()))
