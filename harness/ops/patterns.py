"""What the wrong cases of one operator have in common, in words. Knows outcomes; must not know limits or devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from harness.ops.case import Case
from harness.ops.hold import Outcome

BLOCKS = (2, 4, 8, 16, 32, 64)
MOST_TRIALS = 16
"""Cases that the search for the two ends of a band may add."""


def pattern(outcomes: Sequence[Outcome], bad: Callable[[Case], bool]) -> str:
    """Return in words what the wrong ones share and the right ones lack; `bad` tries a further case. "" if nothing."""
    wrong = [o for o in outcomes if o.bad]
    right = [o for o in outcomes if not o.bad]
    if not wrong:
        return ""
    usual = outcomes[0].case.content
    words = [
        _special(wrong, right, usual), _form(wrong, right), _band(_usual(wrong, usual), _usual(right, usual), bad),
        _places(wrong),
    ]  # fmt: skip
    found = [w for w in words if w]
    return "; ".join(dict.fromkeys(found)) or _spared(wrong, right)


def _spared(wrong: Sequence[Outcome], right: Sequence[Outcome]) -> str:
    """Return what is right, where the usual input is wrong and nothing else is in common."""
    if not right:
        return "in every case"
    spared = sorted({o.case.content for o in right} - {o.case.content for o in wrong} - {"empty"})
    return f"right for {', '.join(spared)}" if spared else ""


def _special(wrong: Sequence[Outcome], right: Sequence[Outcome], usual: str) -> str:
    contents = {o.case.content for o in wrong}
    if usual in contents or not any(o.case.content == usual for o in right):
        return ""
    return f"only for inputs that are special: {', '.join(sorted(contents))}"


def _form(wrong: Sequence[Outcome], right: Sequence[Outcome]) -> str:
    forms = {o.case.form for o in wrong}
    if "contiguous" in forms or not any(o.case.form == "contiguous" for o in right):
        return ""
    tried = {o.case.form for o in right} & forms
    which = ", ".join(sorted(forms))
    return f"only for non-contiguous input ({which}{'; not every one' if tried else ''})"


def _usual(outcomes: Sequence[Outcome], usual: str) -> list[Outcome]:
    return [o for o in outcomes if o.case.content == usual and o.case.form == "contiguous"]


def _band(wrong: Sequence[Outcome], right: Sequence[Outcome], bad: Callable[[Case], bool]) -> str:
    """Return the band of widths that is wrong, its ends found by trying sizes between right and wrong ones."""
    bads, goods = sorted({o.case.size for o in wrong}), sorted({o.case.size for o in right})
    if not bads or not goods:
        return ""
    low, high, resize = bads[0], bads[-1], wrong[0].case.resized
    if any(low < size < high for size in goods):
        if resize is not None and (words := _multiples(bads, goods, lambda n: bad(resize(n)))):
            return words
        return f"wrong for widths {', '.join(map(str, bads[:6]))}, right for {', '.join(map(str, goods[:6]))}"
    below, above = max((s for s in goods if s < low), default=0), min((s for s in goods if s > high), default=0)
    if resize is not None:
        low = _edge(below, low, lambda n: bad(resize(n))) if below else low
        high = _edge(above, high, lambda n: bad(resize(n))) if above else high
    if below and above:
        return f"wrong only for widths {low}..{high}"
    if below:
        words = _multiples(bads, goods, lambda n: bad(resize(n))) if resize is not None else ""
        return f"{words}, from {low} on" if words else f"wrong only for widths from {low} on"
    return f"wrong only for widths up to {high}" if above else ""


def _multiples(bads: Sequence[int], goods: Sequence[int], wrong: Callable[[int], bool]) -> str:
    """Return in words that widths of whole blocks are right and others wrong, from the first wrong one on."""
    later = [size for size in goods if size > bads[0]]
    for block in BLOCKS:
        if any(size % block == 0 for size in bads):
            continue
        if any(size % block for size in later) or wrong(block * (((bads[0] + bads[-1]) // 2 // block) | 1)):
            continue
        return "wrong only for odd widths" if block == 2 else f"wrong only for widths that are no multiple of {block}"
    return ""


def _edge(good: int, bad: int, wrong: Callable[[int], bool]) -> int:
    """Return the wrong size next to the right ones, between a right one and a wrong one."""
    for _ in range(MOST_TRIALS):
        if abs(bad - good) <= 1:
            break
        middle = (good + bad) // 2
        good, bad = (good, middle) if wrong(middle) else (middle, bad)
    return bad


def _places(wrong: Sequence[Outcome]) -> str:
    """Return where in their outputs all wrong cases are wrong, if there is one way to say it."""
    known = [o.wrong for o in wrong if o.wrong is not None]
    known = [mark for mark in known if mark.dim() and mark.shape[-1] > 1] or known  # one column is first and last
    marks = [mark for mark in known if mark.dim() and not bool(mark.all())]
    if not marks or len(marks) < len(known):
        return ""
    found: set[str] | None = None
    for mark in marks:
        words = set(_of_one(mark))
        found = words if found is None else found & words
    best = sorted(found or (), key=len)
    return best[0] if best else ""


def _of_one(mark: Tensor) -> list[str]:
    """Return every way to say where one output is wrong."""
    columns = mark.reshape(-1, mark.shape[-1]).any(0)
    rows = mark.reshape(-1, mark.shape[-1]).any(1)
    words = []
    width = columns.numel()
    if width > 1:
        if bool(columns[-1]) and int(columns.sum()) == 1:
            words.append("only the last index of a row")
        if bool(columns[0]) and int(columns.sum()) == 1:
            words.append("only the first index of a row")
        first = int(columns.int().argmax())
        if first and bool(columns[first:].all()):
            words.append(f"columns from {first} on")
        if width > 3 and (bool(columns[1::2].all()) and not bool(columns[::2].any())):
            words.append("every second column")
    if rows.numel() > 1 and not bool(rows.all()):
        first = int(rows.int().argmax())
        if first and bool(rows[first:].all()):
            words.append(f"rows beyond {first - 1}")
        if int(rows.sum()) == 1:
            words.append("only the last row" if bool(rows[-1]) else "only the first row" if first == 0 else "one row")
    return words
