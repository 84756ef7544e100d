"""What operators repeated on the CPU showed, as measurements of the startup stage. Must not know limits or devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.cases import image_case, text_case
from harness.stages import StageContext, measured
from harness.types import Case, Measurement, Run

NAME = "startup"
SHADOW, SHADOW_PICTURE = "startup/shadow", "startup/shadow-picture"
LENGTHS = (7, 23, 61, 131)
"""Tokens of the prefills: one in each of several bands between powers of two."""
PICTURE = (3, 4)
"""Height and width in merged patches of the picture that is shown."""
SECONDS, SECONDS_FULL = 20.0, 90.0
"""Time that repeating may take; a forward itself is not counted."""
SHADOW_METRICS = ("shadow_error_ratio", "shadow_wrong_elements", "shadow_changed_elements", "shadow_compared_calls")


def shadow_runs(context: StageContext) -> Iterator[Run]:
    """Yield the runs, where the port is on a device whose operators are not the CPU's own: of words, of a picture."""
    if "accelerator" not in context.capabilities:
        return
    most = context.scope.max_length_tokens or LENGTHS[-1]
    lengths = [n for n in LENGTHS if n <= most] or [most]
    case = text_case(context.info, lengths[-1])
    options: dict[str, Any] = {"lengths": lengths, "seconds": SECONDS_FULL if context.full else SECONDS}
    yield Run(id=SHADOW, stage=NAME, kind="shadow", case=case, observe=False, options=options)
    picture = picture_case(context)
    if picture is not None:
        options = {"lengths": [len(picture.token_ids or ())], "seconds": options["seconds"] / 2, "below": "picture"}
        yield Run(id=SHADOW_PICTURE, stage=NAME, kind="shadow", case=picture, observe=False, options=options)


def picture_case(context: StageContext) -> Case | None:
    """Return a request with one picture; None where the port claims none."""
    info = context.info
    if not context.scope.image or not info.patch_size:
        return None
    unit = info.patch_size * info.merge_size
    return image_case(info, [(PICTURE[0] * unit, PICTURE[1] * unit)], seed=4)


def shadowed(run: Run, facts: Mapping[str, Any]) -> list[Measurement]:
    """Return for each operator how far off it was at worst, and what was wrong outright; each metric once at least."""
    tallies: Mapping[str, Any] = facts["operators"]
    rounded: dict[str, Any] = {}
    wrong: dict[str, Any] = {}
    for finding in facts["findings"]:
        if finding["ratio"] is None or finding["wrong"]:
            wrong.setdefault(f"{finding['operator']}|{finding['kind']}", finding)
        else:
            rounded.setdefault(finding["operator"], finding)
    found = []
    for order, (name, tally) in enumerate(tallies.items()):
        if tally["compared"]:
            detail = _told(rounded[name]) if name in rounded else {}
            found.append(
                measured(NAME, run, "shadow_error_ratio", tally["worst"], _subject(name), order=order,
                         n=tally["compared"], detail=detail)
            )  # fmt: skip
    order_of = {name: order for order, name in enumerate(tallies)}
    bad = [
        measured(NAME, run, "shadow_wrong_elements", f["wrong"], _subject(f["operator"]), n=f["count"],
                 order=order_of[f["operator"]], where={"what": f["kind"]}, detail=_told(f))
        for f in wrong.values()
    ]  # fmt: skip
    compared = sum(t["compared"] for t in tallies.values())
    found += bad or [measured(NAME, run, "shadow_wrong_elements", 0, "shadow", n=max(1, compared))]
    found.append(_changed(run, facts["changed"]))
    apart = {name: t["unrepeated"] for name, t in tallies.items() if t["unrepeated"]}
    apart |= {name: f"{t['large']} large calls" for name, t in tallies.items() if t["large"] and name not in apart}
    seen = sum(t["calls"] for t in tallies.values())
    words = f"{compared} of {seen} calls of {len(tallies)} operators were repeated in {facts['seconds']:.1f} s"
    if apart:
        words += "; not repeated: " + ", ".join(f"{name} ({why})" for name, why in apart.items())
    found.append(
        measured(NAME, run, "shadow_compared_calls", compared, "shadow", n=max(1, compared), detail={"message": words})
    )
    return found


def _subject(operator: str) -> str:
    return f"shadow.{operator.replace('::', '.')}"


def _changed(run: Run, changed: int | None) -> Measurement:
    if changed is None:
        detail = {"message": "two equal runs without a shadow differ, so a run with one cannot be held against them"}
        return measured(NAME, run, "shadow_changed_elements", None, "shadow", problem="empty", detail=detail)
    return measured(NAME, run, "shadow_changed_elements", changed, "shadow")


def _told(finding: Mapping[str, Any]) -> dict[str, Any]:
    """Return a finding in words: operator, place, input, what came out, how to replay it."""
    where = finding["module"] or "no module"
    if finding["within"]:
        where += f", inside of {finding['within']}"
    before, behind = finding["taps"]
    if before or behind:
        where += f", between {before or 'the beginning'} and {behind or 'the end'}"
    what = {
        "values": "is further off than its roundings allow", "bits": "gives other values",
        "nonfinite": "has NaN or infinity in other places", "neighbours": "changes memory beside its output",
        "shape": "gives another shape",
    }[finding["kind"]]  # fmt: skip
    message = (
        f"{finding['operator']} in {where} ({finding['site']}; {finding['phase']}) {what}: element {finding['at']} of "
        f"{finding['count']} is {finding['actual']}, on the CPU {finding['expected']}; "
        f"given {'; '.join(finding['inputs'])}; in {finding['times']} of the repeated calls"
    )
    if finding["part"]:
        message += f"; these are {finding['part']}, which alone need not come out the same"
    if finding["saved"]:
        message += f"; replay it: python {finding['saved']}/replay.py"
    return {"message": message, "module": finding["module"], "saved": finding["saved"]}
