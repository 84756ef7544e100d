"""Which layers of a model a checkpoint holds, and what they were called before. Knows numbers and names; no tensors.

A cut model numbers its layers from 0 on without gaps, so that any loader takes it. `day0-cut.json` beside its
configuration says which layers of the whole model they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.checkpoint.names import tower
from harness.errors import CheckpointError
from harness.types import as_json, from_json

CUT_FILE = "day0-cut.json"
FORMAT = "day0.cut/1"
_NUMBERED = re.compile(r"(?<![\w.])((?:[A-Za-z_]\w*\.)*?(?:layers|blocks|layer|block|h))\.(\d+)(?=[.\W]|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What a cut model is. `layers` are the numbers in the whole model of layers 0, 1, ... here.

    `depth` is that of the whole model; `extra` are layers after its last (they predict further tokens), which follow
    the last one here too; `random` says that no weight was ever trained; `notes` are what a reader should know.
    """

    layers: tuple[int, ...]
    depth: int
    extra: tuple[int, ...] = ()
    random: bool = False
    notes: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Say whether every layer is there."""
        return self.layers == tuple(range(self.depth))

    def original(self, layer: int) -> int | None:
        """Return the number that a layer has in the whole model; None for one that is not here."""
        every = (*self.layers, *self.extra)
        return every[layer] if 0 <= layer < len(every) else None

    def told(self, *places: str) -> str:
        """Say what the layers that some text names are in the whole model: `layer 4 here is layer 47 of the whole`.

        Layers that kept their number are not mentioned, nor are those of a vision or audio tower.
        """
        moved: dict[int, int] = {}
        for place in places:
            for match in _NUMBERED.finditer(place):
                here, there = int(match[2]), self.original(int(match[2]))
                if there is not None and there != here and tower(match[1]) == "text":
                    moved[here] = there
        pairs = [f"layer {here} here is layer {there} of the whole model" for here, there in sorted(moved.items())]
        return "; ".join(pairs[:4])

    @property
    def sentence(self) -> str:
        """Say what was judged instead of the whole model."""
        weights = "random weights" if self.random else "its own weights"
        if self.whole:
            return f"the model with {weights}, all {self.depth} layers"
        word = "layer" if len(self.layers) == 1 else "layers"
        return f"a model cut to {word} {spelt(self.layers)} of {self.depth}, at true width, with {weights}"


def spelt(layers: Sequence[int]) -> str:
    """Write layers as a person does: `0-3,47,92`."""
    parts: list[str] = []
    start = previous = None
    for layer in [*layers, None]:
        if start is not None and previous is not None and layer != previous + 1:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = None
        start, previous = layer if start is None else start, layer
    return ",".join(parts)


def write_cut_file(cut: Cut, folder: Path) -> None:
    """Leave in a folder which layers it holds."""
    (folder / CUT_FILE).write_text(json.dumps({"format": FORMAT, **as_json(cut)}, indent=1) + "\n")


def read_cut(checkpoint: Path) -> Cut | None:
    """Return what a checkpoint folder was cut from; None for a model that is whole. Raises CheckpointError."""
    path = checkpoint / CUT_FILE
    if not path.is_file():
        return None
    try:
        words = json.loads(path.read_text())
        if words.pop("format") != FORMAT:
            raise ValueError(f"a format other than {FORMAT}")
        return from_json(Cut, words)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"expected what a model was cut from in {path}, found: {error!r}; cut it again") from None
