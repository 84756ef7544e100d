"""Put the weights of a checkpoint in families by name: stacks of layers, lists of experts. Knows names; no formats.

A template is a name with its numbers taken out: `model.layers.#.mlp.experts.#.up_proj.weight`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.checkpoint.bulk import many_records
from harness.checkpoint.container import Checkpoint
from harness.checkpoint.formats import Logical, logical_tensors
from harness.checkpoint.header import Problem

VISION = re.compile(
    r"(^|[._])(visual|vision\w*|vit|image\w*|mm_projector|multi_modal_projector|patch_embed\w*)([._]|$)"
)
EXTRA = re.compile(r"(^|[._])(mtp\w*|nextn\w*|eagle\w*|draft\w*)([._]|$)")
AUDIO = re.compile(r"(^|[._])(audio\w*|speech\w*|talker\w*|code2wav|token2wav)([._]|$)")


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """All weights of one template. `members` by their numbers; the first is the layer where there is a stack."""

    template: str
    members: Mapping[tuple[int, ...], Logical]

    @property
    def stack(self) -> str:
        """The stack it lies in, `model.layers`; empty for what lies in none."""
        return self.template.split(".#", 1)[0] if "#" in self.template else ""

    @property
    def leaf(self) -> str:
        """The name within a layer."""
        return self.template.split("#.", 1)[1] if "#." in self.template else self.template

    @property
    def first(self) -> Logical:
        """Any member: the first."""
        return next(iter(self.members.values()))


def families(checkpoint: Checkpoint) -> Sequence[Family]:
    """Return the families of a checkpoint's weights, in the order of its tensors; worked out once."""
    if "families" not in checkpoint.known:
        with many_records():
            checkpoint.known["families"] = _families(logical_tensors(checkpoint))
    found: Sequence[Family] = checkpoint.known["families"]
    return found


def _families(logicals: Sequence[Logical]) -> tuple[Family, ...]:
    groups: dict[str, dict[tuple[int, ...], Logical]] = defaultdict(dict)
    for logical in logicals:
        template, numbers = split(logical.name)
        groups[template][numbers] = logical
    return tuple(Family(template, members) for template, members in groups.items())


def split(name: str) -> tuple[str, tuple[int, ...]]:
    """Return the template of a name and its numbers."""
    numbers, parts = [], name.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal() and len(part) < 8 and part.isascii():
            numbers.append(int(part))
            parts[i] = "#"
    return ".".join(parts), tuple(numbers)


def joined(template: str, numbers: Sequence[int]) -> str:
    """Return the name of a template with these numbers."""
    pieces = template.split("#")
    inner = [str(n) for n in numbers] + ["#"] * len(pieces)
    return "".join(piece + number for piece, number in zip(pieces, [*inner[: len(pieces) - 1], ""], strict=True))


def tower(name: str) -> str:
    """Return which part of a model a name or template belongs to: vision, audio, mtp or text."""
    if EXTRA.search(name):
        return "mtp"
    if VISION.search(name):
        return "vision"
    return "audio" if AUDIO.search(name) else "text"


def text_config(config: Mapping[str, object]) -> dict[str, object]:
    """Return the configuration of the text model: the outer one, with the inner one's words laid over it."""
    merged: dict[str, object] = dict(config)
    for key in ("thinker_config", "llm_config", "language_config", "text_config"):
        inner = merged.get(key)
        if isinstance(inner, dict):
            merged.update(inner)
    return merged


def number(config: Mapping[str, object], *keys: str) -> int | None:
    """Return the first of these keys that is a whole number that a size can be."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40:
            return value
    return None


def about(
    checkpoint: Checkpoint, logical: Logical | None, kind: str, expected: str, found: str, severity: str = "error"
) -> Problem:
    """Return a problem of a weight, with its place; of the configuration where no weight is concerned."""
    ref = checkpoint.tensors[next(iter(logical.parts.values()))] if logical is not None else None
    return Problem(
        kind=kind, name=logical.name if logical is not None else "",
        file=ref.file if ref is not None else "config.json",
        expected=expected, found=found, severity=severity, offset=ref.begin if ref is not None else None,
    )  # fmt: skip
