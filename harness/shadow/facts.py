"""What a worker does for a run of kind `shadow`: forwards of several lengths, with operators repeated on the CPU.

Knows adapters and the shadow; must not know limits. Facts are plain JSON: what may pass is decided elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.adapter import Adapter, Recorder, capabilities, silent
from harness.devices import declared
from harness.shadow.calls import mapped
from harness.shadow.evidence import save
from harness.shadow.mode import Call, Found, Shadow
from harness.shadow.places import Places
from harness.shadow.truth import inside_eps
from harness.types import Case, Facts, Setup

Beat = Callable[[str], None]
MOST_SAVED = 12
"""Wrong calls that are saved; of further operators the report has the words."""


def shadow_facts(
    adapter: Adapter, setup: Setup, case: Case, options: Mapping[str, Any], folder: Path, beat: Beat
) -> Facts:
    """Run the port over parts of a case, operators repeated, and over the whole of it without.

    Options: `lengths` (tokens of each prefill), `seconds` (of the shadow's own time), `below` (a folder of `folder` for
    what is saved). Returns: `operators` {name: calls, compared, worst, unrepeated, large}, `findings`, `changed`
    (elements of the logits that differ from a run without a shadow; None where two runs without one differ), `seconds`.
    """
    places, paths = Places(), dict(getattr(adapter, "module_paths", {}))
    shadow = Shadow(
        places, budget_s=float(options["seconds"]), inside=inside_eps(declared(adapter, setup)), beat=beat
    )  # fmt: skip
    changed: int | None = 0
    for number, length in enumerate(options["lengths"]):
        part = dataclasses.replace(case, token_ids=tuple(case.token_ids or ())[:length])
        inputs = adapter.prepare(part, silent)
        shadow.phase = f"prefill of {length} tokens"
        beat(f"shadow: {shadow.phase}")
        if number == 0:
            with places.following():
                plain = adapter.forward(inputs, silent), adapter.forward(inputs, silent)
        record = silent if places.met else places.record  # modules say by themselves where they are
        with places.following(), shadow:
            seen = adapter.forward(inputs, record)
        if number == 0:
            changed = _changed(seen, *plain)
    if "phases" in capabilities(adapter) and options["lengths"]:
        _decode(adapter, inputs, shadow, places, record)
    return {
        "operators": _tallies(shadow.found),
        "findings": _findings(
            shadow.found, folder / str(options.get("below", "")), _device_options(setup), places, paths
        ),
        "changed": changed,
        "seconds": shadow.found.seconds,
    }


def _changed(seen: Tensor, plain: Tensor, again: Tensor) -> int | None:
    """Count the elements in which a shadowed run differs from a plain one, if plain runs are equal among themselves."""
    seen, plain, again = (t.detach().cpu().double() for t in (seen, plain, again))
    if not torch.equal(plain.nan_to_num(), again.nan_to_num()):
        return None
    return int((seen.nan_to_num() != plain.nan_to_num()).sum())


def _decode(adapter: Any, inputs: Any, shadow: Shadow, places: Places, record: Recorder) -> None:
    """Run one step after a cache, shadowed."""
    length = inputs.token_ids.shape[-1]
    slot = adapter.open()
    try:
        adapter.step(slot, inputs, 0, length - 1, silent)
        shadow.phase = f"decode of token {length}"
        with places.following(), shadow:
            adapter.step(slot, inputs, length - 1, length, record)
    finally:
        adapter.free(slot)


def _device_options(setup: Setup) -> dict[str, str]:
    """Return the options that the device was enabled with (`harness.devices`)."""
    return {k.removeprefix("device_"): v for k, v in setup.options.items() if k.startswith("device_")}


def _tallies(found: Found) -> dict[str, Any]:
    return {
        name: {"calls": t.calls, "compared": t.compared, "worst": t.worst, "unrepeated": t.unrepeated, "large": t.large}
        for name, t in sorted(found.tallies.items())
    }


def _findings(
    found: Found, folder: Path, options: Mapping[str, str], places: Places, paths: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the wrong calls as plain JSON, in the order they ran, the first ones saved."""
    told = []
    for number, (key, call) in enumerate(found.wrong.items()):
        before, behind = places.around(call.told)
        call = dataclasses.replace(call, module=call.module or paths.get(behind) or behind)
        place = save(call, folder, options) if number < MOST_SAVED else None
        told.append({**_words(call), "taps": [before, behind], "times": found.counts[key], "saved": str(place or "")})
    return told


def _words(call: Call) -> dict[str, Any]:
    judged = call.judged
    inputs: list[str] = []
    mapped((call.args, call.kwargs), lambda leaf: inputs.append(leaf.words()) if hasattr(leaf, "words") else None)
    return {
        "operator": call.operator, "kind": judged.kind, "ratio": judged.ratio, "wrong": judged.wrong,
        "count": judged.count, "at": judged.at, "actual": judged.actual, "expected": judged.expected,
        "module": call.module, "within": call.within, "site": call.site, "phase": call.phase, "number": call.number,
        "part": call.part, "inputs": inputs,
    }  # fmt: skip
