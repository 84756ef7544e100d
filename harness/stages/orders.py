"""How a weight was put together, in words and for comparison. Knows orders that an audit tells; no limits or files."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from typing import Any


def template(name: str) -> str:
    """Return a name with its numbers taken out."""
    return re.sub(r"\d+", "#", name)


def layerless(order: str) -> str:
    """Return an order without the number of the layer that its sources lie in."""
    return re.sub(r"\b(layers|blocks|h)\.\d+\.", r"\1.#.", order)


def order_words(order: str) -> str:
    """Return an order as a person reads it: `rows 0-63 of q_proj.weight, rows 0-15 of k_proj.weight`."""
    value = json.loads(order)
    runs = [run for stream in value.get("streams", []) for run in stream]
    if not runs:
        return str(value.get("how") or value.get("joined") or order[:120])
    parts = [
        f"rows {start}-{start + count - 1} of {source or 'nothing known'}" if start >= 0 else f"{count} rows of padding"
        for source, start, count in runs[:4]
    ]
    more = [f"{len(runs) - 4} more"] if len(runs) > 4 else []
    return ", ".join([*parts, *more]) + (", transposed" if value.get("transposed") else "")


def canonical(order: str) -> Any:
    """Return an order for comparison: a reshape keeps the order of the elements."""
    value = json.loads(order)
    return {"how": "same"} if value.get("how") in ("reshape", "padded") else value


def sources(order: str) -> int:
    """Count the tensors that an order takes rows of."""
    value = json.loads(order)
    runs = [r for stream in value.get("streams", [value.get("joined", [])]) for r in stream]
    return len({r[0] for r in runs})


def exchanged_words(found: str, due: str) -> str:
    """Return how an order differs from the one that is due, in words after "memory holds"; "" if in nothing known."""
    ours, theirs = json.loads(found or "{}"), json.loads(due or "{}")
    if "streams" not in ours or "streams" not in theirs:
        return _turned(ours, theirs)
    if bool(ours.get("transposed")) != bool(theirs.get("transposed")):
        return "the right rows with axes exchanged (transposed)"
    if ours["stride"] != theirs["stride"]:
        return _woven(ours["stride"], theirs["stride"], _leaves(ours))
    if ours["streams"] == theirs["streams"]:
        return ""
    a, b = ([run for stream in value["streams"] for run in stream] for value in (ours, theirs))
    if len(a) == len(b) and [r[0] for r in a] == [r[0] for r in b]:
        return "the right tensors, cut into other rows: another rank's slice, or another size of head or group"
    return _sources_exchanged(_names(a), _names(b))


def odd_turn(order: str) -> str:
    """Return which of several numbered parts is put together in another order than the others; "" if none is.

    Of one expert, up lies before gate where all other experts have gate before up.
    """
    turns: list[tuple[tuple[str, ...], list[str]]] = []
    runs = [run for stream in json.loads(order or "{}").get("streams", []) for run in stream]
    for name in _names(runs):
        numbers = tuple(re.findall(r"\d+", name))
        if not turns or turns[-1][0] != numbers:
            turns.append((numbers, []))
        turns[-1][1].append(_leaf(name))
    usual, count = Counter(tuple(leaves) for _, leaves in turns).most_common(1)[0] if turns else ((), 0)
    odd = [(numbers, leaves) for numbers, leaves in turns if tuple(leaves) != usual]
    if count < 2 * len(odd) or not odd or any(sorted(leaves) != sorted(usual) for _, leaves in odd):
        return ""
    numbers, leaves = odd[0]
    return f"{' before '.join(leaves)} in number {numbers[-1]}, where {count} others have {' before '.join(usual)}"


def foreign_words(order: str, source: str, *, head: bool) -> str:
    """Return what a weight holds of another tensor than its own, in words after "memory holds"; "" if nothing."""
    found = list(dict.fromkeys(run[0] for stream in json.loads(order).get("streams", []) for run in stream if run[0]))
    if not found or source in found or any(name.startswith(f"{source}[") for name in found):
        return ""
    if head and len(found) == 1 and re.search(r"embed|wte", found[0] + source):
        return f"{found[0]}: the output head and the embedding tied, though the checkpoint has one of each"
    return f"{found[0]}, another tensor than its own"


def _turned(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    turned = [str(v.get("how", "")).startswith("permute") or bool(v.get("transposed")) for v in (ours, theirs)]
    return "its tensor with axes exchanged: a transposition" if turned[0] != turned[1] else ""


def _names(runs: list[list[Any]]) -> list[str]:
    """Return the tensors in their order, each run of one tensor once."""
    return [name for i, (name, _, _) in enumerate(runs) if not i or runs[i - 1][0] != name]


def _leaves(value: dict[str, Any]) -> list[str]:
    """Return the telling words of the tensors, each once."""
    names = [_leaf(run[0]) for stream in value["streams"] for run in stream if run[0]]
    return list(dict.fromkeys(names))


def _leaf(name: str) -> str:
    words = [w for w in name.split(".") if w not in ("weight", "bias") and not w.isdecimal()]
    return words[-1] if words else name


def _woven(ours: int, theirs: int, leaves: list[str]) -> str:
    what = " and ".join(leaves[:3]) or "rows"
    if theirs == 1:
        return f"{what} interleaved (row by row, by turns) where one belongs after the other"
    if ours == 1:
        return f"{what} one after the other where they belong interleaved (row by row, by turns)"
    return f"{what} interleaved in {ours} where {theirs} belong by turns"


def _sources_exchanged(a: list[str], b: list[str]) -> str:
    """Name what changed places in two sequences of tensors."""
    wrong = [(x, y) for x, y in zip(a, b, strict=False) if x != y]
    if not wrong or len(a) != len(b):
        absent, foreign = sorted(set(b) - set(a)), sorted(set(a) - set(b))
        if foreign:
            return f"{foreign[0]} and {len(foreign) - 1} more, which belong elsewhere" if foreign[1:] else foreign[0]
        return f"{absent[0]} nowhere, another tensor in its place" if absent else ""
    if sorted(a) != sorted(b):
        first = wrong[0]
        more = f" (and {len(wrong) - 1} more)" if wrong[1:] else ""
        return f"{first[0]} in the place of {first[1]}{more}: another tensor than its own"
    grouped = [sum(_leaf(x) != _leaf(y) for x, y in pairwise(names)) for names in (a, b)]
    if abs(grouped[0] - grouped[1]) > 2:
        ways = "all of one before the other", "by turns, tensor by tensor"
        found, due = ways if grouped[0] < grouped[1] else ways[::-1]
        return f"{' and '.join(dict.fromkeys(map(_leaf, b)))} {found}, where they belong {due}"
    numbered = [(x, y) for x, y in wrong if template(x) == template(y)]
    if len(numbered) < len(wrong):
        pair = sorted({_leaf(wrong[0][0]), _leaf(wrong[0][1])})
        where = "everywhere" if len(wrong) == len(a) else f"in {len(wrong)} of {len(a)} places"
        return f"{' and '.join(pair)} exchanged ({where})"
    return _numbers_exchanged(numbered)


def _numbers_exchanged(wrong: list[tuple[str, str]]) -> str:
    """Name which numbers of a stack changed places: two experts, all by one, or no pattern."""
    moves: dict[tuple[int, int], None] = {}
    what = "tensors"
    for x, y in wrong:
        xs, ys = ([int(n) for n in re.findall(r"\d+", name)] for name in (x, y))
        apart = [i for i, (p, q) in enumerate(zip(xs, ys, strict=True)) if p != q]
        if len(apart) != 1:
            return f"{x} in the place of {y}: another tensor than its own"
        moves[xs[apart[0]], ys[apart[0]]] = None
        before = re.findall(r"([A-Za-z_]+)\.\d+", y)
        what = before[apart[0]] if apart[0] < len(before) else what
    pairs = list(moves)
    if len(pairs) == 2 and pairs[0] == pairs[1][::-1]:
        return f"{what} {pairs[0][1]} and {pairs[0][0]} exchanged"
    step, often = Counter(x - y for x, y in pairs).most_common(1)[0]
    if len(pairs) > 2 and often >= len(pairs) - abs(step):
        return f"{what} shifted by {abs(step)}: number i{step:+d} in the place of i"
    told = ", ".join(f"{x} in the place of {y}" for x, y in pairs[:3])
    return f"{what} in another order ({told}{', ...' if pairs[3:] else ''})"


def ascending(order: str) -> str:
    """Return an order with the tensors that differ by numbers put in ascending order, in the places they take."""
    value = json.loads(order)
    runs = [run for stream in value.get("streams", []) for run in stream]
    by_template: dict[str, list[str]] = {}
    for name, _, _ in runs:
        by_template.setdefault(template(name), []).append(name)
    ordered = {
        t: iter(sorted(dict.fromkeys(names), key=lambda n: [int(d) for d in re.findall(r"\d+", n)]))
        for t, names in by_template.items()
    }
    renamed: dict[str, str] = {}
    for name, _, _ in runs:
        if name not in renamed:
            renamed[name] = next(ordered[template(name)])
    value["streams"] = [[[renamed[n], s, c] for n, s, c in stream] for stream in value.get("streams", [])]
    return json.dumps(value)
