"""What further loads of a converting port show, as measurements of the load stage. Must not know limits or files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.stages import measured
from harness.types import Measurement, Run

NAME = "load"
CONVERSION_METRICS = ("conversion_mismatches", "conversion_peak_over_promise", "packed_originals_kept")
PROCESS_BYTES = 256 << 20
"""What the process may take beside: an allocator keeps what was freed. Source: as in `checkpoint.plan`."""


def conversion_of(run: Run, facts: Mapping[str, Any]) -> list[Measurement]:
    """Return what the loads changed, took and left behind; each metric has at least one measurement."""
    loads: list[Mapping[str, Any]] = facts["loads"]
    changed = [
        measured(NAME, run, "conversion_mismatches", 1.0, c["name"], order=i, detail={**c, "message": _changed(c)})
        for i, c in enumerate(facts["changed"])
    ]
    kept = [
        measured(NAME, run, "packed_originals_kept", 1.0, k["name"], detail={**k, "message": _kept(k)})
        for k in {k["name"]: k for load in loads for k in load["kept"]}.values()
    ]
    whole = {"loads": [{k: v for k, v in load.items() if k != "kept"} for load in loads]}
    n = max(1, facts["weights"])
    return [
        *(changed or [measured(NAME, run, "conversion_mismatches", 0.0, "all", n=n, detail=whole)]),
        *(_peak(run, load, facts) for load in loads),
        *(kept or [measured(NAME, run, "packed_originals_kept", 0.0, "all", n=n)]),
    ]


def _peak(run: Run, load: Mapping[str, Any], facts: Mapping[str, Any]) -> Measurement:
    """Hold what one load took against what stays, one workspace and one layer; a port's own count counts too."""
    workspace = min(load["workspace_bytes"], facts["layer_decoded_bytes"])
    promise = load["held_bytes"] + workspace + facts["layer_bytes"]
    taken = max(load["peak_bytes"], load["reported_peak_bytes"], load["process_peak_bytes"] - PROCESS_BYTES)
    parts = f"{load['held_bytes']} stay, {workspace} of workspace, {facts['layer_bytes']} of the largest layer"
    told = f"loading took {taken} bytes at most, promised were {promise} ({parts}); {load['how']}"
    stays, subject = facts.get("stays_counted_bytes", 0), load["how"]
    if stays:  # no peak can be told of such a device, and no port is to blame
        told = f"the device counts {stays} bytes of a tensor that was freed, so that no peak can be told: {told}"
        subject = "runtime.allocated"
    detail = {**{k: v for k, v in load.items() if k != "kept"}, "promised_bytes": promise, "message": told}
    return measured(NAME, run, "conversion_peak_over_promise", taken / max(1, promise), subject, detail=detail)


def _changed(change: Mapping[str, Any]) -> str:
    words = {"gone": "is not there", "new": "was not there before", "other bytes": "holds other bytes"}[change["state"]]
    nan = f"; {change['nan']} of them NaN, as the workspace was" if change["nan"] else ""
    return f"{change['name']} {words} after a load {change['how']}{nan}: something is taken from what was left over"


def _kept(kept: Mapping[str, Any]) -> str:
    return f"{kept['name']} is still in memory as {kept['file']} has it ({kept['bytes']} bytes), beside what it became"
