"""What a right checkpoint does not look like: suspicions from the statistics of its matrices. Knows numbers and names.

None of these is a proof, so none is a failure by itself: each says what was seen and what is usual there. Seams are
corrected for the number of matrices (`RATE` is for a whole checkpoint, under the normal distribution); the others stand
eight robust deviations from their siblings. Each has a least effect beside that, because weights are not normal.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

from harness.checkpoint.scan.statistics import Statistics

RATE = 1e-3
"""Chance that an honest checkpoint shows any suspicion of one kind, were its statistics normal."""
SEAM_EFFECT, SEAM_SPREAD = 0.3, 2.0
"""Least log ratio of squared sizes, and its standard deviation times the root of the independent blocks."""
SEAM_SIGMAS, SEAM_LEAST_SPREAD = 5.0, 0.05
"""Robust deviations from siblings. Source: 420 matrices of SmolLM2-135M in FP8 and MXFP4 stay below 3; the same with
scales shifted, transposed or upside down read 4.5 to 9 in FP8 (44 blocks), 8 and more in MXFP4 (thousands)."""
CENTRE_EFFECT = 0.25
SIZE_EFFECT, END_EFFECT, SIZE_SPREAD = math.log(1.5), math.log(6.0), 0.03
"""Least effect inside a model, at its ends (layers with neighbours on one side only), and least spread. Source: the
first layer's o_proj and v_proj of SmolLM2-135M are 0.48 and 0.40 times the size of the next layers'."""
SIGMAS = 8.0
LARGEST_RMS, SMALLEST_RMS = 8.0, 1e-6
LIKENESS, LIKENESS_SPREAD = 0.3, 0.05
SHARD_EFFECT, SHARD_MATRICES = 0.02, 12
FEWEST_SIBLINGS = 6
FEWEST_ELEMENTS = 4096
NEIGHBOURS = 2
SAMPLED = 2000
"""Siblings of one kind that tell how sizes usually differ, at most."""
_NUMBER = re.compile(r"(?<![^.\[])\d+(?![^.\]])")
"""A number that is a part of a name by itself: of a layer, an expert, a matrix of a stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """One thing that looks wrong. `kind`: seam, off_centre, size, magnitude, rows, shard. `message` is a sentence."""

    kind: str
    name: str
    file: str
    offset: int
    message: str


FALSE_ALARMS: dict[str, str] = {}


def suspicions(statistics: Sequence[Statistics]) -> list[Suspicion]:
    """Return what looks wrong, in the order of the statistics within each kind."""
    matrices = [s for s in statistics if s.rows >= 2 and s.elements >= FEWEST_ELEMENTS]
    sigmas = NormalDist().inv_cdf(1 - RATE / (2 * max(1, len(matrices))))
    families = _families(matrices)
    return [
        *_seams(matrices, families, sigmas),
        *_off_centre(matrices, families),
        *_magnitudes(matrices),
        *_sizes(families),
        *_rows(families),
        *_shards(families),
    ]


def _about(kind: str, s: Statistics, message: str) -> Suspicion:
    return Suspicion(kind=kind, name=s.name, file=s.file, offset=s.offset, message=f"{s.name}: {message}")


def _families(matrices: Sequence[Statistics]) -> dict[str, list[Statistics]]:
    """Group matrices whose names differ in numbers only: the same weight of all layers and experts, `w1` with `w1`."""
    found: dict[str, list[Statistics]] = defaultdict(list)
    for s in matrices:
        found[_NUMBER.sub("#", s.name)].append(s)
    return {name: family for name, family in found.items() if len(family) >= FEWEST_SIBLINGS}


