"""Plan and write a cut of a checkpoint: which tensors, under which names. Knows names and headers; no model code.

Everything outside of the layers is kept (embedding, norms, head, other towers, separate MTP parts), the chosen layers
are numbered anew, and layers after the last follow them. What a configuration says of single layers, in lists of
modules that are not quantised for instance, is renamed with them.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.checkpoint.container import CONFIG, FULL_DIGEST_BYTES, Checkpoint
from harness.checkpoint.cut.configuration import Known, cut_config, depth_of
from harness.checkpoint.cut.files import CHUNK_BYTES, Piece, Told, publish_folder, write_tensors
from harness.checkpoint.cut.layers import CUT_FILE, FORMAT, Cut, read_cut, spelt, write_cut_file
from harness.checkpoint.expected import main_stack
from harness.checkpoint.folder import INDEX
from harness.checkpoint.header import TensorRef
from harness.checkpoint.names import Family, families, split, tower
from harness.checkpoint.problems import promise_problems
from harness.checkpoint.scan.manifest import LISTS, MANIFEST
from harness.errors import CheckpointError, UsageError
from harness.types import as_json

_SAMPLE_BYTES = 4096
_WORD_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".md", ".yaml")
_WORDS_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a folder will hold: its tensors in order, and from which folder the words beside them are copied."""

    cut: Cut
    config: Mapping[str, Any]
    pieces: tuple[Piece, ...]
    source: Path

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def digest(self) -> str:
        """Hex digest that changes with what the folder would hold; contents beyond 1 GiB are sampled."""
        state = hashlib.blake2b(digest_size=16)
        state.update(json.dumps([FORMAT, as_json(self.cut), self.config], sort_keys=True).encode())
        every = self.nbytes <= FULL_DIGEST_BYTES
        open_files: dict[Path, Any] = {}
        with ExitStack() as stack:
            for piece in self.pieces:
                state.update(f"\0{piece.name}\0{piece.dtype}\0{piece.shape}".encode())
                if piece.source is None:
                    continue
                path, begin = piece.source
                if path not in open_files:
                    open_files[path] = stack.enter_context(path.open("rb"))
                for at, count in _spans(begin, piece.nbytes, every):
                    open_files[path].seek(at)
                    state.update(open_files[path].read(count))
        return state.hexdigest()


def _spans(begin: int, nbytes: int, every: bool) -> Iterator[tuple[int, int]]:
    end = begin + nbytes
    if every:
        yield from ((at, min(CHUNK_BYTES, end - at)) for at in range(begin, end, CHUNK_BYTES))
    else:
        for at in sorted({begin, max(begin, end - _SAMPLE_BYTES)}):
            yield at, min(_SAMPLE_BYTES, end - at)


def plan_cut(checkpoint: Checkpoint, layers: Sequence[int], known: Known | None = None) -> Plan:
    """Decide what a checkpoint of some layers holds. Reads headers only.

    `known` is what the architecture's own code works out of a configuration, where it can be asked.
    Raises UsageError for layers that are no model of their own, CheckpointError for a checkpoint that lacks them.
    """
    if read_cut(checkpoint.path) is not None:
        raise UsageError(
            f"expected a whole model to cut, found {checkpoint.path}, which is cut already; name the source"
        )
    depth = depth_of(checkpoint.config)
    if not depth:
        raise UsageError(f"expected the number of layers in {checkpoint.path / CONFIG}, found none; nothing is cut")
    stacks = _stacks(checkpoint)
    main = main_stack(stacks)
    held = _numbers(stacks.get(main, ()))
    lost = [layer for layer in layers if layer not in held and layer < depth]
    if lost:
        raise CheckpointError(
            f"expected tensors of layers {spelt(layers)} in {checkpoint.path}, found none of {spelt(lost)}; "
            "`day0 inspect` says what is there"
        )
    extra = sorted(layer for layer in held if layer >= depth)
    holders = {frozenset(n[0] for n in family.members if n[0] < depth) for family in stacks[main]}
    config, notes = cut_config(checkpoint.config, layers, extra=len(extra), holders=holders, known=known)
    place = {old: new for new, old in enumerate((*layers, *extra))}
    cut = Cut(layers=tuple(layers), depth=depth, extra=tuple(extra), notes=notes)
    beside = _beside(stacks, main, layers, depth)
    renamed = _Renamed(main, {main: place, **beside})
    names = [(ref, new) for ref in checkpoint.tensors.values() if (new := renamed.tensor(ref.name)) is not None]
    names.sort(key=lambda pair: (pair[0].file, pair[0].begin))
    config = renamed.words(config)
    _agrees(checkpoint, {new: replace(ref, name=new) for ref, new in names}, config, layers)
    pieces = tuple(
        Piece(
            name=new, dtype=ref.dtype, shape=ref.shape, nbytes=ref.nbytes,
            source=(checkpoint.path / ref.file, ref.begin),
        )
        for ref, new in names
    )  # fmt: skip
    return Plan(cut=cut, config=config, pieces=pieces, source=checkpoint.path)


def _stacks(checkpoint: Checkpoint) -> dict[str, list[Family]]:
    """Return the families of numbered lists of the text model, by list."""
    stacks: dict[str, list[Family]] = defaultdict(list)
    for family in families(checkpoint):
        if family.stack and tower(family.template) == "text" and "encoder" not in family.stack:
            stacks[family.stack].append(family)
    return stacks


def _numbers(members: Sequence[Family]) -> set[int]:
    return {numbers[0] for family in members for numbers in family.members}


