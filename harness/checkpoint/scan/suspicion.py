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
SHARD_EFFECT, SHARD_MATRICES, MOST_FILES = 0.02, 12, 8
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


KINDS = ("seam", "off_centre", "size", "magnitude", "rows", "shard")
HONEST, HONEST_MATRICES = 97, 6905
"""Honest checkpoints on which suspicions were counted: none showed any. Source: SmolLM2-135M and MiniLM-L6, plain and
in FP8, MXFP4, NVFP4 and INT4; 21 random models of 11 architectures, roughened, plain and in three formats; three random
ones with MXFP4 experts drawn block by block."""
_MEASURED = (
    f"false alarms: in none of {HONEST} honest checkpoints, so in fewer than {1 - 0.05 ** (1 / HONEST):.1%} at 95 %"
)
FALSE_ALARMS = {
    kind: f"{_MEASURED}; {RATE:g} of them by its limit, were statistics normal" if kind == "seam" else _MEASURED
    for kind in KINDS
}
"""How often an honest checkpoint shows a suspicion of each kind, in words."""


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

    def without(self, files: frozenset[str]) -> dict[int, float]:
        """Return what the layers around make of each layer's log size, where the members of some files say nothing."""
        usual = dict(self._usual)
        for layer, members in self._members.items():
            if any(where in files for where, _ in members):
                others = [size for where, size in members if where not in files]
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
    """Hold the matrices of each file together against those of the files around it: the furthest first, and the others
    without it."""
    shards = _Shards(families)
    told = frozenset[str]()
    while len(shards.files) > len(told) + 1 and len(told) < MOST_FILES:
        seen = [(*found, file) for file in shards.files if file not in told and (found := shards.off(file, told))]
        if not seen or max(seen)[0] <= 1:
            return
        _, middle, count, file = max(seen)
        told |= {file}
        message = (
            f"the {count} matrices of {file} are {math.exp(middle):.3f} times as large as their neighbours in "
            "other files: a file of another training step, or another export"
        )
        yield Suspicion(kind="shard", name=shards.first(file), file=file, offset=0, message=message)


class _Shards:
    """The families of a checkpoint by file."""

    def __init__(self, families: dict[str, list[Statistics]]) -> None:
        self._groups = [(_Layers(f), f[:: max(1, len(f) // SAMPLED)]) for f in families.values()]
        self._members: dict[str, list[tuple[int, Statistics]]] = defaultdict(list)
        for number, family in enumerate(families.values()):
            for s in family:
                self._members[s.file].append((number, s))
        self.files = sorted(self._members)

    def first(self, file: str) -> str:
        """Return the name of a file's first matrix."""
        return self._members[file][0][1].name

    def off(self, file: str, told: frozenset[str]) -> tuple[float, float, int] | None:
        """Return how far a file is off (above 1: too far), its log size beside its neighbours', and how many matrices.

        Files that were told of already say nothing.
        """
        members, silent = self._members[file], told | {file}
        made = {number: self._groups[number][0].without(silent) for number in {number for number, _ in members}}
        off = [_log_size(s) - near for n, s in members if (near := made[n].get(_layer(s))) is not None]
        spread = [
            _log_size(s) - near
            for number, layers in made.items()
            for s in self._groups[number][1]
            if s.file not in silent and (near := layers.get(_layer(s))) is not None
        ]
        if len(off) < SHARD_MATRICES or len(spread) < SHARD_MATRICES:
            return None
        usual = 1.4826 * median(abs(r) for r in spread)
        middle = median(off)
        return abs(middle) / max(SHARD_EFFECT, SIGMAS * usual / math.sqrt(len(off))), middle, len(off)