def _seams(matrices: Sequence[Statistics], families: dict[str, list[Statistics]], sigmas: float) -> Iterator[Suspicion]:
    """Find matrices with seams by their own blocks alone or, where those are few, beyond what their siblings show."""
    limits = {}
    for family in families.values():
        seams = [s.seam for s in family if s.seam_cells]
        if len(seams) >= FEWEST_SIBLINGS:
            usual = median(seams)
            spread = max(SEAM_LEAST_SPREAD, 1.4826 * median(abs(x - usual) for x in seams))
            limits.update(dict.fromkeys((s.name for s in family), max(SEAM_EFFECT, usual + SEAM_SIGMAS * spread)))
    for s in matrices:
        alone = SEAM_EFFECT + sigmas * SEAM_SPREAD / math.sqrt(max(1, s.seam_cells))
        beside = limits.get(s.name, math.inf)
        # Made-up weights may be drawn block by block: of blocks of one row, siblings know what is usual.
        if s.seam_cells and s.seam > (beside if s.seam_rows == 1 and s.name in limits else min(alone, beside)):
            yield _about(
                "seam", s, f"values jump at the edges of its blocks ({math.exp(s.seam):.1f} times as uneven as "
                "between them): its scales look transposed, shifted, upside down or another tensor's",
            )  # fmt: skip


def _off_centre(matrices: Sequence[Statistics], families: dict[str, list[Statistics]]) -> Iterator[Suspicion]:
    usual: dict[str, float] = {}
    for family in families.values():
        usual |= dict.fromkeys((s.name for s in family), median(_centre(x) for x in family))
    for s in matrices:
        apart = abs(_centre(s) - usual.get(s.name, 0.0)) if s.format == "plain" else abs(_centre(s))
        if apart > CENTRE_EFFECT and (s.format != "plain" or s.name in usual):
            yield _about(
                "off_centre", s, f"its mean is {_centre(s):+.2f} of its size, where weights lie around zero: "
                "a zero point or a sign looks lost",
            )  # fmt: skip


def _centre(s: Statistics) -> float:
    return s.mean / s.rms if s.rms else 0.0


def _magnitudes(matrices: Sequence[Statistics]) -> Iterator[Suspicion]:
    for s in matrices:
        if s.format != "plain" and s.rms and not SMALLEST_RMS <= s.rms <= LARGEST_RMS:
            yield _about(
                "magnitude", s, f"values of size {s.rms:.3g}, where weights are around 0.01 to 1: "
                "a scale looks upside down, read as a number, or without its exponent's bias",
            )  # fmt: skip


def _sizes(families: dict[str, list[Statistics]]) -> Iterator[Suspicion]:
    for family in families.values():
        beside = _Layers(family)
        rest = {s.name: beside.off(s) for s in family}
        spread = max(SIZE_SPREAD, 1.4826 * median(abs(r) for r in rest.values() if r is not None))
        for s in family:
            off = rest[s.name] or 0.0
            least = END_EFFECT if _layer(s) in (beside.layers[0], beside.layers[-1]) else SIZE_EFFECT
            if abs(off) > least and abs(off) > SIGMAS * spread:
                yield _about(
                    "size", s, f"{math.exp(off):.3g} times as large as its siblings make it ({len(family)} of them, "
                    f"usually within {math.expm1(spread):.0%}): a scale, or another model's tensor",
                )  # fmt: skip


def _layer(s: Statistics) -> int:
    number = _NUMBER.search(s.name)
    return int(number.group()) if number else 0


def _log_size(s: Statistics) -> float:
    return math.log(s.rms) if s.rms else -math.inf


