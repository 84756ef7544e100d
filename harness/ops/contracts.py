"""The contract of custom operators, on the inputs that they were given: schema, fake kernel, aliasing. No limits."""

from __future__ import annotations

from typing import Any

import torch

from harness.ops.needs import Seen

TESTS = ("test_schema", "test_faketensor")
"""Of torch.library.opcheck; a port runs without gradients, so what is about them is not asked."""


def contracts(seen: Seen) -> list[dict[str, Any]]:
    """Return for each custom operator that ran what torch.library.opcheck says of it on the inputs that were kept."""
    found = []
    for name, samples in sorted(seen.samples.items()):
        failures = []
        for func, args, kwargs in samples:
            failures += _failures(func, args, kwargs)
        found.append({"operator": name, "samples": len(samples), "failures": sorted(set(failures))})
    return found


def _failures(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    told = torch.library.opcheck(func, args, kwargs, test_utils=TESTS, raise_exception=False)
    return [f"{test}: {_short(result)}" for test, result in told.items() if result != "SUCCESS"]


def _short(result: Any) -> str:
    """Return the first sentence that says something; the rest is advice on other tools."""
    lines = [line.strip() for line in str(result).splitlines() if line.strip()]
    return f"{type(result).__name__}: {lines[0][:300] if lines else ''}"