def _beside(
    stacks: Mapping[str, Sequence[Family]], main: str, layers: Sequence[int], depth: int
) -> dict[str, dict[int, int]]:
    """Return how lists beside the layers are numbered anew, where they have an entry for each layer, or all but one.

    Which entry belongs to which layer is known where there are as many, or where the first layers are kept.
    """
    found: dict[str, dict[int, int]] = {}
    first = list(layers) == list(range(len(layers)))
    for stack, members in stacks.items():
        numbers = _numbers(members)
        size = len(numbers)
        if stack == main or depth < 4 or numbers != set(range(size)) or abs(size - depth) > 1:
            continue
        if first:
            found[stack] = {n: n for n in range(size - (depth - len(layers)))}
        elif size == depth:
            found[stack] = {old: new for new, old in enumerate(layers)}
        else:
            raise UsageError(
                f"{stack} holds {size} entries for {depth} layers, and nothing says whose they are; choose the first "
                f"layers without a gap, like 0-{len(layers) - 1}"
            )
    return found


class _Renamed:
    """Names of single layers, as tensors and as the words of a configuration have them."""

    def __init__(self, main: str, places: Mapping[str, Mapping[int, int]]) -> None:
        self.place, self.places = places[main], {f"{stack}.": place for stack, place in places.items()}
        leaf = re.escape(main.rpartition(".")[2])
        self.word = re.compile(rf"^((?:.*?(?<!\w))?{leaf}\\?\.)(\d+)(?=[.\\$)]|$)")
        self.choice = re.compile(rf"^((?:.*?(?<!\w))?{leaf}\\?\.)\((?:\?:)?(\d+(?:\|\d+)*)\)")

    def tensor(self, name: str) -> str | None:
        """Return the name of a tensor here; None for one of a layer that is left out."""
        for stack, place in self.places.items():
            if name.startswith(stack):
                number, dot, rest = name[len(stack) :].partition(".")
                if number.isdecimal():
                    new = place.get(int(number))
                    return None if new is None else f"{stack}{new}{dot}{rest}"
        return name

    def words(self, value: Any) -> Any:
        """Return a configuration in which modules of layers have their new numbers, and those left out are gone."""
        if isinstance(value, dict):
            pairs = ((self._word(k), v) for k, v in value.items())
            return {k: self.words(v) for k, v in pairs if k is not None}
        if isinstance(value, list):
            found = [(v, self._word(v) if isinstance(v, str) else self.words(v)) for v in value]
            return [new for old, new in found if new is not None or old is None]
        return value

    def _word(self, text: str) -> str | None:
        if tower(text) != "text":
            return text
        if match := self.word.match(text):
            new = self.place.get(int(match[2]))
            return None if new is None else f"{match[1]}{new}{text[match.end() :]}"
        if match := self.choice.match(text):
            kept = [str(self.place[int(n)]) for n in match[2].split("|") if int(n) in self.place]
            return f"{match[1]}({'|'.join(kept)}){text[match.end() :]}" if kept else None
        return text


def renamed_in(value: Any, tensors: Mapping[str, tuple[str, tuple[int, ...]]], layers: Sequence[int]) -> Any:
    """Return words of a whole model with the modules of its layers named as in a cut of it.

    `tensors` are those of the cut, of which no file is there yet: dtype and shape by name.
    """
    refs = {n: TensorRef(name=n, dtype=d, shape=s, file="", begin=0, end=0) for n, (d, s) in tensors.items()}
    made = Checkpoint(path=Path(), tensors=refs, problems=(), headers={})
    place = {old: new for new, old in enumerate(layers)}
    main = main_stack(_stacks(made))
    return _Renamed(main, {main: place}).words(value) if main else value


def _agrees(
    whole: Checkpoint, tensors: Mapping[str, TensorRef], config: Mapping[str, Any], layers: Sequence[int]
) -> None:
    """Refuse a cut whose configuration and tensors contradict each other in a way that those of the whole do not."""
    cut = Checkpoint(path=whole.path, tensors=tensors, problems=(), headers={}, config=config)
    known = {(p.kind, split(p.name)[0]) for p in promise_problems(whole)}
    new = [p for p in promise_problems(cut) if p.severity == "error" and (p.kind, split(p.name)[0]) not in known]
    if new:
        told = "; ".join(f"{p.name}: {p.message}" for p in new[:3])
        raise UsageError(f"layers {spelt(layers)} are no model of their own: {told}; choose others")


def write_cut(plan: Plan, folder: Path, told: Told | None = None, *, hollow: bool = False) -> None:
    """Write a planned folder: configuration, tensors, and the words beside them. All at once, and it goes on."""
    if folder.is_dir():
        return
    with publish_folder(folder) as part:
        if part == folder:
            return
        copy_words(plan.source, part)
        write_tensors(part, plan.pieces, told, hollow=hollow)
        (part / CONFIG).write_text(json.dumps(plan.config, indent=2) + "\n")
        write_cut_file(plan.cut, part)


def copy_words(source: Path, folder: Path) -> None:
    """Copy what stands beside the weights: tokenizer, templates, preprocessor, code.

    Neither index nor weights, nor digests, which are of other files; no link that leaves the folder is followed.
    """
    inside = (source.resolve(), source.resolve().parent.parent / "blobs")
    for path in sorted(source.iterdir()):
        other = path.name in (CONFIG, INDEX, CUT_FILE, MANIFEST, *LISTS) or path.name.endswith(".index.json")
        if other or path.suffix not in _WORD_FILES or not path.is_file() or path.resolve().parent not in inside:
            continue
        if path.stat().st_size <= _WORDS_BYTES:
            shutil.copyfile(path, folder / path.name)
