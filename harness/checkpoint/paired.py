"""Which checkpoint tensor a parameter should have been filled from, where neither its name nor its content says so.

Learnt from the parameters that were filled: another layer's parameter of the same kind names the tensor of that kind.
What is one of its kind is paired by its shape, where only one of each is left. Knows names and shapes alone.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

_NUMBER = re.compile(r"\d+")

Shape = tuple[int, ...]


def pairs(
    unfilled: Mapping[str, Shape], known: Iterable[tuple[str, str]], unused: Mapping[str, Shape]
) -> dict[str, str]:
    """Return the tensor that each unfilled parameter should hold, where that is clear; no tensor twice.

    `known`: parameters and the one tensor that each was filled from. Shapes may differ in order and in axes of one.
    """
    kinds = _kinds(known)
    found: dict[str, str] = {}
    for name, shape in unfilled.items():
        numbers = _NUMBER.findall(name)
        for template in kinds.get(_NUMBER.sub("#", name), ()):
            source = _filled_in(template, numbers)
            if source in unused and _alike(unused[source], shape) and source not in found.values():
                found[name] = source
                break
    by_shape: dict[Shape, list[str]] = defaultdict(list)
    for source, shape in unused.items():
        if source not in found.values():
            by_shape[_bare(shape)].append(source)
    left = {name: _bare(shape) for name, shape in unfilled.items() if name not in found}
    alone = Counter(left.values())
    for name, bare in left.items():
        if alone[bare] == 1 and len(by_shape.get(bare, ())) == 1:
            found[name] = by_shape[bare][0]
    return found


def _kinds(known: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return for each kind of parameter the kinds of tensor it was filled from, the most frequent first.

    A kind of tensor is a template whose numbers are places among the parameter's own: `layers.{0}.mlp.up.weight`.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for name, source in known:
        numbers = _NUMBER.findall(name)
        counts[_NUMBER.sub("#", name)][_template(source, numbers)] += 1
    return {kind: [template for template, _ in counter.most_common()] for kind, counter in counts.items()}


def _template(source: str, numbers: Sequence[str]) -> str:
    """Replace each number of a source by its place among a parameter's numbers, where it is one of them."""
    taken: set[int] = set()

    def place(match: re.Match[str]) -> str:
        for i, number in enumerate(numbers):
            if number == match.group() and i not in taken:
                taken.add(i)
                return f"\0{i}\0"
        return match.group()

    return _NUMBER.sub(place, source)


def _filled_in(template: str, numbers: Sequence[str]) -> str:
    return re.sub("\0(\\d+)\0", lambda m: numbers[int(m.group(1))], template)


def _bare(shape: Shape) -> Shape:
    return tuple(sorted(size for size in shape if size != 1))


def _alike(a: Shape, b: Shape) -> bool:
    return _bare(a) == _bare(b)