class _Layers:
    """What the log sizes of a family are by layer, and what nearby layers make of one."""

    def __init__(self, family: Sequence[Statistics]) -> None:
        self._members: dict[int, list[tuple[str, float]]] = defaultdict(list)
        for s in family:
            self._members[_layer(s)].append((s.file, _log_size(s)))
        self.layers = sorted(self._members)
        self._usual = {layer: median(size for _, size in members) for layer, members in self._members.items()}
        self._many = all(len(members) >= FEWEST_SIBLINGS for members in self._members.values())

    def off(self, s: Statistics) -> float | None:
        """Return how far a log size lies from its layer's siblings or, where they are few, from nearby layers."""
        layer = _layer(s)
        near = self._usual[layer] if self._many else _near(self._usual, self.layers, layer, both=False)
        return None if near is None else _log_size(s) - near

    def without(self, file: str) -> dict[int, float]:
        """Return what the layers around make of each layer's log size, where the members of one file say nothing."""
        usual = dict(self._usual)
        for layer, members in self._members.items():
            if any(where == file for where, _ in members):
                others = [size for where, size in members if where != file]
                usual.pop(layer)
                usual |= {layer: median(others)} if others else {}
        layers = sorted(usual)
        made = {layer: _near(usual, layers, layer, both=True) for layer in self.layers}
        return {layer: near for layer, near in made.items() if near is not None}


def _near(usual: dict[int, float], layers: Sequence[int], layer: int, *, both: bool) -> float | None:
    """Return the middle of the nearest layers before and after; `both`: None where one side has none."""
    at = bisect_left(layers, layer)
    below = layers[max(0, at - NEIGHBOURS) : at]
    above = layers[bisect_right(layers, layer) :][:NEIGHBOURS]
    if not (below or above) or (both and not (below and above)):
        return None
    return median(usual[x] for x in (*below, *above))


def _rows(families: dict[str, list[Statistics]]) -> Iterator[Suspicion]:
    """Find stretches of rows without the columns' pattern, beyond what the same weight has in other layers.

    Heads differ, and may even be turned against the others: what was overwritten is like nothing.
    """
    for family in families.values():
        gaps = [_gap(s) for s in family]
        usual = median(gaps)
        spread = max(LIKENESS_SPREAD, 1.4826 * median(abs(g - usual) for g in gaps))
        for s, gap in zip(family, gaps, strict=True):
            lost = s.likeness >= LIKENESS and abs(s.least_likeness) < 2 / math.sqrt(s.elements // s.rows)
            if lost and gap > usual + SIGMAS * spread:
                start, stop = s.strange_rows
                yield _about(
                    "rows", s, f"rows {start} to {stop - 1} do not share the pattern of its columns (correlation "
                    f"{s.least_likeness:.2f}, elsewhere {s.likeness:.2f}): another tensor's rows, or never written",
                )  # fmt: skip


def _gap(s: Statistics) -> float:
    """Return how much stranger the strangest stretch is than the usual one, on Fisher's scale."""
    return math.atanh(min(s.likeness, 0.999)) - math.atanh(max(s.least_likeness, -0.999))


def _shards(families: dict[str, list[Statistics]]) -> Iterator[Suspicion]:
    """Hold the matrices of each file together against those of the files around it."""
    groups = [(_Layers(family), family, family[:: max(1, len(family) // SAMPLED)]) for family in families.values()]
    by_file: dict[str, list[tuple[int, Statistics]]] = defaultdict(list)
    for number, (_, family, _) in enumerate(groups):
        for s in family:
            by_file[s.file].append((number, s))
    for file in sorted(by_file) if len(by_file) > 1 else ():
        made = {number: groups[number][0].without(file) for number in {number for number, _ in by_file[file]}}
        off = [_log_size(s) - near for n, s in by_file[file] if (near := made[n].get(_layer(s))) is not None]
        spread = [
            _log_size(s) - near
            for number, layers in made.items()
            for s in groups[number][2]
            if s.file != file and (near := layers.get(_layer(s))) is not None
        ]
        if len(off) < SHARD_MATRICES or len(spread) < SHARD_MATRICES:
            continue
        usual = 1.4826 * median(abs(r) for r in spread)
        middle = median(off)
        if abs(middle) > SHARD_EFFECT and abs(middle) > SIGMAS * usual / math.sqrt(len(off)):
            message = (
                f"the {len(off)} matrices of {file} are {math.exp(middle):.3f} times as large as their neighbours in "
                "other files: a file of another training step, or another export"
            )
            yield Suspicion(kind="shard", name=by_file[file][0][1].name, file=file, offset=0, message=message)
